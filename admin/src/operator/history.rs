//! History of queues, from minutes to weeks, and the integrity counters.

use std::time::Duration;

use axum::{Json, extract::State};
use serde::{Deserialize, Serialize};
use tritmill_queue::store::history::{Histogram, Period, Point, downsample};
use utoipa::ToSchema;

use super::params::{self, number};
use crate::{App, JsonResult, QueryParams};

/// Most points of a response.
const POINTS_MAX: u64 = 1000;
/// Longest time span, in minutes.
const MINUTES_MAX: u64 = 90 * 24 * 60;

/// Queue and time span.
#[derive(Debug, Default, Deserialize, utoipa::IntoParams)]
#[serde(default, deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct HistoryQuery {
    /// `MODEL@FORMAT`; the sum of all queues by default.
    #[param(nullable = false)]
    queue: Option<String>,
    /// Time span until now; 60 by default.
    #[param(nullable = false, value_type = Option<u64>, minimum = 1, maximum = 129600)]
    minutes: Option<String>,
    /// Most points to return; 120 by default.
    #[param(nullable = false, value_type = Option<u64>, minimum = 1, maximum = 1000)]
    points: Option<String>,
}

/// Percentiles of a latency, in seconds.
#[derive(Serialize, ToSchema)]
pub(crate) struct Percentiles {
    count: u64,
    p50_s: Option<f64>,
    p95_s: Option<f64>,
    p99_s: Option<f64>,
}

impl From<&Histogram> for Percentiles {
    fn from(histogram: &Histogram) -> Self {
        let at = |share| histogram.quantile(share).map(|time| time.as_secs_f64());
        Self { count: histogram.count(), p50_s: at(0.5), p95_s: at(0.95), p99_s: at(0.99) }
    }
}

/// State and rates of a queue from `at_ms` until the next point.
#[derive(Serialize, ToSchema)]
pub(crate) struct PointView {
    at_ms: i64,
    queued_mean: f64,
    queued_max: u64,
    oldest_queued_s: f64,
    arrived_per_s: f64,
    completed_per_s: f64,
    failed_per_s: f64,
    prompt_tokens_per_s: f64,
    completion_tokens_per_s: f64,
    /// Share of the workers' slots that were used.
    batch_fill: Option<f64>,
    /// Time from submission to the first claim.
    start: Percentiles,
    /// Time from the last claim to the end.
    run: Percentiles,
    /// Time from submission to the first token.
    first_token: Percentiles,
}

impl From<Point> for PointView {
    fn from(Point { at, sample }: Point) -> Self {
        Self {
            at_ms: at.0,
            queued_mean: sample.queued_mean(),
            queued_max: sample.queued_max,
            oldest_queued_s: sample.oldest_ms_max as f64 / 1000.0,
            arrived_per_s: sample.per_second(sample.arrived),
            completed_per_s: sample.per_second(sample.completed),
            failed_per_s: sample.per_second(sample.failed),
            prompt_tokens_per_s: sample.per_second(sample.prompt_tokens),
            completion_tokens_per_s: sample.per_second(sample.completion_tokens),
            batch_fill: sample.batch_fill(),
            start: Percentiles::from(&sample.latencies.start),
            run: Percentiles::from(&sample.latencies.run),
            first_token: Percentiles::from(&sample.latencies.first_token),
        }
    }
}

/// Points of a history.
#[derive(Serialize, ToSchema)]
pub(crate) struct PointList {
    /// Points, the oldest first.
    data: Vec<PointView>,
}

/// Returns the history of a queue, or of all queues together.
#[utoipa::path(get, path = "/admin/v1/history", tag = "queues", params(HistoryQuery),
    responses((status = 200, description = "The oldest first", body = PointList)))]
pub(crate) async fn list(
    State(app): State<App>,
    QueryParams(query): QueryParams<HistoryQuery>,
) -> JsonResult<PointList> {
    let HistoryQuery { queue, minutes, points } = query;
    let queue = queue.as_deref().map(params::queue).transpose()?;
    let minutes = number("minutes", minutes.as_deref(), 60, MINUTES_MAX)?;
    let points = number("points", points.as_deref(), 120, POINTS_MAX)?;
    let span = Duration::from_secs(minutes * 60);
    let now = app.store.now().await?;
    let (period, from) = (Period::for_span(span), now.before(span));
    let samples = app.store.samples(queue.as_ref(), period, from, now.after(span)).await?;
    let data = downsample(samples, points as usize).into_iter().map(PointView::from).collect();
    Ok(Json(PointList { data }))
}

/// Faults detected and corrected by all workers. Each count is a prevented loss.
#[derive(Serialize, ToSchema)]
pub(crate) struct IntegrityView {
    /// Jobs of expired leases that were queued again or failed.
    leases_reclaimed: u64,
    /// Jobs that a worker stopped because its claim was no longer valid.
    leases_lost: u64,
    /// Results that were discarded because their claim was no longer valid.
    results_fenced: u64,
    /// Deliveries of jobs that were finished, cancelled or claimed by another worker.
    duplicates_suppressed: u64,
    /// Times that the dispatcher had lost a queue (NOGROUP).
    dispatcher_losses: u64,
    /// Queued jobs that were announced again because the dispatcher had lost them.
    jobs_fed_again: u64,
}

/// Returns counts of faults that were detected and corrected.
#[utoipa::path(get, path = "/admin/v1/integrity", tag = "service",
    responses((status = 200, description = "Counts", body = IntegrityView)))]
pub(crate) async fn integrity(State(app): State<App>) -> JsonResult<IntegrityView> {
    let all = app.store.integrity().await?;
    Ok(Json(IntegrityView {
        leases_reclaimed: all.leases_reclaimed,
        leases_lost: all.leases_lost,
        results_fenced: all.results_fenced,
        duplicates_suppressed: all.duplicates_suppressed,
        dispatcher_losses: all.dispatcher_losses,
        jobs_fed_again: all.jobs_fed_again,
    }))
}
