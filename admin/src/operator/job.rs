//! One job, with its attempts and results.

use axum::{Json, extract::Path};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use tritmill_queue::{
    JobId, Outcome, Priority, Timestamp,
    store::job_queries::{Attempt, AttemptEnd, JobHistory},
};
use utoipa::ToSchema;

use super::{DONE, Done, audit, params};
use crate::{ApiError, App, Call, Caller, JsonBody, JsonResult, extract::from_map, shown_errors};

/// An attempt to run the job.
#[derive(Serialize, ToSchema)]
pub(crate) struct AttemptView {
    epoch: i64,
    /// Null for tenants.
    worker: Option<String>,
    claimed_at_ms: Option<i64>,
    /// Time from the claim to the first token.
    first_token_ms: Option<u64>,
    ended_at_ms: Option<i64>,
    /// `running`, `completed`, `error` or `expired`.
    end: &'static str,
    error_code: Option<String>,
    error_message: Option<String>,
}

impl From<Attempt> for AttemptView {
    fn from(attempt: Attempt) -> Self {
        let (end, error) = match attempt.end {
            AttemptEnd::Running => ("running", None),
            AttemptEnd::Completed => ("completed", None),
            AttemptEnd::Expired => ("expired", None),
            AttemptEnd::Error(error) => ("error", Some(error)),
        };
        Self {
            epoch: attempt.epoch,
            worker: attempt.owner,
            claimed_at_ms: attempt.claimed_at.map(|at| at.0),
            first_token_ms: attempt.first_token.map(|time| time.as_millis() as u64),
            ended_at_ms: attempt.ended_at.map(|at| at.0),
            end,
            error_code: error.as_ref().map(|error| error.code.clone()),
            error_message: error.map(|error| error.message),
        }
    }
}

/// A job with its attempts and results.
#[derive(Serialize, ToSchema)]
pub(crate) struct JobHistoryView {
    id: String,
    tenant: String,
    queue: String,
    priority: &'static str,
    state: &'static str,
    custom_id: Option<String>,
    epoch: i64,
    attempts_max: u32,
    /// The dead letter that this job replays.
    replay_of: Option<String>,
    submitted_at_ms: i64,
    started_at_ms: Option<i64>,
    finished_at_ms: Option<i64>,
    run_at_ms: Option<i64>,
    expires_at_ms: Option<i64>,
    lease_until_ms: Option<i64>,
    attempts: Vec<AttemptView>,
    prompt_tokens: Option<u64>,
    completion_tokens: Option<u64>,
    /// Numerics class of the worker that completed it.
    numerics_class: Option<String>,
    /// Prompt, sampling parameters and seed.
    #[schema(value_type = Object)]
    request: Value,
    /// Text of each choice.
    texts: Vec<String>,
    error_code: Option<String>,
    error_message: Option<String>,
}

impl From<JobHistory> for JobHistoryView {
    fn from(story: JobHistory) -> Self {
        let ms = |at: Option<Timestamp>| at.map(|at| at.0);
        let record = story.record;
        let (completion, error) = match record.outcome {
            Some(Outcome::Completed(completion)) => (Some(completion), None),
            Some(Outcome::Error(error)) => (None, Some(error)),
            Some(Outcome::Expired) | None => (None, None),
        };
        let usage = completion.as_ref().map(|completion| completion.usage);
        let numerics_class = completion.as_ref().map(|completion| completion.fingerprint.clone());
        let texts = completion.into_iter().flat_map(|completion| completion.choices);
        Self {
            id: record.job.id.to_string(),
            tenant: record.job.tenant.0.clone(),
            queue: record.job.queue.to_string(),
            priority: record.job.priority.as_str(),
            state: record.state.as_str(),
            custom_id: record.job.custom_id.clone(),
            epoch: record.epoch,
            attempts_max: record.job.attempts_max,
            replay_of: story.replay_of.map(|id| id.to_string()),
            submitted_at_ms: story.submitted_at.0,
            started_at_ms: ms(story.started_at),
            finished_at_ms: ms(record.finished_at),
            run_at_ms: ms(story.run_at),
            expires_at_ms: ms(record.job.expires_at),
            lease_until_ms: ms(story.lease_until),
            attempts: story.attempts.into_iter().map(AttemptView::from).collect(),
            prompt_tokens: usage.map(|usage| usage.prompt_tokens),
            completion_tokens: usage.map(|usage| usage.completion_tokens),
            numerics_class,
            request: serde_json::json!({
                "prompt": record.job.prompt,
                "sampling": record.job.sampling,
                "seed": record.job.seed,
            }),
            texts: texts.map(|choice| choice.text).collect(),
            error_code: error.as_ref().map(|error| error.code.clone()),
            error_message: error.map(|error| error.message),
        }
    }
}

/// Finds a job of the caller's tenant, without names of workers and words of engines; for operators, of any tenant,
/// with all.
pub(crate) async fn find(app: &App, caller: &Caller, id: &str) -> Result<JobHistory, ApiError> {
    let story = app.store.job_history(params::job(id)?).await?;
    let unknown = || ApiError::not_found("job", id);
    match story.ok_or_else(unknown)? {
        story if caller.may_operate() => Ok(story),
        story if story.record.job.tenant == caller.tenant => {
            Ok(shown_errors::history_for_tenant(story))
        }
        _ => Err(unknown()),
    }
}

/// Returns a job with its attempts and results.
#[utoipa::path(get, path = "/admin/v1/jobs/{id}", tag = "jobs", params(("id" = String, Path)),
    responses((status = 200, description = "The job", body = JobHistoryView)))]
pub(crate) async fn one(
    Call { app, caller }: Call,
    Path(id): Path<String>,
) -> JsonResult<JobHistoryView> {
    Ok(Json(find(&app, &caller, &id).await?.into()))
}

/// Makes a scheduled or retrying job due now.
#[utoipa::path(post, path = "/admin/v1/jobs/{id}/run-now", tag = "jobs", params(("id" = String, Path)),
    responses((status = 200, description = "The job runs as soon as a worker has room", body = Done)))]
pub(crate) async fn run_now(
    Call { app, caller }: Call,
    Path(id): Path<String>,
) -> JsonResult<Done> {
    hasten(&app, &caller, &id).await?;
    Ok(DONE)
}

/// Makes a scheduled or retrying job due now and records it in the audit log.
pub(crate) async fn hasten(app: &App, caller: &Caller, id: &str) -> Result<JobId, ApiError> {
    let job = find(app, caller, id).await?.record.job.id;
    audit::record(app, caller, "job.run_now", &job.to_string(), json!({})).await?;
    match app.store.run_now(&[job]).await?.is_empty() {
        true => Err(not_waiting()),
        false => Ok(job),
    }
}

/// A new priority of a job.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct PriorityRequest {
    /// `high`, `normal` or `low`.
    priority: String,
}

/// Changes the priority of a scheduled or retrying job. A queued or running job keeps the priority that it waited with.
#[utoipa::path(post, path = "/admin/v1/jobs/{id}/priority", tag = "jobs", params(("id" = String, Path)),
    request_body = PriorityRequest,
    responses((status = 200, description = "The priority is changed", body = Done)))]
pub(crate) async fn priority(
    Call { app, caller }: Call,
    Path(id): Path<String>,
    JsonBody(body): JsonBody<Map<String, Value>>,
) -> JsonResult<Done> {
    // An unknown job is unknown whatever the body.
    find(&app, &caller, &id).await?;
    let PriorityRequest { priority } = from_map(body)?;
    set_priority(&app, &caller, &id, &priority).await?;
    Ok(DONE)
}

/// Changes the priority of a scheduled or retrying job and records it in the audit log.
pub(crate) async fn set_priority(
    app: &App,
    caller: &Caller,
    id: &str,
    priority: &str,
) -> Result<JobId, ApiError> {
    let job = find(app, caller, id).await?.record.job.id;
    let expected = "'high', 'normal' or 'low'";
    let priority: Option<Priority> = params::parsed("priority", expected, Some(priority))?;
    let priority = priority.unwrap_or_default();
    let detail = json!({ "priority": priority.as_str() });
    audit::record(app, caller, "job.priority", &job.to_string(), detail).await?;
    match app.store.set_priority(job, priority).await? {
        true => Ok(job),
        false => Err(not_waiting()),
    }
}

fn not_waiting() -> ApiError {
    ApiError::conflict("not_waiting", "the job is neither scheduled nor retrying")
}
