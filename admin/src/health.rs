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
use tokio::{
    sync::Mutex,
    time::{Instant, timeout},
};
use tracing::Instrument as _;

use crate::{ApiError, App, request_trace};

/// Media type of the OpenMetrics text format.
const METRICS_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
/// The store counts as unavailable when it takes longer than this.
const STORE_WAIT: Duration = Duration::from_secs(2);
/// How long an answer of the store is valid. Readiness is public, and each question costs the store time.
const READY_FOR: Duration = Duration::from_millis(250);
/// How long the check of a dispatcher is valid, which is some twenty calls.
const CHECKED_FOR: Duration = Duration::from_secs(5);

/// Whether a server is ready, or why not, and until when that is valid.
type Answer = Option<(Instant, Result<(), &'static str>)>;

/// The last answers of store and dispatcher.
#[derive(Default)]
pub(crate) struct Readiness {
    store: Mutex<Answer>,
    dispatcher: Mutex<Answer>,
}

impl Readiness {
    /// Asks the store, unless it was asked a moment ago.
    async fn get(&self, app: &App) -> Result<(), &'static str> {
        let mut last = self.store.lock().await;
        if let Some((until, answer)) = *last
            && Instant::now() < until
        {
            return answer;
        }
        let answer = match timeout(STORE_WAIT, app.client.now()).await {
            Ok(Ok(_)) => self.dispatcher(app).await,
            Ok(Err(error)) => {
                tracing::warn!(%error, "not ready");
                Err("the store does not answer\n")
            }
            Err(_) => Err("the store does not answer in time\n"),
        };
        *last = Some((Instant::now() + READY_FOR, answer));
        answer
    }

    /// Asks the dispatcher, unless it was asked some seconds ago.
    async fn dispatcher(&self, app: &App) -> Result<(), &'static str> {
        let mut last = self.dispatcher.lock().await;
        if let Some((until, answer)) = *last
            && Instant::now() < until
        {
            return answer;
        }
        let answer = match timeout(STORE_WAIT, app.client.check_dispatcher()).await {
            Ok(Err(error)) => {
                tracing::error!(%error, "not ready");
                Err("the dispatcher refuses this service: see the server's log\n")
            }
            // Without a dispatcher, workers find jobs in the store.
            Ok(Ok(())) | Err(_) => Ok(()),
        };
        *last = Some((Instant::now() + CHECKED_FOR, answer));
        answer
    }
}

/// Counts a request by its route and status, runs it in a span, and adds its id to the response.
pub(crate) async fn count_request(
    State(app): State<App>,
    mut request: Request,
    next: Next,
) -> Response {
    let route = request.extensions().get::<MatchedPath>().cloned();
    let route = route.as_ref().map_or("none", MatchedPath::as_str);
    let id = request_trace::id(request.headers());
    let span = request_trace::span(&request, route, &id);
    request.extensions_mut().insert(request_trace::RequestId(id.clone()));
    let mut response = next.run(request).instrument(span.clone()).await;
    response.headers_mut().insert(request_trace::REQUEST_ID, id);
    let status = response.status();
    request_trace::end(&span, status);
    app.metrics.count_request(route, status.as_u16());
    response
}

/// Liveness: the process runs and answers requests.
#[utoipa::path(get, path = "/healthz", tag = "service", security(()),
    responses((status = 200, description = "The process runs"),))]
pub(crate) async fn alive() -> &'static str {
    "ok\n"
}

/// Readiness: the store answers, and the dispatcher does not refuse this service.
#[utoipa::path(get, path = "/readyz", tag = "service", security(()),
    responses((status = 200, description = "Ready"), (status = 503, description = "The store does not answer, or the dispatcher refuses this service"),))]
pub(crate) async fn ready(State(app): State<App>) -> (StatusCode, &'static str) {
    match app.readiness.get(&app).await {
        Ok(()) => (StatusCode::OK, "ready\n"),
        Err(reason) => (StatusCode::SERVICE_UNAVAILABLE, reason),
    }
}

/// Returns all metrics in OpenMetrics text format.
#[utoipa::path(get, path = "/metrics", tag = "service",
    responses((status = 200, description = "OpenMetrics text")))]
pub(crate) async fn metrics(State(app): State<App>) -> Result<impl IntoResponse, ApiError> {
    let queues = queue_metrics::registry(&app).await?;
    let (notices, now) = (app.store.count_notices().await?, app.store.now().await?);
    app.metrics.set_notices(&notices, now);
    let mut out = String::new();
    // Writing to a string does not fail.
    let _ = app.metrics.encode(&mut out);
    let _ = text::encode_registry(&mut out, &queues);
    let _ = text::encode_eof(&mut out);
    Ok(([(header::CONTENT_TYPE, METRICS_TYPE)], out))
}
