//! `/healthz`, `/readyz` and `/metrics`.

mod queue_metrics;

use std::time::Duration;

use axum::{
    extract::{MatchedPath, Request, State},
    http::{StatusCode, header},
    middleware::Next,
    response::{IntoResponse, Response},
};
use prometheus_client::encoding::text;
use tokio::time::timeout;

use crate::{ApiError, App};

/// Media type of the OpenMetrics text format.
const METRICS_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
/// The store counts as unavailable when it takes longer than this.
const STORE_WAIT: Duration = Duration::from_secs(2);

/// Counts a request by its route and status.
pub(crate) async fn count_request(
    State(app): State<App>,
    request: Request,
    next: Next,
) -> Response {
    let route = request.extensions().get::<MatchedPath>().cloned();
    let response = next.run(request).await;
    let route = route.as_ref().map_or("none", MatchedPath::as_str);
    app.metrics.count_request(route, response.status().as_u16());
    response
}

/// Liveness: the process runs and answers requests.
#[utoipa::path(get, path = "/healthz", tag = "service", security(()),
    responses((status = 200, description = "The process runs"),))]
pub(crate) async fn alive() -> &'static str {
    "ok\n"
}

/// Readiness: the store answers.
#[utoipa::path(get, path = "/readyz", tag = "service", security(()),
    responses((status = 200, description = "Ready"), (status = 503, description = "The store does not answer"),))]
pub(crate) async fn ready(State(app): State<App>) -> (StatusCode, &'static str) {
    match timeout(STORE_WAIT, app.client.now()).await {
        Ok(Ok(_)) => (StatusCode::OK, "ready\n"),
        Ok(Err(error)) => {
            tracing::warn!(%error, "not ready");
            (StatusCode::SERVICE_UNAVAILABLE, "the store does not answer\n")
        }
        Err(_) => (StatusCode::SERVICE_UNAVAILABLE, "the store does not answer in time\n"),
    }
}

/// Returns all metrics in OpenMetrics text format.
#[utoipa::path(get, path = "/metrics", tag = "service",
    responses((status = 200, description = "OpenMetrics text")))]
pub(crate) async fn metrics(State(app): State<App>) -> Result<impl IntoResponse, ApiError> {
    let queues = queue_metrics::registry(&app).await?;
    let mut out = String::new();
    // Writing to a string does not fail.
    let _ = app.metrics.encode(&mut out);
    let _ = text::encode_registry(&mut out, &queues);
    let _ = text::encode_eof(&mut out);
    Ok(([(header::CONTENT_TYPE, METRICS_TYPE)], out))
}
