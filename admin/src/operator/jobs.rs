//! Jobs: lists of them, and acts on many at once.

use axum::{
    Extension, Json,
    body::Body,
    extract::{Query, State, rejection::QueryRejection},
};
use serde::{Deserialize, Serialize};
use serde_json::json;
use tritmill_queue::{
    JobId, Timestamp,
    store::{
        Page,
        bulk::{self, BULK_MAX, BulkAction, BulkResult},
        job_queries::{Count, JobSummary},
    },
};
use utoipa::ToSchema;

use super::{
    log,
    request::{self, Filter, bounded, parsed},
};
use crate::{access::Caller, app::App, error::ApiError, json, openapi::Refused};

const LIST_DEFAULT: u64 = 50;
const LIST_MAX: u64 = 200;

/// Where in a list.
#[derive(Debug, Default, Deserialize, utoipa::IntoParams)]
#[serde(default)]
#[into_params(parameter_in = Query)]
pub(crate) struct Place {
    /// Jobs at most.
    #[param(nullable = false, value_type = Option<u64>, minimum = 1, maximum = 200)]
    limit: Option<String>,
    /// `next` of the page before.
    #[param(nullable = false)]
    after: Option<String>,
}

/// A filter and a place in one query.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct ListQuery {
    limit: Option<String>,
    after: Option<String>,
    tenant: Option<String>,
    model: Option<String>,
    format: Option<String>,
    state: Option<String>,
    error_code: Option<String>,
    error_signature: Option<String>,
    custom_id: Option<String>,
    batch: Option<String>,
    from_ms: Option<String>,
    to_ms: Option<String>,
}

impl ListQuery {
    fn read(self) -> Result<(Filter, Page<JobId>), ApiError> {
        let expected = format!("between 1 and {LIST_MAX}");
        let limit = parsed("limit", &expected, self.limit.as_deref())?;
        let limit = bounded("limit", limit, LIST_DEFAULT, LIST_MAX)?;
        let after = parsed("after", "a job's id", self.after.as_deref())?;
        let filter = Filter {
            tenant: self.tenant,
            model: self.model,
            format: self.format,
            state: self.state,
            error_code: self.error_code,
            error_signature: self.error_signature,
            custom_id: self.custom_id,
            batch: self.batch,
            from_ms: parsed("from_ms", "milliseconds", self.from_ms.as_deref())?,
            to_ms: parsed("to_ms", "milliseconds", self.to_ms.as_deref())?,
        };
        Ok((filter, Page { after, limit: limit as u32, ascending: false }))
    }
}

/// A job in a list.
#[derive(Serialize, ToSchema)]
pub(crate) struct JobView {
    id: String,
    tenant: String,
    queue: String,
    priority: &'static str,
    state: &'static str,
    attempts: u32,
    custom_id: Option<String>,
    /// Who claimed it last.
    worker: Option<String>,
    error_code: Option<String>,
    submitted_at_ms: i64,
    started_at_ms: Option<i64>,
    finished_at_ms: Option<i64>,
    prompt_tokens: u64,
    completion_tokens: u64,
}

impl From<JobSummary> for JobView {
    fn from(job: JobSummary) -> Self {
        let ms = |at: Option<Timestamp>| at.map(|at| at.0);
        Self {
            id: job.id.to_string(),
            tenant: job.tenant.0,
            queue: job.queue.to_string(),
            priority: job.priority.as_str(),
            state: job.state.as_str(),
            attempts: job.attempts,
            custom_id: job.custom_id,
            worker: job.owner,
            error_code: job.error_code,
            submitted_at_ms: job.submitted_at.0,
            started_at_ms: ms(job.started_at),
            finished_at_ms: ms(job.finished_at),
            prompt_tokens: job.prompt_tokens,
            completion_tokens: job.completion_tokens,
        }
    }
}

/// Some jobs.
#[derive(Serialize, ToSchema)]
pub(crate) struct JobList {
    /// The latest first.
    data: Vec<JobView>,
    /// Give it as `after` to look on; also when nothing was found so far.
    next: Option<String>,
}

/// The caller's jobs; an operator's, all.
#[utoipa::path(get, path = "/admin/v1/jobs", tag = "jobs", params(Filter, Place),
    responses((status = 200, description = "The latest first", body = JobList),
        (status = "4XX", description = "Refused", body = Refused),
        (status = "5XX", description = "Try again", body = Refused),))]
pub(crate) async fn list(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    query: Result<Query<ListQuery>, QueryRejection>,
) -> Result<Json<JobList>, ApiError> {
    let (filter, page) = request::query(query)?.read()?;
    let found = app.store().jobs(&filter.of(&caller)?, page).await?;
    let data = found.jobs.into_iter().map(JobView::from).collect();
    Ok(Json(JobList { data, next: found.next.map(|id| id.to_string()) }))
}

/// How many.
#[derive(Serialize, ToSchema)]
pub(crate) struct CountView {
    jobs: u64,
    /// There may be more: the latest 10,000 were looked at.
    or_more: bool,
}

/// How many jobs a filter finds, before anything is done to them.
#[utoipa::path(get, path = "/admin/v1/jobs/count", tag = "jobs", params(Filter),
    responses((status = 200, description = "So many, or more", body = CountView),
        (status = "4XX", description = "Refused", body = Refused),
        (status = "5XX", description = "Try again", body = Refused),))]
pub(crate) async fn count(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    query: Result<Query<ListQuery>, QueryRejection>,
) -> Result<Json<CountView>, ApiError> {
    let (filter, _) = request::query(query)?.read()?;
    let Count { jobs, or_more } = app.store().count_jobs(&filter.of(&caller)?).await?;
    Ok(Json(CountView { jobs, or_more }))
}

/// What to act on.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct BulkRequest {
    /// Which jobs; at least one condition.
    filter: Filter,
    /// Jobs at most.
    #[schema(minimum = 1, maximum = 10000, nullable = false)]
    limit: Option<u64>,
    /// `next` of the call before.
    #[schema(nullable = false)]
    after: Option<String>,
    /// Of replays: how many may begin in a second.
    #[schema(minimum = 1, nullable = false)]
    per_second: Option<u32>,
}

/// What was done.
#[derive(Serialize, ToSchema)]
pub(crate) struct BulkView {
    /// Jobs that were changed.
    done: u64,
    /// Give it as `after` to go on; none: there is nothing left.
    next: Option<String>,
    /// New jobs, of a replay.
    jobs: Vec<String>,
}

/// Reads a request, notes it and does it.
pub(super) async fn act(
    app: &App,
    caller: &Caller,
    action: &str,
    body: Body,
    act_of: impl Fn(Option<u32>) -> BulkAction,
) -> Result<Json<BulkView>, ApiError> {
    let map = json::object(body).await?;
    let detail = serde_json::Value::Object(map.clone());
    let BulkRequest { filter, limit, after, per_second } = request::body(map)?;
    let limit = bounded("limit", limit, BULK_MAX, BULK_MAX)?;
    let after: Option<JobId> = parsed("after", "a job's id", after.as_deref())?;
    let filter = filter.of(caller)?;
    if filter == Default::default() {
        let message = "filter must have a condition: nothing is done to all jobs at once";
        return Err(ApiError::invalid("missing_field", message).at("filter"));
    }
    if per_second == Some(0) {
        let message = "per_second must be at least 1";
        return Err(ApiError::invalid("invalid_value", message).at("per_second"));
    }
    log::note(app, caller, action, "jobs", json!({ "asked": detail })).await?;
    let store = app.store().as_ref();
    let BulkResult { done, next, jobs } =
        bulk::apply(store, &filter, act_of(per_second), after, limit).await?;
    let due: Vec<_> = jobs.iter().filter(|job| job.run_at.is_none()).cloned().collect();
    app.client().announce(&due).await;
    let jobs = jobs.iter().map(|job| job.id.to_string()).collect();
    Ok(Json(BulkView { done, next: next.map(|id| id.to_string()), jobs }))
}

/// Withdraws what a filter finds and is not over.
#[utoipa::path(post, path = "/admin/v1/jobs/cancel", tag = "jobs", request_body = BulkRequest,
    responses((status = 200, description = "What was withdrawn", body = BulkView),
        (status = "4XX", description = "Refused", body = Refused),
        (status = "5XX", description = "Try again", body = Refused),))]
pub(crate) async fn cancel(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    body: Body,
) -> Result<Json<BulkView>, ApiError> {
    act(&app, &caller, "jobs.cancel", body, |_| BulkAction::Cancel).await
}
