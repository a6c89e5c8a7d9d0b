//! What operators did.

use axum::{
    Json,
    extract::{Query, State, rejection::QueryRejection},
};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tritmill_queue::{
    Timestamp,
    store::{Page, audit::AuditEntry},
};
use utoipa::ToSchema;
use uuid::Uuid;

use super::request::{self, bounded, parsed};
use crate::{access::Caller, app::App, error::ApiError, openapi::Refused};

const LIST_DEFAULT: u64 = 50;
const LIST_MAX: u64 = 200;

/// Notes what a caller is about to do. What cannot be noted is not done.
pub(crate) async fn note(
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
        action: action.to_owned(),
        target: target.to_owned(),
        detail,
    };
    app.store().record_audit(&line).await?;
    tracing::info!(key = %caller.key, action, target, "an operator acts");
    Ok(())
}

/// Where in the log.
#[derive(Debug, Default, Deserialize, utoipa::IntoParams)]
#[serde(default, deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct LogQuery {
    /// Lines at most.
    #[param(nullable = false, value_type = Option<u64>, minimum = 1, maximum = 200)]
    limit: Option<String>,
    /// The line before the first.
    #[param(nullable = false)]
    after: Option<String>,
}

/// An act.
#[derive(Serialize, ToSchema)]
pub(crate) struct LineView {
    id: String,
    at_ms: i64,
    /// Whose key.
    key_id: Option<String>,
    key_name: String,
    #[schema(examples("queue.pause"))]
    action: String,
    /// On what.
    target: String,
    /// How.
    #[schema(value_type = Object)]
    detail: Value,
}

/// Acts.
#[derive(Serialize, ToSchema)]
pub(crate) struct LineList {
    /// The latest first.
    data: Vec<LineView>,
    /// Give it as `after` to look on.
    next: Option<String>,
}

/// What operators did, the latest first.
#[utoipa::path(get, path = "/admin/v1/audit", tag = "service", params(LogQuery),
    responses((status = 200, description = "The latest first", body = LineList),
        (status = "4XX", description = "Refused", body = Refused),
        (status = "5XX", description = "Try again", body = Refused),))]
pub(crate) async fn list(
    State(app): State<App>,
    query: Result<Query<LogQuery>, QueryRejection>,
) -> Result<Json<LineList>, ApiError> {
    let LogQuery { limit, after } = request::query(query)?;
    let expected = format!("between 1 and {LIST_MAX}");
    let limit =
        bounded("limit", parsed("limit", &expected, limit.as_deref())?, LIST_DEFAULT, LIST_MAX)?;
    let after = parsed("after", "a line's id", after.as_deref())?;
    let page = Page { after, limit: limit as u32, ascending: false };
    let lines = app.store().audit_log(page).await?;
    let is_full = lines.len() as u64 == limit;
    let next = lines.last().filter(|_| is_full).map(|line| line.id.to_string());
    let shown = |line: AuditEntry| LineView {
        id: line.id.to_string(),
        at_ms: line.at.0,
        key_id: line.key.map(|key| key.to_string()),
        key_name: line.key_name,
        action: line.action,
        target: line.target,
        detail: line.detail,
    };
    Ok(Json(LineList { data: lines.into_iter().map(shown).collect(), next }))
}
