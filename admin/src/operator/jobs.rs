//! Jobs: lists, counts, and actions on many at once.

use axum::Json;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use tritmill_queue::{
    JobId, Timestamp,
    store::{
        JobFilter, Page,
        bulk::{self, BULK_MAX, BulkAction},
        job_queries::{Count, JobSummary},
    },
};
use utoipa::ToSchema;

use super::{
    audit,
    params::{Filter, LIST_DEFAULT, LIST_MAX, bounded, number, parsed},
};
use crate::{ApiError, App, Call, Caller, JsonBody, JsonResult, QueryParams, extract::from_map};

/// A page of a list.
#[derive(utoipa::IntoParams)]
#[into_params(parameter_in = Query)]
#[expect(dead_code, reason = "describes parameters that `list` takes from the query")]
pub(crate) struct PageQuery {
    /// Most jobs to return.
    #[param(nullable = false, minimum = 1, maximum = 200)]
    limit: Option<u64>,
    /// `next` of the previous page.
    #[param(nullable = false)]
    after: Option<String>,
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
    /// Worker that claimed it last; null for tenants.
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

/// A page of jobs.
#[derive(Serialize, ToSchema)]
pub(crate) struct JobList {
    /// Jobs, the latest first.
    data: Vec<JobView>,
    /// Pass as `after` to get the next page, which may exist even if this one is empty.
    next: Option<String>,
}

/// Lists the jobs of the caller's tenant; for operators, of all tenants.
#[utoipa::path(get, path = "/admin/v1/jobs", tag = "jobs", params(Filter, PageQuery),
    responses((status = 200, description = "The latest first", body = JobList)))]
pub(crate) async fn list(
    Call { app, caller }: Call,
    QueryParams(query): QueryParams<Map<String, Value>>,
) -> JsonResult<JobList> {
    let text = |param: &str| query.get(param).and_then(Value::as_str);
    let limit = number("limit", text("limit"), LIST_DEFAULT, LIST_MAX)?;
    let after: Option<JobId> = parsed("after", "a job id", text("after"))?;
    let page = Page { after, limit: limit as u32, ascending: false };
    let filter = Filter::from_query(query)?.for_caller(&app, &caller).await?;
    let found = app.store.jobs(&filter, page).await?;
    let mut data: Vec<JobView> = found.jobs.into_iter().map(JobView::from).collect();
    if !caller.may_operate() {
        data.iter_mut().for_each(|job| job.worker = None);
    }
    Ok(Json(JobList { data, next: found.next.map(|id| id.to_string()) }))
}

/// Number of jobs.
#[derive(Serialize, ToSchema)]
pub(crate) struct JobCount {
    jobs: u64,
    /// True if there may be more than the latest 10,000, which were counted.
    or_more: bool,
}

/// Counts the jobs that match a filter, for example before a bulk action.
#[utoipa::path(get, path = "/admin/v1/jobs/count", tag = "jobs", params(Filter),
    responses((status = 200, description = "Number of jobs", body = JobCount)))]
pub(crate) async fn count(
    Call { app, caller }: Call,
    QueryParams(query): QueryParams<Map<String, Value>>,
) -> JsonResult<JobCount> {
    let filter = Filter::from_query(query)?.for_caller(&app, &caller).await?;
    let Count { jobs, or_more } = app.store.count_jobs(&filter).await?;
    Ok(Json(JobCount { jobs, or_more }))
}

/// An action on many jobs.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct BulkRequest {
    /// Jobs to act on; at least one condition is required.
    filter: Filter,
    /// Most jobs to act on.
    #[schema(minimum = 1, maximum = 10000, nullable = false)]
    limit: Option<u64>,
    /// `next` of the previous call.
    #[schema(nullable = false)]
    after: Option<String>,
    /// For replays: jobs that may start per second.
    #[schema(minimum = 1, nullable = false)]
    per_second: Option<u32>,
}

/// Result of an action on many jobs.
#[derive(Serialize, ToSchema)]
pub(crate) struct BulkResult {
    /// Number of jobs that were changed.
    done: u64,
    /// Pass as `after` to continue; null when no jobs are left.
    next: Option<String>,
    /// New jobs of a replay.
    jobs: Vec<String>,
}

/// Validates a request for a bulk action, records it in the audit log and does it.
pub(super) async fn bulk(
    app: &App,
    caller: &Caller,
    action: &str,
    body: Map<String, Value>,
    act: impl Fn(Option<u32>) -> BulkAction,
) -> JsonResult<BulkResult> {
    let detail = json!({ "asked": body });
    let BulkRequest { filter, limit, after, per_second } = from_map(body)?;
    let limit = bounded("limit", limit, BULK_MAX, BULK_MAX)?;
    let after: Option<JobId> = parsed("after", "a job id", after.as_deref())?;
    let filter = filter.for_caller(app, caller).await?;
    if filter == Default::default() {
        let message = "filter must have at least one condition";
        return Err(ApiError::invalid("missing_field", message).at("filter"));
    }
    if per_second == Some(0) {
        return Err(ApiError::invalid_value("per_second", "per_second must be at least 1"));
    }
    let bulk = Bulk { action, detail, filter, act: act(per_second), after, limit };
    let bulk::BulkResult { done, next, jobs } = bulk.apply(app, caller).await?;
    let jobs = jobs.iter().map(|job| job.id.to_string()).collect();
    Ok(Json(BulkResult { done, next: next.map(|id| id.to_string()), jobs }))
}

/// A validated action on many jobs.
pub(crate) struct Bulk<'a> {
    /// The action's name in the audit log.
    pub action: &'a str,
    /// Its parameters, for the audit log.
    pub detail: Value,
    pub filter: JobFilter,
    pub act: BulkAction,
    pub after: Option<JobId>,
    /// Most jobs to act on.
    pub limit: u64,
}

impl Bulk<'_> {
    /// Records the action in the audit log, does it, and announces the new jobs of a replay. Those of a replay with a
    /// rate are announced when they are due.
    pub async fn apply(self, app: &App, caller: &Caller) -> Result<bulk::BulkResult, ApiError> {
        let Self { action, detail, filter, act, after, limit } = self;
        audit::record(app, caller, action, "jobs", detail).await?;
        let result = bulk::apply(app.store.as_ref(), &filter, act, after, limit).await?;
        let due: Vec<_> = result.jobs.iter().filter(|job| job.run_at.is_none()).cloned().collect();
        app.client.announce(&due).await;
        Ok(result)
    }
}

/// Cancels the unfinished jobs that match a filter.
#[utoipa::path(post, path = "/admin/v1/jobs/cancel", tag = "jobs", request_body = BulkRequest,
    responses((status = 200, description = "Number of cancelled jobs", body = BulkResult)))]
pub(crate) async fn cancel(
    Call { app, caller }: Call,
    JsonBody(body): JsonBody<Map<String, Value>>,
) -> JsonResult<BulkResult> {
    bulk(&app, &caller, "jobs.cancel", body, |_| BulkAction::Cancel).await
}
