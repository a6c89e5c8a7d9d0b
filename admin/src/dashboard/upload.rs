//! Upload of a batch: stores the file while it arrives, then creates the batch.

use axum::{Extension, body::Body, http::HeaderMap};
use serde_json::{Map, Value};

use super::{PageResult, Visit};
use crate::{
    ApiError, App, Caller, Exchange, FileWriter,
    openai::{
        batches, files,
        multipart::{Form, Part},
    },
};

/// Fields of the form beside the file, by their names in the API.
const FIELDS: [&str; 3] = ["endpoint", "completion_window", "priority"];

/// Stores a file and creates a batch from it.
pub(crate) async fn upload(
    visit: Visit,
    Extension(exchange): Extension<Exchange>,
    headers: HeaderMap,
    body: Body,
) -> PageResult {
    let mut form = Form::new(&exchange, &headers, body)?;
    let fields = match UploadForm::read(&visit.app, &visit.caller, &mut form).await {
        Ok(fields) => fields,
        Err(error) => {
            form.drain().await;
            return Err(error.into());
        }
    };
    let batch = fields.create_batch(&visit.app, &visit.caller).await?;
    let page = format!("/dashboard/batches/{batch}");
    Ok(visit.done(&page, "The file is uploaded. Its lines are checked first, then answered."))
}

/// The fields of the form.
#[derive(Default)]
struct UploadForm {
    request: Map<String, Value>,
    content: Option<FileWriter>,
}

impl UploadForm {
    async fn read(app: &App, caller: &Caller, form: &mut Form) -> Result<Self, ApiError> {
        let mut fields = Self::default();
        while let Some(part) = form.next().await? {
            fields.read_part(app, caller, part).await?;
        }
        Ok(fields)
    }

    async fn read_part(&mut self, app: &App, caller: &Caller, part: Part) -> Result<(), ApiError> {
        let name = part.name().to_owned();
        match name.as_str() {
            "file" => self.content = Some(files::store(app, &caller.tenant, part).await?),
            known if FIELDS.contains(&known) => {
                self.request.insert(name, Value::String(part.value().await?));
            }
            _ => return Err(ApiError::invalid("unknown_parameter", "unknown form field")),
        }
        Ok(())
    }

    /// Creates the batch and returns its id. Deletes the file if that fails.
    async fn create_batch(mut self, app: &App, caller: &Caller) -> Result<String, ApiError> {
        let content = self.content.filter(|content| content.size_bytes() > 0);
        let content = content.ok_or_else(|| {
            ApiError::invalid("missing_field", "choose a file with one request per line").at("file")
        })?;
        let file = content.finish().await?;
        app.store.complete_file(file.id, file.size_bytes, None).await?;
        self.request.insert("input_file_id".to_owned(), Value::String(file.id.to_string()));
        match batches::create_batch(app, caller, self.request, None).await {
            Ok(batch) => Ok(batch.id.to_string()),
            Err(error) => {
                // The file has no expiry. If it cannot be deleted, the caller sees it in its files.
                let _ = app.store.delete_file(&caller.tenant, file.id).await;
                Err(error)
            }
        }
    }
}
