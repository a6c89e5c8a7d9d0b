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
    ApiError, Call, JsonResult,
    added_lines::{self, AddError, Added, BYTES_MAX, LineBounds},
    error::ErrorResponse,
    extract::bounded,
    store::batch_changes::BatchChange,
    tenant_limits,
};

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
