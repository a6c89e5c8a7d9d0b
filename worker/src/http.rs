//! What a worker tells the outside over HTTP: `/healthz`, `/readyz`, `/metrics`.

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

/// The type of Prometheus' and OpenMetrics' text.
const METRICS_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// How long the listener may fail, as it does for want of file descriptors, before it counts as
/// broken.
const PATIENCE: Duration = Duration::from_secs(30);
/// Wait before the listener is asked again after a failure.
const ACCEPT_WAIT: Duration = Duration::from_millis(100);

/// Listens; the address tells the port where 0 was asked for. Answer with [`serve`].
///
/// # Errors
/// If the address is taken.
pub async fn listen(address: SocketAddr) -> io::Result<(TcpListener, SocketAddr)> {
    let listener = TcpListener::bind(address).await?;
    let address = listener.local_addr()?;
    Ok((listener, address))
}

/// Answers until it is dropped.
///
/// # Errors
/// If the listener takes no connection for [`PATIENCE`], though it is asked to again and again.
pub async fn serve(listener: TcpListener, metrics: Arc<Metrics>) -> io::Result<()> {
    serve_with(listener, metrics, PATIENCE).await
}

async fn serve_with(
    listener: TcpListener,
    metrics: Arc<Metrics>,
    patience: Duration,
) -> io::Result<()> {
    let router = Router::new()
        // The process runs and its async side is not stuck: that is all this says.
        .route("/healthz", get(async || "ok\n"))
        .route("/readyz", get(ready))
        .route("/metrics", get(metrics_text))
        .with_state(metrics);
    let (give_up, given_up) = oneshot::channel();
    let listener = Patient { listener, patience, give_up: Some(give_up) };
    tokio::select! {
        ended = axum::serve(listener, router).into_future() => ended,
        Ok(error) = given_up => Err(error),
    }
}

/// A listener that says when it fails for good: axum's own would try without end, and nobody would
/// know.
struct Patient {
    listener: TcpListener,
    patience: Duration,
    give_up: Option<oneshot::Sender<io::Error>>,
}

impl Listener for Patient {
    type Io = TcpStream;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (TcpStream, SocketAddr) {
        let mut failing_since = None;
        loop {
            let error = match self.listener.accept().await {
                Ok(connection) => return connection,
                // Of one connection that is gone already.
                Err(error) if of_the_connection(&error) => continue,
                Err(error) => error,
            };
            if failing_since.get_or_insert_with(Instant::now).elapsed() >= self.patience {
                if let Some(give_up) = self.give_up.take() {
                    // Unheard only by a server that is being dropped.
                    let _ = give_up.send(error);
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

fn of_the_connection(error: &io::Error) -> bool {
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
    async fn a_listener_that_is_broken_is_reported() {
        let (listener, address) =
            listen(SocketAddr::from(([127, 0, 0, 1], 0))).await.expect("a free port");
        let listener: StdListener = listener.into_std().expect("a listener");
        let again: OwnedFd = listener.try_clone().expect("the same listener").into();
        let listener = TcpListener::from_std(listener).expect("a listener");
        let patience = ACCEPT_WAIT * 3;
        let serving = tokio::spawn(serve_with(listener, Arc::default(), patience));
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
        assert!(!of_the_connection(&failed), "{failed}");
    }
}
