//! Dead letters: what they failed with, and what to do about them.

use axum::{
    Extension, Json,
    body::Body,
    extract::{Query, State, rejection::QueryRejection},
};
use serde::{Deserialize, Serialize};
use tritmill_queue::store::{bulk::BulkAction, job_queries::DeadLetterGroup};
use utoipa::ToSchema;

use super::{
    jobs::{self, BulkRequest, BulkView},
    request,
};
use crate::{access::Caller, app::App, error::ApiError, openapi::Refused};

/// Of which queue.
#[derive(Debug, Default, Deserialize, utoipa::IntoParams)]
#[serde(default, deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct QueueQuery {
    /// `MODEL@FORMAT`; all queues without.
    #[param(nullable = false)]
    queue: Option<String>,
}

/// Dead letters that failed alike.
#[derive(Serialize, ToSchema)]
pub(crate) struct GroupView {
    queue: String,
    error_code: String,
    /// The message, numbers and ids aside.
    error_signature: String,
    jobs: u64,
    /// The oldest job.
    first: String,
    /// The latest job.
    last: String,
}

impl From<DeadLetterGroup> for GroupView {
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

/// All groups.
#[derive(Serialize, ToSchema)]
pub(crate) struct GroupList {
    /// The largest first.
    data: Vec<GroupView>,
    /// There are more dead letters: the latest 10,000 were looked at.
    or_more: bool,
}

/// Dead letters by what they failed with; the jobs themselves are listed by `/admin/v1/jobs`.
#[utoipa::path(get, path = "/admin/v1/dead-letters", tag = "dead letters", params(QueueQuery),
    responses((status = 200, description = "The largest group first", body = GroupList),
        (status = "4XX", description = "Refused", body = Refused),
        (status = "5XX", description = "Try again", body = Refused),))]
pub(crate) async fn list(
    State(app): State<App>,
    query: Result<Query<QueueQuery>, QueryRejection>,
) -> Result<Json<GroupList>, ApiError> {
    let queue = request::query(query)?.queue;
    let queue = queue.as_deref().map(request::queue).transpose()?;
    let found = app.store().dead_letter_groups(queue.as_ref()).await?;
    let data = found.groups.into_iter().map(GroupView::from).collect();
    Ok(Json(GroupList { data, or_more: found.or_more }))
}

/// Submits the dead letters that a filter finds again, all at once or so many a second.
#[utoipa::path(post, path = "/admin/v1/dead-letters/replay", tag = "dead letters",
    request_body = BulkRequest,
    responses((status = 200, description = "The new jobs", body = BulkView),
        (status = "4XX", description = "Refused", body = Refused),
        (status = "5XX", description = "Try again", body = Refused),))]
pub(crate) async fn replay(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    body: Body,
) -> Result<Json<BulkView>, ApiError> {
    let replay = |per_second| BulkAction::Replay { per_second };
    jobs::act(&app, &caller, "dead_letters.replay", body, replay).await
}

/// Deletes the dead letters that a filter finds.
#[utoipa::path(post, path = "/admin/v1/dead-letters/purge", tag = "dead letters",
    request_body = BulkRequest,
    responses((status = 200, description = "How many there were", body = BulkView),
        (status = "4XX", description = "Refused", body = Refused),
        (status = "5XX", description = "Try again", body = Refused),))]
pub(crate) async fn purge(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    body: Body,
) -> Result<Json<BulkView>, ApiError> {
    jobs::act(&app, &caller, "dead_letters.purge", body, |_| BulkAction::Purge).await
}
