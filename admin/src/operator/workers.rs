//! Workers: what each says of itself, and the wish that one drain.

use axum::{Extension, Json, body::Body, extract::State};
use serde::{Deserialize, Serialize};
use serde_json::json;
use tritmill_queue::store::operations::Worker;
use utoipa::ToSchema;

use super::{log, queues::Done, request};
use crate::{access::Caller, app::App, error::ApiError, json, openapi::Refused};

/// A worker.
#[derive(Serialize, ToSchema)]
pub(crate) struct WorkerView {
    /// Its incarnation.
    worker: String,
    queue: String,
    host: String,
    pid: u32,
    device: String,
    isa: String,
    /// What its answers depend on besides the job; empty of a worker of an earlier release.
    numerics_class: String,
    /// Whether it was heard of lately.
    alive: bool,
    draining: bool,
    running: u32,
    slots: u32,
    /// Sequences of a step in the mean.
    batch_size: f64,
    tokens_per_s: f64,
    prefill_tokens_per_s: f64,
    decode_tokens_per_s: f64,
    /// Share of its KV blocks that sequences hold.
    kv_usage: Option<f64>,
    /// Share of prompt tokens that were in the prefix cache.
    cache_hit_rate: Option<f64>,
    /// Since it renewed its leases, while it holds any.
    lease_age_s: Option<f64>,
    /// Since it read its queue.
    read_age_s: Option<f64>,
    started_at_ms: i64,
    heard_s_ago: f64,
}

impl From<Worker> for WorkerView {
    fn from(worker: Worker) -> Self {
        let (alive, beat) = (worker.is_alive(), worker.heartbeat);
        let measured = beat.metrics;
        let share = |part: u64, all: u64| (all > 0).then(|| part as f64 / all as f64);
        let seconds = |ms: Option<u64>| ms.map(|ms| ms as f64 / 1000.0);
        let looked_up = measured.prefix_hit_tokens + measured.prefix_miss_tokens;
        Self {
            worker: beat.owner,
            queue: beat.queue.to_string(),
            host: beat.host,
            pid: beat.pid,
            device: measured.device,
            isa: measured.isa,
            numerics_class: measured.numerics_class,
            alive,
            draining: beat.draining || worker.drain_requested,
            running: beat.running,
            slots: beat.slots,
            batch_size: measured.batch_size,
            tokens_per_s: beat.tokens_per_s,
            prefill_tokens_per_s: measured.prefill_tokens_per_s,
            decode_tokens_per_s: measured.decode_tokens_per_s,
            kv_usage: share(measured.kv_blocks_used, measured.kv_blocks_total),
            cache_hit_rate: share(measured.prefix_hit_tokens, looked_up),
            lease_age_s: seconds(measured.lease_age_ms),
            read_age_s: seconds(measured.read_age_ms),
            started_at_ms: worker.started_at.0,
            heard_s_ago: worker.silent.as_secs_f64(),
        }
    }
}

/// Workers.
#[derive(Serialize, ToSchema)]
pub(crate) struct WorkerList {
    /// By name.
    data: Vec<WorkerView>,
}

/// Every worker that was heard of within a day.
#[utoipa::path(get, path = "/admin/v1/workers", tag = "workers",
    responses((status = 200, description = "By name", body = WorkerList),
        (status = "4XX", description = "Refused", body = Refused),
        (status = "5XX", description = "Try again", body = Refused),))]
pub(crate) async fn list(State(app): State<App>) -> Result<Json<WorkerList>, ApiError> {
    let workers = app.store().workers().await?;
    Ok(Json(WorkerList { data: workers.into_iter().map(WorkerView::from).collect() }))
}

/// Which worker.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct DrainRequest {
    /// As in the list.
    worker: String,
}

/// Asks a worker to finish what runs and exit.
#[utoipa::path(post, path = "/admin/v1/workers/drain", tag = "workers",
    request_body = DrainRequest,
    responses((status = 200, description = "It hears it with its next heartbeat", body = Done),
        (status = "4XX", description = "Refused", body = Refused),
        (status = "5XX", description = "Try again", body = Refused),))]
pub(crate) async fn drain(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    body: Body,
) -> Result<Json<Done>, ApiError> {
    let DrainRequest { worker } = request::body(json::object(body).await?)?;
    let unknown = || ApiError::not_found("worker", &worker);
    if worker.contains('\0') {
        return Err(unknown());
    }
    log::note(&app, &caller, "worker.drain", &worker, json!({})).await?;
    match app.store().request_drain(&worker).await? {
        true => Ok(Done::YES),
        false => Err(unknown()),
    }
}
