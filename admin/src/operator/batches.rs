//! Batches of all tenants.

use axum::{Json, extract::Path};
use serde::{Deserialize, Serialize};
use serde_json::json;
use tritmill_queue::store::Page;
use utoipa::ToSchema;

use super::{
    audit, metadata,
    params::{self, LIST_DEFAULT, LIST_MAX, number, parsed},
};
use crate::{
    ApiError, App, Call, Caller, JsonResult, QueryParams,
    batch_conditions::BatchConditions,
    extract::OptionalBody,
    openai::{
        batches::{self, BatchView},
        schemas::PauseRequest,
    },
    store::{Batch, BatchId, batch_changes::BatchChange},
};

/// Conditions on batches, and a page of the list. All given conditions must hold.
#[derive(Debug, Default, Deserialize, utoipa::IntoParams)]
#[serde(default, deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct BatchQuery {
    /// Tenant of the batch.
    #[param(nullable = false)]
    tenant: Option<String>,
    /// `validating`, `in_progress`, `paused`, `finalizing`, `completed`, `failed`, `expired`, `cancelling` or
    /// `cancelled`.
    #[param(nullable = false)]
    state: Option<String>,
    /// A pair of its metadata, `NAME=VALUE`. The latest 10,000 batches are searched for it, for the model and for a text.
    #[param(nullable = false)]
    metadata: Option<String>,
    /// A model of its lines, with or without a format (`MODEL@FORMAT`).
    #[param(nullable = false)]
    model: Option<String>,
    /// Text in its id or in the name of its input file.
    #[param(nullable = false)]
    search: Option<String>,
    /// `true`: archived batches, and no others.
    #[param(nullable = false, value_type = Option<bool>)]
    archived: Option<String>,
    /// Earliest creation time, in milliseconds since 1970.
    #[param(nullable = false, value_type = Option<i64>)]
    from_ms: Option<String>,
    /// End of the creation times (exclusive), in milliseconds since 1970.
    #[param(nullable = false, value_type = Option<i64>)]
    to_ms: Option<String>,
    /// Most batches to return.
    #[param(nullable = false, value_type = Option<u64>, minimum = 1, maximum = 200)]
    limit: Option<String>,
    /// `next` of the previous page.
    #[param(nullable = false)]
    after: Option<String>,
}

/// A batch with its tenant.
#[derive(Serialize, ToSchema)]
pub(crate) struct TenantBatch {
    tenant: String,
    #[serde(flatten)]
    batch: BatchView,
}

impl From<Batch> for TenantBatch {
    fn from(batch: Batch) -> Self {
        Self { tenant: batch.tenant.0.clone(), batch: batch.into() }
    }
}

/// A page of batches.
#[derive(Serialize, ToSchema)]
pub(crate) struct BatchList {
    /// Batches, the latest first.
    data: Vec<TenantBatch>,
    /// Pass as `after` to get the next page.
    next: Option<String>,
}

/// Lists the batches of all tenants.
#[utoipa::path(get, path = "/admin/v1/batches", tag = "batches", params(BatchQuery),
    responses((status = 200, description = "The latest first", body = BatchList)))]
pub(crate) async fn list(
    Call { app, .. }: Call,
    QueryParams(query): QueryParams<BatchQuery>,
) -> JsonResult<BatchList> {
    let limit = number("limit", query.limit.as_deref(), LIST_DEFAULT, LIST_MAX)? as u32;
    let after: Option<BatchId> = parsed("after", "a batch id", query.after.as_deref())?;
    let metadata = query.metadata.as_deref().map(metadata::pair).transpose()?;
    let conditions = BatchConditions {
        tenant: query.tenant.as_deref().map(params::tenant).transpose()?,
        state: ("state", query.state.as_deref()),
        metadata: metadata.into_iter().collect(),
        model: query.model.as_deref(),
        search: query.search.as_deref(),
        archived: query.archived.as_deref(),
        from_ms: query.from_ms.as_deref(),
        to_ms: query.to_ms.as_deref(),
    };
    let page = Page { after, limit: limit + 1, ascending: false };
    let mut found = app.store.find_batches(&conditions.filter()?, page).await?;
    let has_more = found.len() > limit as usize;
    found.truncate(limit as usize);
    let next = found.last().filter(|_| has_more).map(|batch| batch.id.to_string());
    Ok(Json(BatchList { data: found.into_iter().map(TenantBatch::from).collect(), next }))
}

/// Cancels a batch of any tenant.
#[utoipa::path(post, path = "/admin/v1/batches/{id}/cancel", tag = "batches",
    params(("id" = String, Path)),
    responses((status = 200, description = "The batch, which is cancelling", body = TenantBatch)))]
pub(crate) async fn cancel(
    Call { app, caller }: Call,
    Path(id): Path<String>,
) -> JsonResult<TenantBatch> {
    Ok(Json(change_batch(&app, &caller, &id, BatchChange::Cancel).await?.into()))
}

/// Pauses a batch of any tenant, as its tenant does.
#[utoipa::path(post, path = "/admin/v1/batches/{id}/pause", tag = "batches",
    params(("id" = String, Path)), request_body = Option<PauseRequest>,
    responses((status = 200, description = "The batch, which is paused", body = TenantBatch)))]
pub(crate) async fn pause(
    Call { app, caller }: Call,
    Path(id): Path<String>,
    OptionalBody(body): OptionalBody,
) -> JsonResult<TenantBatch> {
    let change = batches::pause_of(body)?;
    Ok(Json(change_batch(&app, &caller, &id, change).await?.into()))
}

/// Resumes a batch of any tenant, as its tenant does.
#[utoipa::path(post, path = "/admin/v1/batches/{id}/resume", tag = "batches",
    params(("id" = String, Path)),
    responses((status = 200, description = "The batch", body = TenantBatch)))]
pub(crate) async fn resume(
    Call { app, caller }: Call,
    Path(id): Path<String>,
) -> JsonResult<TenantBatch> {
    Ok(Json(change_batch(&app, &caller, &id, BatchChange::Resume).await?.into()))
}

/// Runs all lines without an answer of a batch of any tenant again.
#[utoipa::path(post, path = "/admin/v1/batches/{id}/retry", tag = "batches",
    params(("id" = String, Path)),
    responses((status = 200, description = "The batch", body = TenantBatch)))]
pub(crate) async fn retry(
    Call { app, caller }: Call,
    Path(id): Path<String>,
) -> JsonResult<TenantBatch> {
    Ok(Json(change_batch(&app, &caller, &id, BatchChange::retry_all()).await?.into()))
}

/// Finds a batch of any tenant. Only for operators.
pub(crate) async fn find(app: &App, id: &str) -> Result<Batch, ApiError> {
    let unknown = || ApiError::not_found("batch", id);
    let batch: BatchId = id.parse().map_err(|_| unknown())?;
    app.store.batch_of_any_tenant(batch).await?.ok_or_else(unknown)
}

/// Changes a batch of any tenant and records it in the audit log. Only for operators.
pub(crate) async fn change_batch(
    app: &App,
    caller: &Caller,
    id: &str,
    change: BatchChange,
) -> Result<Batch, ApiError> {
    let batch = find(app, id).await?;
    let (action, detail) = (change.action(), json!({ "tenant": batch.tenant }));
    audit::record(app, caller, action, &batch.id.to_string(), detail).await?;
    batches::change_of_tenant(app, caller, (&batch.tenant, batch.id), change).await
}
