//! The audit log: what operators did.

use axum::{Json, extract::State};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tritmill_queue::{Timestamp, store::Page};
use utoipa::ToSchema;
use uuid::Uuid;

use super::params::{LIST_DEFAULT, LIST_MAX, number, parsed};
use crate::{ApiError, App, Caller, JsonResult, QueryParams, store::audit::AuditEntry};

/// Records what a caller is about to do. If this fails, the action must not be done.
pub(crate) async fn record(
    app: &App,
    caller: &Caller,
    action: &str,
    target: &str,
    detail: Value,
) -> Result<(), ApiError> {
    let line = AuditEntry {
        id: Uuid::now_v7(),
        at: Timestamp::default(),
        key: Some(caller.key),
        key_name: caller.name.clone(),
        address: caller.address.map(|address| address.to_string()),
        action: action.to_owned(),
        target: target.to_owned(),
        detail,
    };
    app.store.record_audit(&line).await?;
    tracing::info!(key = %caller.key, action, target, "operator action");
    Ok(())
}

/// A page of the audit log.
#[derive(Debug, Default, Deserialize, utoipa::IntoParams)]
#[serde(default, deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct AuditQuery {
    /// Most entries to return.
    #[param(nullable = false, value_type = Option<u64>, minimum = 1, maximum = 200)]
    limit: Option<String>,
    /// `next` of the previous page.
    #[param(nullable = false)]
    after: Option<String>,
}

/// An action of an operator.
#[derive(Serialize, ToSchema)]
pub(crate) struct AuditEntryView {
    id: String,
    at_ms: i64,
    /// API key; null for the command line.
    key_id: Option<String>,
    key_name: String,
    /// Address that the request came from; null for the command line.
    address: Option<String>,
    #[schema(examples("queue.pause"))]
    action: String,
    /// What the action applied to.
    target: String,
    /// Parameters of the action.
    #[schema(value_type = Object)]
    detail: Value,
}

impl From<AuditEntry> for AuditEntryView {
    fn from(line: AuditEntry) -> Self {
        Self {
            id: line.id.to_string(),
            at_ms: line.at.0,
            key_id: line.key.map(|key| key.to_string()),
            key_name: line.key_name,
            address: line.address,
            action: line.action,
            target: line.target,
            detail: line.detail,
        }
    }
}

/// A page of the audit log.
#[derive(Serialize, ToSchema)]
pub(crate) struct AuditList {
    /// Entries, the latest first.
    data: Vec<AuditEntryView>,
    /// Pass as `after` to get the next page.
    next: Option<String>,
}

/// Lists what operators did, the latest first.
#[utoipa::path(get, path = "/admin/v1/audit", tag = "service", params(AuditQuery),
    responses((status = 200, description = "The latest first", body = AuditList)))]
pub(crate) async fn list(
    State(app): State<App>,
    QueryParams(AuditQuery { limit, after }): QueryParams<AuditQuery>,
) -> JsonResult<AuditList> {
    let limit = number("limit", limit.as_deref(), LIST_DEFAULT, LIST_MAX)?;
    let after = parsed("after", "an entry's id", after.as_deref())?;
    let page = Page { after, limit: limit as u32, ascending: false };
    let lines = app.store.audit_log(page).await?;
    let is_full = lines.len() as u64 == limit;
    let next = lines.last().filter(|_| is_full).map(|line| line.id.to_string());
    Ok(Json(AuditList { data: lines.into_iter().map(AuditEntryView::from).collect(), next }))
}
