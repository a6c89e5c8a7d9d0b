//! `/v1/batches/{id}/lines` and `seal`: batches that lines are added to while they run.
//!
//! A line that is added is checked at once: a request adds all its lines, or none and names the first that is wrong.

use axum::{
    Json,
    extract::{Path, Request},
};
use serde::Serialize;
use utoipa::ToSchema;

use super::{BatchView, change_own, find};
use crate::{
    ApiError, App, Call, JsonResult,
    added_lines::{self, AddError, Added, BYTES_MAX, LineBounds},
    error::ErrorResponse,
    extract::bounded,
    store::{
        Batch, FileId,
        batch_changes::BatchChange,
        files::{ChunkContent, FILE_CHUNK_BYTES, FilePurpose, StoredFile},
    },
    tenant_limits,
};

/// Creates the file of an open batch, with the lines of a file that was given.
pub(super) async fn own_input(
    app: &App,
    batch: &Batch,
    given: Option<&StoredFile>,
) -> Result<(), ApiError> {
    let size_bytes = given.map_or(0, |file| file.size_bytes);
    tenant_limits::file_room(app, &batch.tenant).await?.check(size_bytes)?;
    let file = StoredFile {
        id: batch.input,
        tenant: batch.tenant.clone(),
        purpose: FilePurpose::Batch,
        filename: given.map_or_else(|| "lines.jsonl".to_owned(), |file| file.filename.clone()),
        size_bytes,
        created_at: batch.created_at,
        expires_at: None,
    };
    app.store.create_file(&file).await?;
    let size_bytes = match given {
        Some(given) => copy_lines(app, given, file.id).await?,
        None => 0,
    };
    Ok(app.store.complete_file(file.id, size_bytes, None).await?)
}

/// Copies the content of a file to an incomplete one, and ends its last line: what is added must not change the numbers of lines.
/// Lines are added in transactions, so the copy is in the database, wherever the content of other files is. Returns its size.
async fn copy_lines(app: &App, from: &StoredFile, to: FileId) -> Result<u64, ApiError> {
    let (mut number, mut size_bytes, mut is_ended) = (0, 0, true);
    loop {
        let chunk = app.files.chunk(from.id, number).await?;
        let is_last = chunk.as_ref().is_none_or(|chunk| chunk.len() < FILE_CHUNK_BYTES);
        let mut bytes = chunk.unwrap_or_default();
        is_ended = bytes.last().map_or(is_ended, |last| *last == b'\n');
        if is_last && !is_ended {
            bytes.push(b'\n');
        }
        if !bytes.is_empty() {
            app.store.put_chunk(to, number, ChunkContent::Bytes(&bytes)).await?;
        }
        size_bytes += bytes.len() as u64;
        number += 1;
        if is_last {
            return Ok(size_bytes);
        }
    }
}

/// Lines that were added.
#[derive(Serialize, ToSchema)]
pub(crate) struct LinesAdded {
    object: &'static str,
    batch_id: String,
    /// Lines that are new.
    added: u64,
    /// Lines that the batch had already.
    known: u64,
    /// Lines of the batch with them.
    total: u64,
}

/// Adds lines to an open batch: all of them, or none. A line that the batch has already is not added again; another request
/// with its `custom_id` is refused.
#[utoipa::path(post, path = "/v1/batches/{id}/lines", tag = "batches", params(("id" = String, Path)),
    request_body(content = String, content_type = "text/plain",
        description = "Lines as those of a batch file: at most 10,000, and 8 MiB"),
    responses((status = 200, description = "All lines are in the batch", body = LinesAdded),
        (status = 409, body = ErrorResponse,
         description = "`batch_closed`: it was not created open, is sealed or has ended; `custom_id_taken`: by another \
                        request; `batch_validating`: its file is being checked")))]
pub(crate) async fn add_lines(
    Call { app, caller }: Call,
    Path(id): Path<String>,
    request: Request,
) -> JsonResult<LinesAdded> {
    let bytes = bounded(request, BYTES_MAX).await?;
    let batch = find(&app, &caller, &id).await?;
    app.budget_checks.check(&app, &caller).await?;
    tenant_limits::file_room(&app, &caller.tenant).await?.check(bytes.len() as u64)?;
    let bounds =
        LineBounds { lines_max: app.limits.batch_lines_max, bytes_max: app.limits.file_bytes_max };
    let added = added_lines::add(&*app.store, &app.models, &batch, &bytes, bounds).await?;
    let unknown = || ApiError::not_found("batch", &id);
    let Added { batch, added, known } = added.ok_or_else(unknown)?;
    app.batch_changed.notify_one();
    tracing::debug!(key = %caller.key, batch = %batch.id, added, known, "lines added");
    let (batch_id, total) = (batch.id.to_string(), batch.total_lines());
    Ok(Json(LinesAdded { object: "batch.lines", batch_id, added, known, total }))
}

impl From<AddError> for ApiError {
    fn from(error: AddError) -> Self {
        let message = error.to_string();
        match error {
            AddError::Store(error) => error.into(),
            AddError::Conflict { code: code @ "batch_validating", .. } => {
                Self::conflict(code, &message).soon()
            }
            AddError::Conflict { code, param, .. } => {
                let error = Self::conflict(code, &message);
                param.into_iter().fold(error, Self::at)
            }
            AddError::Invalid { code, param, .. } => {
                let error = Self::invalid(&code, message);
                param.into_iter().fold(error, Self::at)
            }
            AddError::TooLarge(bytes) => Self::too_large("file of the batch", bytes),
        }
    }
}

/// Seals an open batch: no more lines are added, and it ends when its lines have.
#[utoipa::path(post, path = "/v1/batches/{id}/seal", tag = "batches", params(("id" = String, Path)),
    responses((status = 200, description = "The batch, which is sealed", body = BatchView),
        (status = 409, description = "The batch was not created open", body = ErrorResponse)))]
pub(crate) async fn seal(
    Call { app, caller }: Call,
    Path(id): Path<String>,
) -> JsonResult<BatchView> {
    Ok(Json(change_own(&app, &caller, &id, BatchChange::Seal).await?.into()))
}
