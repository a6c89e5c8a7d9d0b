//! How queues fared, from minutes to weeks, and what was put right.

use std::time::Duration;

use axum::{
    Json,
    extract::{Query, State, rejection::QueryRejection},
};
use serde::{Deserialize, Serialize};
use tritmill_queue::store::{
    history::{Histogram, Period, Point, downsample},
    operations::Integrity,
};
use utoipa::ToSchema;

use super::request::{self, bounded, parsed};
use crate::{app::App, error::ApiError, openapi::Refused};

/// Points of an answer at most.
const POINTS_MAX: u64 = 1000;
/// The longest time back.
const MINUTES_MAX: u64 = 90 * 24 * 60;

/// Of what, and how far back.
#[derive(Debug, Default, Deserialize, utoipa::IntoParams)]
#[serde(default, deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct HistoryQuery {
    /// `MODEL@FORMAT`; all queues together without.
    #[param(nullable = false)]
    queue: Option<String>,
    /// How far back; an hour without.
    #[param(nullable = false, value_type = Option<u64>, minimum = 1, maximum = 129600)]
    minutes: Option<String>,
    /// Points at most; 120 without.
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

/// A time and what happened from then to the next.
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
    /// Share of the workers' room that was used.
    batch_fill: Option<f64>,
    /// From submission to the first claim.
    start: Percentiles,
    /// From the last claim to the end.
    run: Percentiles,
    /// From submission to the first token.
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

/// Points in order of time.
#[derive(Serialize, ToSchema)]
pub(crate) struct PointList {
    data: Vec<PointView>,
}

/// How a queue fared, or all together.
#[utoipa::path(get, path = "/admin/v1/history", tag = "queues", params(HistoryQuery),
    responses((status = 200, description = "The oldest first", body = PointList),
        (status = "4XX", description = "Refused", body = Refused),
        (status = "5XX", description = "Try again", body = Refused),))]
pub(crate) async fn list(
    State(app): State<App>,
    query: Result<Query<HistoryQuery>, QueryRejection>,
) -> Result<Json<PointList>, ApiError> {
    let HistoryQuery { queue, minutes, points } = request::query(query)?;
    let queue = queue.as_deref().map(request::queue).transpose()?;
    let minutes =
        bounded("minutes", parsed("minutes", "a number", minutes.as_deref())?, 60, MINUTES_MAX)?;
    let most =
        bounded("points", parsed("points", "a number", points.as_deref())?, 120, POINTS_MAX)?;
    let span = Duration::from_secs(minutes * 60);
    let now = app.store().now().await?;
    let (period, from) = (Period::for_span(span), now.before(span));
    let found = app.store().samples(queue.as_ref(), period, from, now.after(span)).await?;
    let data = downsample(found, most as usize).into_iter().map(PointView::from).collect();
    Ok(Json(PointList { data }))
}

/// What was put right, or kept from going wrong, by all workers so far.
#[derive(Serialize, ToSchema)]
pub(crate) struct IntegrityView {
    /// Jobs whose lease was over, queued again or failed.
    leases_reclaimed: u64,
    /// Jobs that a worker stopped, since their claim was gone.
    leases_lost: u64,
    /// Results that were discarded, since the claim was gone.
    results_fenced: u64,
    /// Deliveries of jobs that were over, withdrawn or somebody else's.
    duplicates_suppressed: u64,
    /// Times that the dispatcher had lost a queue (NOGROUP).
    dispatcher_losses: u64,
    /// Queued jobs that the dispatcher did not know and was told of again.
    jobs_fed_again: u64,
}

/// What was put right.
#[utoipa::path(get, path = "/admin/v1/integrity", tag = "service",
    responses((status = 200, description = "Counts", body = IntegrityView),
        (status = "4XX", description = "Refused", body = Refused),
        (status = "5XX", description = "Try again", body = Refused),))]
pub(crate) async fn integrity(State(app): State<App>) -> Result<Json<IntegrityView>, ApiError> {
    let Integrity {
        leases_reclaimed,
        leases_lost,
        results_fenced,
        duplicates_suppressed,
        dispatcher_losses,
        jobs_fed_again,
    } = app.store().integrity().await?;
    Ok(Json(IntegrityView {
        leases_reclaimed,
        leases_lost,
        results_fenced,
        duplicates_suppressed,
        dispatcher_losses,
        jobs_fed_again,
    }))
}
