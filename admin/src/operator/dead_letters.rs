//! Dead letters: groups by error, replay and purge.

use axum::{Json, extract::State};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use tritmill_queue::store::{bulk::BulkAction, job_queries::DeadLetterGroup};
use utoipa::ToSchema;

use super::{
    jobs::{self, BulkRequest, BulkResult},
    params,
};
use crate::{App, Call, JsonBody, JsonResult, QueryParams};

/// Selects a queue.
#[derive(Debug, Default, Deserialize, utoipa::IntoParams)]
#[serde(default, deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct QueueQuery {
    /// `MODEL@FORMAT`; all queues by default.
    #[param(nullable = false)]
    queue: Option<String>,
}

/// Dead letters of a queue with the same error.
#[derive(Serialize, ToSchema)]
pub(crate) struct DeadLetterGroupView {
    queue: String,
    error_code: String,
    /// The error message without numbers and ids.
    error_signature: String,
    jobs: u64,
    /// The oldest job.
    first: String,
    /// The latest job.
    last: String,
}

impl From<DeadLetterGroup> for DeadLetterGroupView {
    fn from(group: DeadLetterGroup) -> Self {
        Self {
            queue: group.queue.to_string(),
            error_code: group.error_code,
            error_signature: group.error_signature,
            jobs: group.jobs,
            first: group.first.to_string(),
            last: group.last.to_string(),
        }
    }
}

/// Groups of dead letters.
#[derive(Serialize, ToSchema)]
pub(crate) struct DeadLetterGroupList {
    /// Groups, the largest first.
    data: Vec<DeadLetterGroupView>,
    /// True if there are more dead letters than the latest 10,000, which were counted.
    or_more: bool,
}

/// Lists dead letters in groups by error. `/admin/v1/jobs` lists the jobs themselves.
#[utoipa::path(get, path = "/admin/v1/dead-letters", tag = "dead letters", params(QueueQuery),
    responses((status = 200, description = "The largest group first", body = DeadLetterGroupList)))]
pub(crate) async fn list(
    State(app): State<App>,
    QueryParams(QueueQuery { queue }): QueryParams<QueueQuery>,
) -> JsonResult<DeadLetterGroupList> {
    let queue = queue.as_deref().map(params::queue).transpose()?;
    let found = app.store.dead_letter_groups(queue.as_ref()).await?;
    let data = found.groups.into_iter().map(DeadLetterGroupView::from).collect();
    Ok(Json(DeadLetterGroupList { data, or_more: found.or_more }))
}

/// Submits the dead letters that match a filter again, all at once or at a rate per second.
#[utoipa::path(post, path = "/admin/v1/dead-letters/replay", tag = "dead letters",
    request_body = BulkRequest,
    responses((status = 200, description = "The new jobs", body = BulkResult)))]
pub(crate) async fn replay(
    Call { app, caller }: Call,
    JsonBody(body): JsonBody<Map<String, Value>>,
) -> JsonResult<BulkResult> {
    let replay = |per_second| BulkAction::Replay { per_second };
    jobs::bulk(&app, &caller, "dead_letters.replay", body, replay).await
}

/// Deletes the dead letters that match a filter.
#[utoipa::path(post, path = "/admin/v1/dead-letters/purge", tag = "dead letters",
    request_body = BulkRequest,
    responses((status = 200, description = "Number of deleted dead letters", body = BulkResult)))]
pub(crate) async fn purge(
    Call { app, caller }: Call,
    JsonBody(body): JsonBody<Map<String, Value>>,
) -> JsonResult<BulkResult> {
    jobs::bulk(&app, &caller, "dead_letters.purge", body, |_| BulkAction::Purge).await
}
