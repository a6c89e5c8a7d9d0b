//! `/v1/files`: what batches read and write.

use std::sync::Arc;

use axum::{
    Extension, Json,
    body::Body,
    extract::{Path, Query as QueryOf, State, rejection::QueryRejection},
    http::{HeaderMap, HeaderValue, header},
    response::{IntoResponse as _, Response},
};
use bytes::Bytes;
use futures_util::stream;
use serde_json::{Value, json};
use tritmill_queue::{
    Tenant, Timestamp,
    store::{
        FileId, FrontStore, Page,
        files::{FileDeletion, FilePurpose, StoredFile},
    },
};

use super::{
    multipart::{Form, Part},
    paging::{self, Query},
};
use crate::{
    access::Caller,
    app::App,
    error::ApiError,
    file_writer::FileWriter,
    openapi::{File, FileDeleted, FileList, Refused, Upload},
};

/// Files of a list.
const LIST_DEFAULT: u32 = 1000;
const LIST_MAX: u32 = 10_000;
/// Parts of a form, and one that is none.
const PARTS_MAX: usize = 9;
/// How long a file may be asked to be kept, in seconds: an hour to thirty days.
pub(super) const EXPIRES_S: std::ops::RangeInclusive<u64> = 3600..=2_592_000;

/// A file as callers see it.
fn shown(file: &StoredFile) -> Value {
    json!({
        "id": file.id.to_string(),
        "object": "file",
        "bytes": file.size_bytes,
        "created_at": file.created_at.seconds(),
        "expires_at": file.expires_at.map(Timestamp::seconds),
        "filename": file.filename,
        "purpose": file.purpose.as_str(),
        "status": "processed",
    })
}

/// The caller's file of this name.
pub(crate) async fn find(app: &App, tenant: &Tenant, id: &str) -> Result<StoredFile, ApiError> {
    let unknown = || ApiError::not_found("file", id);
    let file: FileId = id.parse().map_err(|_| unknown())?;
    app.store().file(tenant, file).await?.ok_or_else(unknown)
}

/// What a form holds besides the file.
#[derive(Default)]
struct Fields {
    purpose: Option<String>,
    anchor: Option<String>,
    seconds: Option<u64>,
    content: Option<FileWriter>,
}

/// Takes a file.
#[utoipa::path(post, path = "/v1/files", tag = "files",
    request_body(content = Upload, content_type = "multipart/form-data"),
    responses((status = 200, description = "It is kept", body = File),
        (status = "4XX", description = "Refused", body = Refused),
        (status = "5XX", description = "Try again", body = Refused),))]
pub(crate) async fn upload(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    headers: HeaderMap,
    body: Body,
) -> Result<Json<Value>, ApiError> {
    let mut form = Form::of(&headers, body)?;
    let fields = match Fields::read(&app, &caller.tenant, &mut form).await {
        Ok(fields) => fields,
        Err(error) => {
            form.discard().await;
            return Err(error);
        }
    };
    let missing =
        |name: &str| ApiError::invalid("missing_field", format!("{name} is missing")).at(name);
    match fields.purpose.as_deref() {
        Some("batch") => {}
        Some(_) => {
            let message = "purpose must be 'batch'";
            return Err(ApiError::invalid("unsupported_value", message).at("purpose"));
        }
        None => return Err(missing("purpose")),
    }
    let content = fields.content.ok_or_else(|| missing("file"))?;
    let expires_at = match (fields.anchor.as_deref(), fields.seconds) {
        (None, None) => None,
        (Some("created_at"), Some(seconds)) if EXPIRES_S.contains(&seconds) => {
            Some(content.file().created_at.after(std::time::Duration::from_secs(seconds)))
        }
        _ => return Err(bad_expiry("expires_after")),
    };
    let file = content.finish().await?;
    app.store().complete_file(file.id, file.size_bytes, expires_at).await?;
    tracing::info!(key = %caller.key, file = %file.id, bytes = file.size_bytes, "file uploaded");
    Ok(Json(shown(&StoredFile { expires_at, ..file })))
}

/// An expiry that is none.
pub(super) fn bad_expiry(name: &str) -> ApiError {
    let (first, last) = (EXPIRES_S.start(), EXPIRES_S.end());
    let message =
        format!("{name} must be anchor 'created_at' and seconds between {first} and {last}");
    ApiError::invalid("invalid_value", message).at(name)
}

impl Fields {
    async fn read(app: &App, tenant: &Tenant, form: &mut Form) -> Result<Self, ApiError> {
        let mut fields = Self::default();
        for _ in 0..PARTS_MAX {
            match form.next().await? {
                Some(part) => fields.take(app, tenant, part).await?,
                None => return Ok(fields),
            }
        }
        let message = format!("the form has more than {} parts", PARTS_MAX - 1);
        Err(ApiError::invalid("invalid_multipart", message))
    }

    async fn take(&mut self, app: &App, tenant: &Tenant, part: Part) -> Result<(), ApiError> {
        match part.name() {
            "purpose" => self.purpose = Some(part.value().await?),
            "expires_after[anchor]" => self.anchor = Some(part.value().await?),
            "expires_after[seconds]" => {
                let seconds = part.value().await?.parse();
                self.seconds = Some(seconds.map_err(|_| bad_expiry("expires_after"))?);
            }
            "file" if self.content.is_none() => {
                self.content = Some(store(app, tenant, part).await?);
            }
            "file" => {
                let message = "there must be one file";
                return Err(ApiError::invalid("invalid_value", message).at("file"));
            }
            other => {
                let name: String = other.chars().filter(|c| !c.is_control()).take(48).collect();
                let message = format!("'{name}' is not a field of an upload");
                return Err(ApiError::invalid("unknown_parameter", message).at(name));
            }
        }
        Ok(())
    }
}

/// Puts a part into the store as it comes.
pub(crate) async fn store(
    app: &App,
    tenant: &Tenant,
    mut part: Part,
) -> Result<FileWriter, ApiError> {
    let limit = app.limits().file_bytes_max;
    let file = StoredFile {
        id: FileId::generate(),
        tenant: tenant.clone(),
        purpose: FilePurpose::Batch,
        filename: part.filename(),
        size_bytes: 0,
        created_at: Timestamp::default(),
        expires_at: None,
    };
    let mut writer = FileWriter::begin(Arc::clone(app.store()), &file).await?;
    while let Some(piece) = part.piece().await? {
        if writer.size_bytes() + piece.len() as u64 > limit {
            return Err(ApiError::too_large("file", limit));
        }
        writer.write(&piece).await?;
    }
    Ok(writer)
}

/// The caller's files.
#[utoipa::path(get, path = "/v1/files", tag = "files",
    params(Query),
    responses((status = 200, description = "The latest first", body = FileList),
        (status = "4XX", description = "Refused", body = Refused),
        (status = "5XX", description = "Try again", body = Refused),))]
pub(crate) async fn list(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    query: Result<QueryOf<Query>, QueryRejection>,
) -> Result<Json<Value>, ApiError> {
    let query = paging::read(query)?;
    let page: Page<FileId> = query.page(LIST_DEFAULT, LIST_MAX)?;
    let purpose = query.purpose.as_deref().map(str::parse::<FilePurpose>).transpose();
    let purpose = purpose.map_err(|_| {
        let message = "purpose must be 'batch' or 'batch_output'";
        ApiError::invalid("invalid_value", message).at("purpose")
    })?;
    let files = app.store().files(&caller.tenant, purpose, page).await?;
    Ok(Json(paging::list(&page, files.iter().map(shown).collect())))
}

/// What is known of a file.
#[utoipa::path(get, path = "/v1/files/{id}", tag = "files",
    params(("id" = String, Path)),
    responses((status = 200, description = "It is there", body = File),
        (status = "4XX", description = "Refused", body = Refused),
        (status = "5XX", description = "Try again", body = Refused),))]
pub(crate) async fn one(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
) -> Result<Json<Value>, ApiError> {
    Ok(Json(shown(&find(&app, &caller.tenant, &id).await?)))
}

/// What is in it, a chunk at a time.
#[utoipa::path(get, path = "/v1/files/{id}/content", tag = "files",
    params(("id" = String, Path)),
    responses((status = 200, description = "Its content", content_type = "application/octet-stream"),
        (status = "4XX", description = "Refused", body = Refused),
        (status = "5XX", description = "Try again", body = Refused),))]
pub(crate) async fn content(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
) -> Result<Response, ApiError> {
    Ok(whole(&app, &find(&app, &caller.tenant, &id).await?))
}

/// A file's content as a response.
pub(crate) fn whole(app: &App, file: &StoredFile) -> Response {
    let next = (Arc::clone(app.store()), file.id, 0);
    let chunks = stream::try_unfold(next, async |next| {
        let (store, id, number): (Arc<dyn FrontStore>, FileId, u32) = next;
        let chunk = store.chunk(id, number).await?;
        Ok::<_, tritmill_queue::StoreError>(
            chunk.map(|chunk| (Bytes::from(chunk), (store, id, number + 1))),
        )
    });
    let mut response = Body::from_stream(chunks).into_response();
    let headers = response.headers_mut();
    let kind = HeaderValue::from_static("application/octet-stream");
    headers.insert(header::CONTENT_TYPE, kind);
    // So that one that breaks off is seen to.
    headers.insert(header::CONTENT_LENGTH, HeaderValue::from(file.size_bytes));
    response
}

/// Deletes it.
#[utoipa::path(delete, path = "/v1/files/{id}", tag = "files",
    params(("id" = String, Path)),
    responses((status = 200, description = "It is gone", body = FileDeleted),
        (status = "4XX", description = "Refused", body = Refused),
        (status = "5XX", description = "Try again", body = Refused),))]
pub(crate) async fn remove(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
) -> Result<Json<Value>, ApiError> {
    let unknown = || ApiError::not_found("file", &id);
    let file: FileId = id.parse().map_err(|_| unknown())?;
    match app.store().delete_file(&caller.tenant, file).await? {
        FileDeletion::Deleted => Ok(Json(json!({ "id": id, "object": "file", "deleted": true }))),
        FileDeletion::NotFound => Err(unknown()),
        FileDeletion::InUse => {
            let message = "the file is read by a batch that is not over: cancel that first";
            Err(ApiError::invalid("file_in_use", message).at("file_id"))
        }
    }
}
