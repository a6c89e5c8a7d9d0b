//! Queues: load, rates and settings.

use std::{collections::BTreeMap, time::Duration};

use axum::{Json, extract::State};
use serde::{Deserialize, Serialize};
use serde_json::json;
use tritmill_queue::{
    Priority, QueueName, Timestamp,
    store::{
        classes,
        history::{Depth, QueueSnapshot, Rates, Totals},
        queue_settings::QueueState,
        workers::Worker,
    },
};
use utoipa::ToSchema;

use super::{DONE, Done, audit, params};
use crate::{ApiError, App, Call, Caller, JsonBody, JsonResult};

/// Settings and state of a queue, for the API and the dashboard.
#[derive(Debug, Clone)]
pub(crate) struct QueueLoad {
    /// Settings.
    pub settings: QueueState,
    /// Depth and rates at the last sample; `None` before the first.
    pub sampled: Option<QueueSnapshot>,
    /// Time of the last sample.
    pub sampled_at: Option<Timestamp>,
    /// Live workers.
    pub workers: u64,
    /// Jobs that the live workers can run at once.
    pub slots: u64,
}

impl QueueLoad {
    /// Returns the numbers of jobs at the last sample.
    pub fn depth(&self) -> Depth {
        self.sampled.as_ref().map_or_else(Depth::default, |sampled| sampled.depth)
    }

    /// Returns the finished jobs and tokens since sampling began.
    pub fn totals(&self) -> Totals {
        self.sampled.as_ref().map_or_else(Totals::default, |sampled| sampled.totals)
    }

    /// Returns the rates per second at the last sample.
    pub fn rates(&self) -> Rates {
        self.sampled.as_ref().map_or_else(Rates::default, |sampled| sampled.rates)
    }

    /// Returns the age of the oldest queued job at the last sample.
    pub fn oldest_queued(&self) -> Option<Duration> {
        Some(self.sampled_at?.since(self.depth().oldest_queued_at?))
    }

    /// Returns the age, at the last sample, of the oldest jobs that the dispatcher may lack.
    pub fn oldest_unannounced(&self) -> Option<Duration> {
        Some(self.sampled_at?.since(self.depth().unannounced_since?))
    }

    /// Returns the time until the queue is empty at the present rate; `None` while no job finishes.
    pub fn drains_in(&self) -> Option<Duration> {
        /// Slower rates, of a job in some minutes, allow no estimate.
        const RATE_MIN: f64 = 0.002;
        match (self.depth().open(), self.rates().ended) {
            (0, _) => Some(Duration::ZERO),
            (open, rate) if rate > RATE_MIN => Duration::try_from_secs_f64(open as f64 / rate).ok(),
            _ => None,
        }
    }
}

/// Loads every queue that has settings, samples or live workers, by name.
pub(crate) async fn loads(app: &App) -> Result<Vec<QueueLoad>, ApiError> {
    let store = &app.store;
    let mut loads: BTreeMap<QueueName, QueueLoad> = BTreeMap::new();
    let sampled = store.snapshot().await?;
    let sampled_at = sampled.as_ref().map(|sampled| sampled.at);
    let blank = |settings| QueueLoad { settings, sampled: None, sampled_at, workers: 0, slots: 0 };
    let default = |queue: &QueueName| blank(QueueState::with_defaults(queue.clone()));
    for settings in store.queue_states().await? {
        loads.insert(settings.queue.clone(), blank(settings));
    }
    for queue in sampled.into_iter().flat_map(|sampled| sampled.queues) {
        let name = queue.queue.clone();
        loads.entry(name.clone()).or_insert_with(|| default(&name)).sampled = Some(queue);
    }
    for worker in store.workers().await?.iter().filter(|worker| Worker::is_alive(worker)) {
        let name = &worker.heartbeat.queue;
        let load = loads.entry(name.clone()).or_insert_with(|| default(name));
        load.workers += 1;
        load.slots += u64::from(worker.heartbeat.slots);
    }
    Ok(loads.into_values().collect())
}

/// A queue.
#[derive(Serialize, ToSchema)]
pub(crate) struct QueueView {
    queue: String,
    paused: bool,
    limit_tokens: Option<u64>,
    /// Longest predicted wait of a new job.
    max_wait_s: Option<f64>,
    /// Numerics class of the first worker that served the queue.
    numerics_class: Option<String>,
    /// Further numerics classes that its workers may have.
    allowed_classes: Vec<String>,
    /// Shares of the priorities in a busy queue.
    weights: BTreeMap<&'static str, u32>,
    scheduled: u64,
    queued: u64,
    running: u64,
    retrying: u64,
    /// True if there are more jobs than were counted.
    or_more: bool,
    oldest_queued_s: Option<f64>,
    /// Rates over about the last minute.
    arrived_per_s: f64,
    ended_per_s: f64,
    failed_per_s: f64,
    prompt_tokens_per_s: f64,
    completion_tokens_per_s: f64,
    /// Estimated time until the queue is empty.
    drains_in_s: Option<f64>,
    /// Finished jobs and tokens since sampling began.
    completed: u64,
    failed: u64,
    cancelled: u64,
    expired: u64,
    prompt_tokens: u64,
    completion_tokens: u64,
    workers: u64,
    /// Jobs that the live workers can run at once.
    slots: u64,
    sampled_at_ms: Option<i64>,
}

impl From<QueueLoad> for QueueView {
    fn from(load: QueueLoad) -> Self {
        let (depth, rates, totals) = (load.depth(), load.rates(), load.totals());
        let seconds = |time: Option<Duration>| time.map(|time| time.as_secs_f64());
        Self {
            oldest_queued_s: seconds(load.oldest_queued()),
            drains_in_s: seconds(load.drains_in()),
            queue: load.settings.queue.to_string(),
            paused: load.settings.paused,
            limit_tokens: load.settings.limit_tokens,
            max_wait_s: seconds(load.settings.max_wait),
            numerics_class: load.settings.class,
            allowed_classes: load.settings.allowed_classes,
            weights: Priority::ALL.map(|one| (one.as_str(), one.weight())).into(),
            scheduled: depth.scheduled,
            queued: depth.queued,
            running: depth.running,
            retrying: depth.retrying,
            or_more: depth.or_more,
            arrived_per_s: rates.arrived,
            ended_per_s: rates.ended,
            failed_per_s: rates.failed,
            prompt_tokens_per_s: rates.prompt_tokens,
            completion_tokens_per_s: rates.completion_tokens,
            completed: totals.completed,
            failed: totals.failed,
            cancelled: totals.cancelled,
            expired: totals.expired,
            prompt_tokens: totals.prompt_tokens,
            completion_tokens: totals.completion_tokens,
            workers: load.workers,
            slots: load.slots,
            sampled_at_ms: load.sampled_at.map(|at| at.0),
        }
    }
}

/// Queues.
#[derive(Serialize, ToSchema)]
pub(crate) struct QueueList {
    /// Queues by name.
    data: Vec<QueueView>,
}

/// Lists all queues.
#[utoipa::path(get, path = "/admin/v1/queues", tag = "queues",
    responses((status = 200, description = "By name", body = QueueList)))]
pub(crate) async fn list(State(app): State<App>) -> JsonResult<QueueList> {
    Ok(Json(QueueList { data: loads(&app).await?.into_iter().map(QueueView::from).collect() }))
}

/// A queue.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct QueueRequest {
    /// `MODEL@FORMAT`.
    #[schema(examples("bitnet-2b@i2_s"))]
    queue: String,
}

/// Pauses or resumes a queue and records it in the audit log.
pub(crate) async fn set_paused(
    app: &App,
    caller: &Caller,
    queue: &QueueName,
    paused: bool,
) -> Result<(), ApiError> {
    let action = if paused { "queue.pause" } else { "queue.resume" };
    audit::record(app, caller, action, &queue.to_string(), json!({})).await?;
    Ok(app.store.set_paused(queue, paused).await?)
}

/// Pauses a queue: workers start no more of its jobs.
#[utoipa::path(post, path = "/admin/v1/queues/pause", tag = "queues", request_body = QueueRequest,
    responses((status = 200, description = "Workers follow within seconds", body = Done)))]
pub(crate) async fn pause(
    Call { app, caller }: Call,
    JsonBody(QueueRequest { queue }): JsonBody<QueueRequest>,
) -> JsonResult<Done> {
    set_paused(&app, &caller, &params::queue(&queue)?, true).await?;
    Ok(DONE)
}

/// Resumes a paused queue.
#[utoipa::path(post, path = "/admin/v1/queues/resume", tag = "queues", request_body = QueueRequest,
    responses((status = 200, description = "Workers follow within seconds", body = Done)))]
pub(crate) async fn resume(
    Call { app, caller }: Call,
    JsonBody(QueueRequest { queue }): JsonBody<QueueRequest>,
) -> JsonResult<Done> {
    set_paused(&app, &caller, &params::queue(&queue)?, false).await?;
    Ok(DONE)
}

/// A limit on queued tokens.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct LimitRequest {
    /// `MODEL@FORMAT`.
    queue: String,
    /// Tokens; null removes the limit.
    limit_tokens: Option<u64>,
    /// Limits this tenant only.
    #[schema(nullable = false)]
    tenant: Option<String>,
    /// Limits each tenant that has no limit of its own.
    #[serde(default)]
    each_tenant: bool,
}

/// Limits the queued tokens of a queue: of all tenants together, of one tenant or of each tenant.
#[utoipa::path(post, path = "/admin/v1/queues/limit", tag = "queues", request_body = LimitRequest,
    responses((status = 200, description = "Producers follow within seconds", body = Done)))]
pub(crate) async fn limit(
    Call { app, caller }: Call,
    JsonBody(request): JsonBody<LimitRequest>,
) -> JsonResult<Done> {
    let LimitRequest { queue, limit_tokens, tenant, each_tenant } = request;
    let queue = params::queue(&queue)?;
    if tenant.is_some() && each_tenant {
        let message = "tenant and each_tenant exclude each other";
        return Err(ApiError::invalid_value("each_tenant", message));
    }
    let tenant = tenant.map(|name| params::tenant(&name)).transpose()?;
    let detail =
        json!({ "limit_tokens": limit_tokens, "tenant": tenant, "each_tenant": each_tenant });
    audit::record(&app, &caller, "queue.limit", &queue.to_string(), detail).await?;
    match tenant {
        None if !each_tenant => app.store.set_limit(&queue, limit_tokens).await?,
        tenant => app.store.set_quota(&queue, tenant.as_ref(), limit_tokens).await?,
    }
    Ok(DONE)
}

/// A longest wait.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct MaxWaitRequest {
    /// `MODEL@FORMAT`.
    queue: String,
    /// Seconds, from 0.001 to 31536000; null removes the limit.
    max_wait_s: Option<f64>,
}

/// Sets the longest predicted wait of a queue: jobs that would wait longer are refused, and batches fill four
/// fifths of it.
#[utoipa::path(post, path = "/admin/v1/queues/max-wait", tag = "queues",
    request_body = MaxWaitRequest,
    responses((status = 200, description = "Producers follow within seconds", body = Done)))]
pub(crate) async fn max_wait(
    Call { app, caller }: Call,
    JsonBody(MaxWaitRequest { queue, max_wait_s }): JsonBody<MaxWaitRequest>,
) -> JsonResult<Done> {
    let queue = params::queue(&queue)?;
    let longest = max_wait_s.map(|seconds| match (0.001..=31_536_000.0).contains(&seconds) {
        true => Ok(Duration::from_secs_f64(seconds)),
        false => Err(ApiError::invalid_value("max_wait_s", "expected 0.001 to 31536000 seconds")),
    });
    let longest = longest.transpose()?;
    let detail = json!({ "max_wait_s": max_wait_s });
    audit::record(&app, &caller, "queue.max_wait", &queue.to_string(), detail).await?;
    app.store.set_max_wait(&queue, longest).await?;
    Ok(DONE)
}

/// A numerics class of a queue.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ClassRequest {
    /// `MODEL@FORMAT`.
    queue: String,
    /// Numerics class, as the error message of a rejected worker names it.
    #[schema(examples("9c0f…/kv-f16/head-BF16/draw-2/cuda"))]
    numerics_class: String,
}

impl ClassRequest {
    fn validated(self) -> Result<(QueueName, String), ApiError> {
        classes::check(&self.numerics_class)?;
        Ok((params::queue(&self.queue)?, self.numerics_class))
    }
}

/// Allows workers of another numerics class to serve a queue as well. Results then come from either class
/// and name it; a job that moves to the other class restarts from its prompt.
#[utoipa::path(post, path = "/admin/v1/queues/allow-class", tag = "queues",
    request_body = ClassRequest,
    responses((status = 200, description = "Workers of this class may start", body = Done)))]
pub(crate) async fn allow_class(
    Call { app, caller }: Call,
    JsonBody(request): JsonBody<ClassRequest>,
) -> JsonResult<Done> {
    let (queue, class) = request.validated()?;
    let detail = json!({ "numerics_class": class });
    audit::record(&app, &caller, "queue.allow_class", &queue.to_string(), detail).await?;
    app.store.allow_class(&queue, &class).await?;
    Ok(DONE)
}

/// Withdraws an allowed numerics class: its workers drain and may not start again.
#[utoipa::path(post, path = "/admin/v1/queues/withdraw-class", tag = "queues",
    request_body = ClassRequest,
    responses((status = 200, description = "Workers follow within seconds", body = Done)))]
pub(crate) async fn withdraw_class(
    Call { app, caller }: Call,
    JsonBody(request): JsonBody<ClassRequest>,
) -> JsonResult<Done> {
    let (queue, class) = request.validated()?;
    let detail = json!({ "numerics_class": class });
    audit::record(&app, &caller, "queue.withdraw_class", &queue.to_string(), detail).await?;
    match app.store.withdraw_class(&queue, &class).await? {
        true => Ok(DONE),
        false => Err(ApiError::not_found("allowed class", &class)),
    }
}
