//! Workers: their reported state, and draining.

use axum::{Json, extract::State};
use serde::{Deserialize, Serialize};
use serde_json::json;
use tritmill_queue::store::workers::{TierReport, Worker};
use utoipa::ToSchema;

use super::{DONE, Done, audit};
use crate::{ApiError, App, Call, Caller, JsonBody, JsonResult};

/// A worker.
#[derive(Serialize, ToSchema)]
pub(crate) struct WorkerView {
    /// Identifier of the worker's incarnation.
    worker: String,
    queue: String,
    host: String,
    pid: u32,
    device: String,
    isa: String,
    /// What results depend on besides the job.
    numerics_class: String,
    /// Whether it sent a heartbeat recently.
    alive: bool,
    draining: bool,
    running: u32,
    slots: u32,
    /// Mean number of sequences per step.
    batch_size: f64,
    tokens_per_s: f64,
    prefill_tokens_per_s: f64,
    decode_tokens_per_s: f64,
    /// Requests that ended per second.
    requests_per_s: f64,
    /// Steps (forward passes) per second.
    steps_per_s: f64,
    /// Mean number of rows of a step: tokens of prompts and decodes.
    rows_per_step: f64,
    /// Share of the time in which a step ran.
    utilisation: f64,
    /// Mean time of a request in the engine before its first step.
    wait_ms: Option<f64>,
    /// Rows per second of steps, as a share of the most since the worker's start.
    efficiency: Option<f64>,
    /// Share of KV blocks in use.
    kv_usage: Option<f64>,
    kv_blocks_used: u64,
    /// KV blocks kept for their contents: the prefix cache.
    kv_blocks_cached: u64,
    kv_blocks_total: u64,
    /// Bytes of the KV blocks in use; null from workers of an earlier release.
    kv_bytes_used: Option<u64>,
    kv_bytes_total: Option<u64>,
    /// Prompt tokens found in the prefix cache, since the worker's start.
    prefix_hit_tokens: u64,
    /// Prompt tokens that had to be computed.
    prefix_miss_tokens: u64,
    /// Share of prompt tokens found in the prefix cache.
    cache_hit_rate: Option<f64>,
    /// Where it keeps KV blocks beside those of its device; null if nowhere.
    kv_tiers: Option<TiersView>,
    /// Time since the worker renewed its lease, while it holds jobs.
    lease_age_s: Option<f64>,
    /// Time since the worker read its queue.
    read_age_s: Option<f64>,
    started_at_ms: i64,
    /// Time since the last heartbeat.
    heard_s_ago: f64,
}

/// The tiers of a worker below its KV blocks. Counts are since its start.
#[derive(Serialize, ToSchema)]
pub(crate) struct TiersView {
    /// Bytes of blocks in the memory of the host.
    memory_bytes: u64,
    /// Blocks found there.
    memory_hits: u64,
    disk_blocks: u64,
    disk_bytes: u64,
    /// Blocks found on disk.
    disk_hits: u64,
    /// Blocks found at other workers.
    peer_hits: u64,
    /// Looked up blocks that no tier had, one for each prompt.
    misses: u64,
}

impl From<TierReport> for TiersView {
    fn from(tiers: TierReport) -> Self {
        Self {
            memory_bytes: tiers.memory_bytes,
            memory_hits: tiers.memory_hits,
            disk_blocks: tiers.disk_blocks,
            disk_bytes: tiers.disk_bytes,
            disk_hits: tiers.disk_hits(),
            peer_hits: tiers.peer_hits,
            misses: tiers.misses,
        }
    }
}

impl From<Worker> for WorkerView {
    fn from(worker: Worker) -> Self {
        let (alive, beat) = (worker.is_alive(), worker.heartbeat);
        let metrics = beat.metrics;
        let report = metrics.report;
        let share = |part: u64, all: u64| (all > 0).then(|| part as f64 / all as f64);
        let bytes = |bytes: u64| (metrics.kv_bytes_total > 0).then_some(bytes);
        let seconds = |ms: Option<u64>| ms.map(|ms| ms as f64 / 1000.0);
        let looked_up = metrics.prefix_hit_tokens + metrics.prefix_miss_tokens;
        Self {
            worker: beat.owner,
            queue: beat.queue.to_string(),
            host: beat.host,
            pid: beat.pid,
            device: metrics.device,
            isa: metrics.isa,
            numerics_class: metrics.numerics_class,
            alive,
            draining: beat.draining || worker.drain_requested,
            running: beat.running,
            slots: beat.slots,
            batch_size: metrics.batch_size,
            tokens_per_s: beat.tokens_per_s,
            prefill_tokens_per_s: metrics.prefill_tokens_per_s,
            decode_tokens_per_s: metrics.decode_tokens_per_s,
            requests_per_s: report.requests_per_s,
            steps_per_s: report.steps_per_s,
            rows_per_step: report.rows_per_step,
            utilisation: report.utilisation,
            wait_ms: report.wait_ms,
            efficiency: report.efficiency,
            kv_usage: share(metrics.kv_blocks_used, metrics.kv_blocks_total),
            kv_blocks_used: metrics.kv_blocks_used,
            kv_blocks_cached: metrics.kv_blocks_cached,
            kv_blocks_total: metrics.kv_blocks_total,
            kv_bytes_used: bytes(metrics.kv_bytes_used),
            kv_bytes_total: bytes(metrics.kv_bytes_total),
            prefix_hit_tokens: metrics.prefix_hit_tokens,
            prefix_miss_tokens: metrics.prefix_miss_tokens,
            cache_hit_rate: share(metrics.prefix_hit_tokens, looked_up),
            kv_tiers: metrics.tiers.map(TiersView::from),
            lease_age_s: seconds(metrics.lease_age_ms),
            read_age_s: seconds(metrics.read_age_ms),
            started_at_ms: worker.started_at.0,
            heard_s_ago: worker.silent.as_secs_f64(),
        }
    }
}

/// Workers.
#[derive(Serialize, ToSchema)]
pub(crate) struct WorkerList {
    /// Workers by name.
    data: Vec<WorkerView>,
}

/// Lists the workers that sent a heartbeat within a day.
#[utoipa::path(get, path = "/admin/v1/workers", tag = "workers",
    responses((status = 200, description = "By name", body = WorkerList)))]
pub(crate) async fn list(State(app): State<App>) -> JsonResult<WorkerList> {
    let workers = app.store.workers().await?;
    Ok(Json(WorkerList { data: workers.into_iter().map(WorkerView::from).collect() }))
}

/// A worker to drain.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct DrainRequest {
    /// Identifier of the worker, as in the list.
    worker: String,
}

/// Asks a worker to finish its running jobs and exit.
#[utoipa::path(post, path = "/admin/v1/workers/drain", tag = "workers",
    request_body = DrainRequest,
    responses((status = 200, description = "The worker drains after its next heartbeat", body = Done)))]
pub(crate) async fn drain(
    Call { app, caller }: Call,
    JsonBody(DrainRequest { worker }): JsonBody<DrainRequest>,
) -> JsonResult<Done> {
    drain_worker(&app, &caller, &worker).await?;
    Ok(DONE)
}

/// Asks a worker to drain and records it in the audit log.
pub(crate) async fn drain_worker(app: &App, caller: &Caller, worker: &str) -> Result<(), ApiError> {
    let unknown = || ApiError::not_found("worker", worker);
    if worker.contains('\0') {
        return Err(unknown());
    }
    audit::record(app, caller, "worker.drain", worker, json!({})).await?;
    if !app.store.request_drain(worker).await? {
        return Err(unknown());
    }
    Ok(())
}
