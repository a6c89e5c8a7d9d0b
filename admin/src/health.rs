//! `/healthz`, `/readyz`, `/metrics`, and what they tell.

mod queues;

use std::time::Duration;

use axum::{
    extract::{MatchedPath, Request, State},
    http::{StatusCode, header},
    middleware::Next,
    response::{IntoResponse, Response},
};
use prometheus_client::{
    encoding::{EncodeLabelSet, text},
    metrics::{counter::Counter, family::Family, gauge::Gauge},
    registry::Registry,
};
use tokio::time::timeout;

use crate::{app::App, error::ApiError, openapi::Refused};

/// The type of Prometheus' and OpenMetrics' text.
const METRICS_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
/// A store that does not answer within this is away.
const STORE_WAIT: Duration = Duration::from_secs(2);

/// Of a request that was answered. Both are from small sets, whatever callers send.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Answered {
    route: String,
    status: u16,
}

/// What the service counts.
pub(crate) struct Metrics {
    registry: Registry,
    requests: Family<Answered, Counter>,
    /// Batches this process drives.
    pub batches_driven: Gauge,
    /// Answers that stream now.
    pub streams: Gauge,
}

impl Default for Metrics {
    fn default() -> Self {
        let mut registry = Registry::with_prefix("tritmill_admin");
        let (requests, batches_driven, streams) = <(Family<_, _>, Gauge, Gauge)>::default();
        registry.register("requests", "Requests answered", requests.clone());
        let help = "Batches that this process drives";
        registry.register("batches_driven", help, batches_driven.clone());
        registry.register("streams", "Answers that stream now", streams.clone());
        Self { registry, requests, batches_driven, streams }
    }
}

/// Counts a request by its route and status.
pub(crate) async fn count(State(app): State<App>, request: Request, next: Next) -> Response {
    let route = request.extensions().get::<MatchedPath>().map(|path| path.as_str().to_owned());
    let response = next.run(request).await;
    let route = route.unwrap_or_else(|| "none".to_owned());
    let status = response.status().as_u16();
    app.metrics().requests.get_or_create(&Answered { route, status }).inc();
    response
}

/// The process runs and its async side is not stuck: that is all this says.
#[utoipa::path(get, path = "/healthz", tag = "service", security(()),
    responses((status = 200, description = "It runs"),))]
pub(crate) async fn alive() -> &'static str {
    "ok\n"
}

/// The store answers.
#[utoipa::path(get, path = "/readyz", tag = "service", security(()),
    responses((status = 200, description = "It can answer"), (status = 503, description = "It cannot"),))]
pub(crate) async fn ready(State(app): State<App>) -> (StatusCode, &'static str) {
    match timeout(STORE_WAIT, app.client().now()).await {
        Ok(Ok(_)) => (StatusCode::OK, "ready\n"),
        Ok(Err(error)) => {
            tracing::warn!(%error, "not ready");
            (StatusCode::SERVICE_UNAVAILABLE, "the store does not answer\n")
        }
        Err(_) => (StatusCode::SERVICE_UNAVAILABLE, "the store does not answer in time\n"),
    }
}

/// All metrics in Prometheus' text form.
#[utoipa::path(get, path = "/metrics", tag = "service",
    responses((status = 200, description = "OpenMetrics"),
        (status = "4XX", description = "Refused", body = Refused),
        (status = "5XX", description = "Try again", body = Refused),))]
pub(crate) async fn metrics(State(app): State<App>) -> Result<impl IntoResponse, ApiError> {
    let of_queues = queues::registry(&app).await?;
    let mut out = String::new();
    // Writing to a string does not fail.
    let _ = text::encode_registry(&mut out, &app.metrics().registry);
    let _ = text::encode_registry(&mut out, &of_queues);
    let _ = text::encode_eof(&mut out);
    Ok(([(header::CONTENT_TYPE, METRICS_TYPE)], out))
}
