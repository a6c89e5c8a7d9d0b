//! The HTTP endpoints of a worker: `/healthz`, `/readyz`, `/metrics`.

use std::{io, net::SocketAddr, sync::Arc, time::Duration};

use axum::{
    Router,
    extract::State,
    http::{StatusCode, header},
    response::IntoResponse,
    routing::get,
    serve::Listener,
};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::oneshot,
    time::{Instant, sleep},
};

use crate::metrics::Metrics;

/// The content type of the OpenMetrics text format.
const METRICS_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// How long accepting may fail, for example without free file descriptors, before the listener counts
/// as broken.
const FAILURE_LIMIT: Duration = Duration::from_secs(30);
/// Wait after a failed accept.
const ACCEPT_WAIT: Duration = Duration::from_millis(100);

/// Opens a listener for [`serve`]; returns its address with the actual port for port 0.
///
/// # Errors
/// If the address is taken.
pub async fn listen(address: SocketAddr) -> io::Result<(TcpListener, SocketAddr)> {
    let listener = TcpListener::bind(address).await?;
    let address = listener.local_addr()?;
    Ok((listener, address))
}

/// Serves until the future is dropped.
///
/// # Errors
/// If accepting connections has failed for 30 seconds.
pub async fn serve(listener: TcpListener, metrics: Arc<Metrics>) -> io::Result<()> {
    serve_with(listener, metrics, FAILURE_LIMIT).await
}

async fn serve_with(
    listener: TcpListener,
    metrics: Arc<Metrics>,
    failure_limit: Duration,
) -> io::Result<()> {
    let router = Router::new()
        // Shows only that the process runs and its async side is not stuck.
        .route("/healthz", get(async || "ok\n"))
        .route("/readyz", get(ready))
        .route("/metrics", get(metrics_text))
        .with_state(metrics);
    let (broken, on_broken) = oneshot::channel();
    let listener = LimitedListener { listener, failure_limit, broken: Some(broken) };
    tokio::select! {
        ended = axum::serve(listener, router).into_future() => ended,
        Ok(error) = on_broken => Err(error),
    }
}

/// A listener that reports permanent failure; axum's own would silently retry without end.
struct LimitedListener {
    listener: TcpListener,
    failure_limit: Duration,
    broken: Option<oneshot::Sender<io::Error>>,
}

impl Listener for LimitedListener {
    type Io = TcpStream;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (TcpStream, SocketAddr) {
        let mut failing_since = None;
        loop {
            let error = match self.listener.accept().await {
                Ok(connection) => return connection,
                // Only this connection failed.
                Err(error) if is_of_connection(&error) => continue,
                Err(error) => error,
            };
            if failing_since.get_or_insert_with(Instant::now).elapsed() >= self.failure_limit {
                if let Some(broken) = self.broken.take() {
                    // Fails only while the server is being dropped.
                    let _ = broken.send(error);
                }
                return std::future::pending().await;
            }
            sleep(ACCEPT_WAIT).await;
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

fn is_of_connection(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset};
    matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset)
}

async fn ready(State(metrics): State<Arc<Metrics>>) -> impl IntoResponse {
    match metrics.not_ready_reason() {
        None => (StatusCode::OK, "ready\n".to_owned()),
        Some(why) => (StatusCode::SERVICE_UNAVAILABLE, why + "\n"),
    }
}

async fn metrics_text(State(metrics): State<Arc<Metrics>>) -> impl IntoResponse {
    ([(header::CONTENT_TYPE, METRICS_TYPE)], metrics.encode())
}

#[cfg(test)]
mod tests {
    use std::{
        io::{Read as _, Write as _},
        net::{Shutdown, TcpListener as StdListener, TcpStream as StdStream},
        os::fd::OwnedFd,
    };

    use super::*;

    #[tokio::test(flavor = "multi_thread")]
    async fn broken_listener_is_reported() {
        let (listener, address) =
            listen(SocketAddr::from(([127, 0, 0, 1], 0))).await.expect("a free port");
        let listener: StdListener = listener.into_std().expect("a listener");
        let again: OwnedFd = listener.try_clone().expect("the same listener").into();
        let listener = TcpListener::from_std(listener).expect("a listener");
        let failure_limit = ACCEPT_WAIT * 3;
        let serving = tokio::spawn(serve_with(listener, Arc::default(), failure_limit));
        let answer = tokio::task::spawn_blocking(move || {
            let mut stream = StdStream::connect(address).expect("it listens");
            stream
                .write_all(b"GET /healthz HTTP/1.1\r\nHost: w\r\nConnection: close\r\n\r\n")
                .expect("it reads");
            let mut answer = String::new();
            stream.read_to_string(&mut answer).expect("it answers");
            answer
        });
        assert!(answer.await.expect("answered").contains("200 OK"));
        // From here on every accept fails at once.
        StdStream::from(again).shutdown(Shutdown::Both).expect("a socket");
        let ended = tokio::time::timeout(Duration::from_secs(20), serving).await;
        let failed = ended.expect("it gives up").expect("no panic").expect_err("it is broken");
        assert!(!is_of_connection(&failed), "{failed}");
    }
}
