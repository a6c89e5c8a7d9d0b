//! A batch from a form: the file as it comes, and what is asked for it.

use axum::{body::Body, extract::State, http::HeaderMap, response::Response};
use serde_json::{Map, Value};

use super::page::{PageError, Visit};
use crate::{
    access::Caller,
    app::App,
    error::ApiError,
    file_writer::FileWriter,
    openai::{
        batches, files,
        multipart::{Form, Part},
    },
};

/// What the form has beside the file, by the names of the API.
const FIELDS: [&str; 3] = ["endpoint", "completion_window", "priority"];

/// Takes a file and makes a batch of it.
pub(crate) async fn upload(
    visit: Visit,
    State(app): State<App>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, PageError> {
    let mut form = Form::of(&headers, body)?;
    let filled = match Filled::read(&app, &visit.caller, &mut form).await {
        Ok(filled) => filled,
        Err(error) => {
            form.discard().await;
            return Err(error.into());
        }
    };
    let batch = filled.take(&app, &visit.caller).await?;
    let there = format!("/dashboard/batches/{batch}");
    Ok(visit.done(&there, "The file is here. Its lines are checked now, then answered."))
}

/// What was filled in.
#[derive(Default)]
struct Filled {
    asked: Map<String, Value>,
    content: Option<FileWriter>,
}

impl Filled {
    async fn read(app: &App, caller: &Caller, form: &mut Form) -> Result<Self, ApiError> {
        let mut filled = Self::default();
        while let Some(part) = form.next().await? {
            filled.part(app, caller, part).await?;
        }
        Ok(filled)
    }

    async fn part(&mut self, app: &App, caller: &Caller, part: Part) -> Result<(), ApiError> {
        let name = part.name().to_owned();
        match name.as_str() {
            "file" => self.content = Some(files::store(app, &caller.tenant, part).await?),
            known if FIELDS.contains(&known) => {
                self.asked.insert(name, Value::String(part.value().await?));
            }
            _ => return Err(ApiError::invalid("unknown_parameter", "the form is not this page's")),
        }
        Ok(())
    }

    /// The new batch's name. A file that no batch is made of is not kept.
    async fn take(mut self, app: &App, caller: &Caller) -> Result<String, ApiError> {
        let content = self.content.filter(|content| content.size_bytes() > 0);
        let content = content.ok_or_else(|| {
            ApiError::invalid("missing_field", "choose a file with one request per line").at("file")
        })?;
        let file = content.finish().await?;
        app.store().complete_file(file.id, file.size_bytes, None).await?;
        self.asked.insert("input_file_id".to_owned(), Value::String(file.id.to_string()));
        match batches::take(app, caller, self.asked, None).await {
            Ok(batch) => Ok(batch.id.to_string()),
            Err(error) => {
                // It expires by no clock, so it goes now; if not, it is among the caller's files.
                let _ = app.store().delete_file(&caller.tenant, file.id).await;
                Err(error)
            }
        }
    }
}
