//! What a worker tells the outside over HTTP: `/healthz`, `/readyz`, `/metrics`.

use std::{net::SocketAddr, sync::Arc};

use axum::{
    Router,
    extract::State,
    http::{StatusCode, header},
    response::IntoResponse,
    routing::get,
};
use tokio::net::TcpListener;

use crate::vitals::Vitals;

/// The type of Prometheus' and OpenMetrics' text.
const METRICS_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Listens; the address tells the port where 0 was asked for. Answer with [`serve`].
///
/// # Errors
/// If the address is taken.
pub async fn listen(address: SocketAddr) -> std::io::Result<(TcpListener, SocketAddr)> {
    let listener = TcpListener::bind(address).await?;
    let address = listener.local_addr()?;
    Ok((listener, address))
}

/// Answers until it is dropped.
///
/// # Errors
/// If the listener fails.
pub async fn serve(listener: TcpListener, vitals: Arc<Vitals>) -> std::io::Result<()> {
    let router = Router::new()
        // The process runs and its async side is not stuck: that is all this says.
        .route("/healthz", get(async || "ok\n"))
        .route("/readyz", get(ready))
        .route("/metrics", get(metrics))
        .with_state(vitals);
    axum::serve(listener, router).await
}

async fn ready(State(vitals): State<Arc<Vitals>>) -> impl IntoResponse {
    match vitals.unready() {
        None => (StatusCode::OK, "ready\n".to_owned()),
        Some(why) => (StatusCode::SERVICE_UNAVAILABLE, why + "\n"),
    }
}

async fn metrics(State(vitals): State<Arc<Vitals>>) -> impl IntoResponse {
    ([(header::CONTENT_TYPE, METRICS_TYPE)], vitals.metrics())
}
