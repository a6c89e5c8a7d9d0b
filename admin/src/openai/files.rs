//! `/v1/files`: input and output of batches.

use std::time::Duration;

use axum::{Extension, Json, body::Body, extract::Path, http::HeaderMap, response::Response};
use serde::Serialize;
use tritmill_queue::{Tenant, Timestamp, store::Page};
use utoipa::ToSchema;

use super::{
    file_content, idempotency,
    list::{FileListQuery, List},
    multipart::{Form, Part},
    schemas::Upload,
};
use crate::{
    ApiError, App, Call, Exchange, FileWriter, JsonResult, QueryParams,
    store::{
        FileId,
        files::{Completion, FileDeletion, FilePurpose, StoredFile, UploadKey},
    },
    tenant_limits,
};

/// Files of a list by default, and at most.
const LIST_DEFAULT: u32 = 1000;
const LIST_MAX: u32 = 10_000;
/// Most parts of a form, plus one.
const PARTS_MAX: usize = 9;
/// Bounds of a file's lifetime in seconds: one hour to thirty days.
pub(super) const EXPIRES_S: std::ops::RangeInclusive<u64> = 3600..=2_592_000;

/// A file, without its content.
#[derive(Serialize, ToSchema)]
pub(crate) struct File {
    id: String,
    object: &'static str,
    bytes: u64,
    created_at: i64,
    expires_at: Option<i64>,
    filename: String,
    /// `batch` or `batch_output`.
    purpose: &'static str,
    status: &'static str,
}

impl From<StoredFile> for File {
    fn from(file: StoredFile) -> Self {
        Self {
            id: file.id.to_string(),
            object: "file",
            bytes: file.size_bytes,
            created_at: file.created_at.seconds(),
            expires_at: file.expires_at.map(Timestamp::seconds),
            filename: file.filename,
            purpose: file.purpose.as_str(),
            status: "processed",
        }
    }
}

/// Finds a file of the tenant.
pub(crate) async fn find(app: &App, tenant: &Tenant, id: &str) -> Result<StoredFile, ApiError> {
    let unknown = || ApiError::not_found("file", id);
    let file: FileId = id.parse().map_err(|_| unknown())?;
    app.store.file(tenant, file).await?.ok_or_else(unknown)
}

/// The fields of an upload form.
#[derive(Default)]
struct UploadForm {
    purpose: Option<String>,
    anchor: Option<String>,
    seconds: Option<u64>,
    content: Option<FileWriter>,
}

/// Uploads a file.
#[utoipa::path(post, path = "/v1/files", tag = "files",
    request_body(content = Upload, content_type = "multipart/form-data"),
    params(("Idempotency-Key" = Option<String>, Header,
        description = "Uploads with the same key create one file, which is returned each time")),
    responses((status = 200, description = "The file", body = File)))]
pub(crate) async fn upload(
    Call { app, caller }: Call,
    Extension(exchange): Extension<Exchange>,
    headers: HeaderMap,
    body: Body,
) -> JsonResult<File> {
    let key = idempotency::key(&headers)?;
    let mut form = Form::new(&exchange, &headers, body)?;
    let fields = match UploadForm::read(&app, &caller.tenant, &mut form).await {
        Ok(fields) => fields,
        Err(error) => {
            form.drain().await;
            return Err(error);
        }
    };
    match fields.purpose.as_deref() {
        Some("batch") => {}
        Some(_) => {
            let message = "purpose must be 'batch'";
            return Err(ApiError::invalid("unsupported_value", message).at("purpose"));
        }
        None => return Err(ApiError::missing_field("purpose")),
    }
    let content = fields.content.ok_or_else(|| ApiError::missing_field("file"))?;
    let expires_at = match (fields.anchor.as_deref(), fields.seconds) {
        (None, None) => None,
        (Some("created_at"), Some(seconds)) if EXPIRES_S.contains(&seconds) => {
            Some(content.file().created_at.after(Duration::from_secs(seconds)))
        }
        _ => return Err(invalid_expiry("expires_after")),
    };
    let content_hash = content.sha256();
    let file = StoredFile { expires_at, ..content.finish().await? };
    let Some(key) = key else {
        app.store.complete_file(file.id, file.size_bytes, expires_at).await?;
        tracing::info!(key = %caller.key, file = %file.id, bytes = file.size_bytes, "file uploaded");
        return Ok(Json(file.into()));
    };
    let lifetime_s = fields.seconds.unwrap_or_default().to_be_bytes();
    let request_hash = idempotency::hash([file.filename.as_bytes(), &lifetime_s, &content_hash]);
    let upload = UploadKey { key: &key, request_hash: &request_hash };
    let completed = app.store.complete_file_once(&file, upload).await;
    if !matches!(completed, Ok(Completion::New)) {
        // If it cannot be deleted, the daily sweep does.
        let _ = app.store.abandon_file(file.id).await;
    }
    match completed? {
        Completion::New => Ok(Json(file.into())),
        Completion::Known(known) => Ok(Json((*known).into())),
        Completion::Conflict => Err(idempotency::conflict("upload")),
    }
}

/// The error for an invalid expiry.
pub(super) fn invalid_expiry(param: &str) -> ApiError {
    let (first, last) = (EXPIRES_S.start(), EXPIRES_S.end());
    let message =
        format!("{param} must have anchor 'created_at' and seconds between {first} and {last}");
    ApiError::invalid_value(param, message)
}

impl UploadForm {
    async fn read(app: &App, tenant: &Tenant, form: &mut Form) -> Result<Self, ApiError> {
        let mut fields = Self::default();
        for _ in 0..PARTS_MAX {
            match form.next().await? {
                Some(part) => fields.read_part(app, tenant, part).await?,
                None => return Ok(fields),
            }
        }
        let message = format!("the form has more than {} parts", PARTS_MAX - 1);
        Err(ApiError::invalid("invalid_multipart", message))
    }

    async fn read_part(&mut self, app: &App, tenant: &Tenant, part: Part) -> Result<(), ApiError> {
        match part.name() {
            "purpose" => self.purpose = Some(part.value().await?),
            "expires_after[anchor]" => self.anchor = Some(part.value().await?),
            "expires_after[seconds]" => {
                let seconds = part.value().await?.parse();
                self.seconds = Some(seconds.map_err(|_| invalid_expiry("expires_after"))?);
            }
            "file" if self.content.is_none() => {
                self.content = Some(store(app, tenant, part).await?);
            }
            "file" => return Err(ApiError::invalid_value("file", "only one file is allowed")),
            other => {
                let name: String = other.chars().filter(|c| !c.is_control()).take(48).collect();
                let message = format!("unknown upload field '{name}'");
                return Err(ApiError::invalid("unknown_parameter", message).at(name));
            }
        }
        Ok(())
    }
}

/// Stores the content of a part while it arrives.
pub(crate) async fn store(
    app: &App,
    tenant: &Tenant,
    mut part: Part,
) -> Result<FileWriter, ApiError> {
    let room = tenant_limits::file_room(app, tenant).await?;
    let file = StoredFile {
        id: FileId::generate(),
        tenant: tenant.clone(),
        purpose: FilePurpose::Batch,
        filename: part.filename(),
        size_bytes: 0,
        created_at: Timestamp::default(),
        expires_at: None,
    };
    let mut writer = FileWriter::begin(app, &file).await?;
    while let Some(chunk) = part.chunk().await? {
        room.check(writer.size_bytes() + chunk.len() as u64)?;
        writer.write(&chunk).await?;
    }
    Ok(writer)
}

/// Lists the tenant's files.
#[utoipa::path(get, path = "/v1/files", tag = "files", params(FileListQuery),
    responses((status = 200, description = "The latest first", body = List<File>)))]
pub(crate) async fn list(
    Call { app, caller }: Call,
    QueryParams(query): QueryParams<FileListQuery>,
) -> JsonResult<List<File>> {
    let (page, purpose) = query.split();
    let page: Page<FileId> = page.page(LIST_DEFAULT, LIST_MAX)?;
    let purpose = purpose.as_deref().map(str::parse::<FilePurpose>).transpose();
    let purpose = purpose.map_err(|_| {
        ApiError::invalid_value("purpose", "purpose must be 'batch' or 'batch_output'")
    })?;
    let files = app.store.files(&caller.tenant, purpose, page).await?;
    let files = files.into_iter().map(File::from).collect();
    Ok(Json(List::new(&page, files, |file| &file.id)))
}

/// Returns a file, without its content.
#[utoipa::path(get, path = "/v1/files/{id}", tag = "files", params(("id" = String, Path)),
    responses((status = 200, description = "The file", body = File)))]
pub(crate) async fn one(Call { app, caller }: Call, Path(id): Path<String>) -> JsonResult<File> {
    Ok(Json(find(&app, &caller.tenant, &id).await?.into()))
}

/// Returns the content of a file, or one range of it.
#[utoipa::path(get, path = "/v1/files/{id}/content", tag = "files",
    params(("id" = String, Path),
        ("Range" = Option<String>, Header, description = "One range of bytes, such as `bytes=0-1023`"),
        ("If-Range" = Option<String>, Header,
            description = "An `ETag`: with another one the whole content is sent, not the range"),
        ("If-None-Match" = Option<String>, Header, description = "The `ETag` of content that the caller has")),
    responses(
        (status = 200, description = "The content, compressed if `Accept-Encoding` has `gzip`",
            content_type = "application/octet-stream"),
        (status = 206, description = "The range", content_type = "application/octet-stream"),
        (status = 304, description = "The caller has the content")))]
pub(crate) async fn content(
    Call { app, caller }: Call,
    Path(id): Path<String>,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    Ok(file_content::respond(&app, &find(&app, &caller.tenant, &id).await?, &headers))
}

/// A deleted file.
#[derive(Serialize, ToSchema)]
pub(crate) struct FileDeleted {
    id: String,
    object: &'static str,
    deleted: bool,
}

/// Deletes a file.
#[utoipa::path(delete, path = "/v1/files/{id}", tag = "files", params(("id" = String, Path)),
    responses((status = 200, description = "The file is deleted", body = FileDeleted)))]
pub(crate) async fn remove(
    Call { app, caller }: Call,
    Path(id): Path<String>,
) -> JsonResult<FileDeleted> {
    delete(&app, &caller.tenant, &id).await?;
    Ok(Json(FileDeleted { id, object: "file", deleted: true }))
}

/// Deletes a file of a tenant.
pub(crate) async fn delete(app: &App, tenant: &Tenant, id: &str) -> Result<(), ApiError> {
    let unknown = || ApiError::not_found("file", id);
    let file: FileId = id.parse().map_err(|_| unknown())?;
    match app.files.delete_file(tenant, file).await? {
        FileDeletion::Deleted => Ok(()),
        FileDeletion::NotFound => Err(unknown()),
        FileDeletion::InUse => {
            let message = "the file is in use by an unfinished batch: cancel the batch first";
            Err(ApiError::invalid("file_in_use", message).at("file_id"))
        }
    }
}
