//! Queues: what they hold, how fast they move, and what is set for them.

use std::{collections::BTreeMap, time::Duration};

use axum::{Extension, Json, body::Body, extract::State};
use serde::{Deserialize, Serialize};
use serde_json::json;
use tritmill_queue::{
    Priority, QueueName, Timestamp,
    store::{
        classes,
        history::{Depth, QueueSnapshot, Rates, Totals},
        operations::{QueueState, Worker},
    },
};
use utoipa::ToSchema;

use super::{log, request};
use crate::{access::Caller, app::App, error::ApiError, json, openapi::Refused};

/// All that is known of a queue: what the API shows, and pages.
#[derive(Debug, Clone)]
pub(crate) struct QueueLoad {
    /// What is set.
    pub settings: QueueState,
    /// What it holds and does, as of the last sample; none before the first.
    pub sampled: Option<QueueSnapshot>,
    /// When that was.
    pub sampled_at: Option<Timestamp>,
    /// Workers that live.
    pub workers: u64,
    /// Jobs that they have room for.
    pub slots: u64,
}

impl QueueLoad {
    /// What it held.
    pub fn depth(&self) -> Depth {
        self.sampled.as_ref().map_or_else(Depth::default, |sampled| sampled.depth)
    }

    /// What it does a second.
    pub fn rates(&self) -> Rates {
        self.sampled.as_ref().map_or_else(Rates::default, |sampled| sampled.rates)
    }

    /// How long the oldest queued job had waited.
    pub fn oldest_queued(&self) -> Option<Duration> {
        Some(self.sampled_at?.since(self.depth().oldest_queued_at?))
    }

    /// How long what is open takes at the present rate; unknown while nothing ends.
    pub fn drains_in(&self) -> Option<Duration> {
        /// Slower than a job in some minutes is no rate to go by.
        const RATE_MIN: f64 = 0.002;
        match (self.depth().open(), self.rates().ended) {
            (0, _) => Some(Duration::ZERO),
            (open, rate) if rate > RATE_MIN => Duration::try_from_secs_f64(open as f64 / rate).ok(),
            _ => None,
        }
    }
}

/// Every queue that is set, sampled or served, by name.
pub(crate) async fn loads(app: &App) -> Result<Vec<QueueLoad>, ApiError> {
    let store = app.store();
    let mut loads: BTreeMap<QueueName, QueueLoad> = BTreeMap::new();
    let blank = |settings: QueueState, at| QueueLoad {
        settings,
        sampled: None,
        sampled_at: at,
        workers: 0,
        slots: 0,
    };
    let sampled = store.snapshot().await?;
    let at = sampled.as_ref().map(|sampled| sampled.at);
    for settings in store.queue_states().await? {
        loads.insert(settings.queue.clone(), blank(settings, at));
    }
    let untouched = |queue: &QueueName| QueueState::with_defaults(queue.clone());
    for queue in sampled.into_iter().flat_map(|sampled| sampled.queues) {
        let name = queue.queue.clone();
        let load = loads.entry(name.clone()).or_insert_with(|| blank(untouched(&name), at));
        load.sampled = Some(queue);
    }
    for worker in store.workers().await?.iter().filter(|worker| Worker::is_alive(worker)) {
        let name = &worker.heartbeat.queue;
        let load = loads.entry(name.clone()).or_insert_with(|| blank(untouched(name), at));
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
    /// Of its first worker.
    numerics_class: Option<String>,
    /// That its workers may have as well.
    allowed_classes: Vec<String>,
    /// How priorities share a busy queue.
    weights: BTreeMap<&'static str, u32>,
    scheduled: u64,
    queued: u64,
    running: u64,
    retrying: u64,
    /// There are more than these: so many were counted.
    or_more: bool,
    oldest_queued_s: Option<f64>,
    /// Jobs a second, over the last minute or so.
    arrived_per_s: f64,
    ended_per_s: f64,
    failed_per_s: f64,
    prompt_tokens_per_s: f64,
    completion_tokens_per_s: f64,
    /// How long what is there takes at this rate.
    drains_in_s: Option<f64>,
    /// Since sampling began.
    completed: u64,
    failed: u64,
    cancelled: u64,
    expired: u64,
    prompt_tokens: u64,
    completion_tokens: u64,
    workers: u64,
    slots: u64,
    sampled_at_ms: Option<i64>,
}

impl From<QueueLoad> for QueueView {
    fn from(load: QueueLoad) -> Self {
        let (depth, rates) = (load.depth(), load.rates());
        let totals = load.sampled.as_ref().map_or_else(Totals::default, |sampled| sampled.totals);
        let seconds = |time: Option<Duration>| time.map(|time| time.as_secs_f64());
        Self {
            oldest_queued_s: seconds(load.oldest_queued()),
            drains_in_s: seconds(load.drains_in()),
            queue: load.settings.queue.to_string(),
            paused: load.settings.paused,
            limit_tokens: load.settings.limit_tokens,
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
    /// By name.
    data: Vec<QueueView>,
}

/// Every queue.
#[utoipa::path(get, path = "/admin/v1/queues", tag = "queues",
    responses((status = 200, description = "By name", body = QueueList),
        (status = "4XX", description = "Refused", body = Refused),
        (status = "5XX", description = "Try again", body = Refused),))]
pub(crate) async fn list(State(app): State<App>) -> Result<Json<QueueList>, ApiError> {
    Ok(Json(QueueList { data: loads(&app).await?.into_iter().map(QueueView::from).collect() }))
}

/// Which queue.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct QueueRequest {
    /// `MODEL@FORMAT`.
    #[schema(examples("bitnet-2b@i2_s"))]
    queue: String,
}

/// What was done.
#[derive(Serialize, ToSchema)]
pub(crate) struct Done {
    done: bool,
}

impl Done {
    /// Done.
    pub const YES: Json<Self> = Json(Self { done: true });
}

async fn set_paused(
    app: &App,
    caller: &Caller,
    body: Body,
    paused: bool,
) -> Result<Json<Done>, ApiError> {
    let request: QueueRequest = request::body(json::object(body).await?)?;
    let queue = request::queue(&request.queue)?;
    let action = if paused { "queue.pause" } else { "queue.resume" };
    log::note(app, caller, action, &queue.to_string(), json!({})).await?;
    app.store().set_paused(&queue, paused).await?;
    Ok(Done::YES)
}

/// Lets workers take nothing new.
#[utoipa::path(post, path = "/admin/v1/queues/pause", tag = "queues", request_body = QueueRequest,
    responses((status = 200, description = "They hear it within seconds", body = Done),
        (status = "4XX", description = "Refused", body = Refused),
        (status = "5XX", description = "Try again", body = Refused),))]
pub(crate) async fn pause(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    body: Body,
) -> Result<Json<Done>, ApiError> {
    set_paused(&app, &caller, body, true).await
}

/// Lets them go on.
#[utoipa::path(post, path = "/admin/v1/queues/resume", tag = "queues", request_body = QueueRequest,
    responses((status = 200, description = "They hear it within seconds", body = Done),
        (status = "4XX", description = "Refused", body = Refused),
        (status = "5XX", description = "Try again", body = Refused),))]
pub(crate) async fn resume(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    body: Body,
) -> Result<Json<Done>, ApiError> {
    set_paused(&app, &caller, body, false).await
}

/// What may wait.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct LimitRequest {
    /// `MODEL@FORMAT`.
    queue: String,
    /// Tokens; none lifts the bound.
    limit_tokens: Option<u64>,
    /// Of this tenant's alone.
    #[schema(nullable = false)]
    tenant: Option<String>,
    /// Of each tenant's that has no bound of its own.
    #[serde(default)]
    each_tenant: bool,
}

/// Bounds what may wait in a queue, of all, of a tenant or of each.
#[utoipa::path(post, path = "/admin/v1/queues/limit", tag = "queues", request_body = LimitRequest,
    responses((status = 200, description = "Producers heed it within seconds", body = Done),
        (status = "4XX", description = "Refused", body = Refused),
        (status = "5XX", description = "Try again", body = Refused),))]
pub(crate) async fn limit(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    body: Body,
) -> Result<Json<Done>, ApiError> {
    let LimitRequest { queue, limit_tokens, tenant, each_tenant } =
        request::body(json::object(body).await?)?;
    let queue = request::queue(&queue)?;
    if tenant.is_some() && each_tenant {
        let message = "tenant and each_tenant exclude one another";
        return Err(ApiError::invalid("invalid_value", message).at("each_tenant"));
    }
    let tenant = tenant.map(|name| request::tenant(&name)).transpose()?;
    let detail =
        json!({ "limit_tokens": limit_tokens, "tenant": tenant, "each_tenant": each_tenant });
    log::note(&app, &caller, "queue.limit", &queue.to_string(), detail).await?;
    let store = app.store();
    match tenant {
        None if !each_tenant => store.set_limit(&queue, limit_tokens).await?,
        tenant => store.set_quota(&queue, tenant.as_ref(), limit_tokens).await?,
    }
    Ok(Done::YES)
}

/// Which class of which queue.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ClassRequest {
    /// `MODEL@FORMAT`.
    queue: String,
    /// As a worker's refusal names it.
    #[schema(examples("3f…/kv-f16/head-exact/cuda"))]
    numerics_class: String,
}

impl ClassRequest {
    async fn of(body: Body) -> Result<(QueueName, String), ApiError> {
        let Self { queue, numerics_class } = request::body(json::object(body).await?)?;
        classes::check(&numerics_class)?;
        Ok((request::queue(&queue)?, numerics_class))
    }
}

/// Lets workers of another numerics class serve a queue as well. From then on its answers are of either
/// class, and name it; a job that one class began, the other begins anew.
#[utoipa::path(post, path = "/admin/v1/queues/allow-class", tag = "queues",
    request_body = ClassRequest,
    responses((status = 200, description = "Workers of this class may start", body = Done),
        (status = "4XX", description = "Refused", body = Refused),
        (status = "5XX", description = "Try again", body = Refused),))]
pub(crate) async fn allow_class(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    body: Body,
) -> Result<Json<Done>, ApiError> {
    let (queue, class) = ClassRequest::of(body).await?;
    let how = json!({ "numerics_class": class });
    log::note(&app, &caller, "queue.allow_class", &queue.to_string(), how).await?;
    app.store().allow_class(&queue, &class).await?;
    Ok(Done::YES)
}

/// Takes it back: workers of this class drain, and start no more.
#[utoipa::path(post, path = "/admin/v1/queues/withdraw-class", tag = "queues",
    request_body = ClassRequest,
    responses((status = 200, description = "They hear it within seconds", body = Done),
        (status = "4XX", description = "Refused", body = Refused),
        (status = "5XX", description = "Try again", body = Refused),))]
pub(crate) async fn withdraw_class(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    body: Body,
) -> Result<Json<Done>, ApiError> {
    let (queue, class) = ClassRequest::of(body).await?;
    let how = json!({ "numerics_class": class });
    log::note(&app, &caller, "queue.withdraw_class", &queue.to_string(), how).await?;
    match app.store().withdraw_class(&queue, &class).await? {
        true => Ok(Done::YES),
        false => Err(ApiError::not_found("allowed class", &class)),
    }
}
