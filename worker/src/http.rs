//! The HTTP endpoints of a worker: `/healthz`, `/readyz`, `/metrics`, and for other workers `/kv/HASH` and `/kv/find`.

use std::{io, net::SocketAddr, path::PathBuf, sync::Arc, time::Duration};

use axum::{
    Json, Router,
    extract::{Path, State},
    http::{HeaderMap, StatusCode, header},
    response::IntoResponse,
    routing::{get, post},
};
use tokio::net::TcpListener;
use tritmill_engine::kv::disk;
use tritmill_http::{Bounds, Server};

use crate::pool::Pages;

/// The content type of the OpenMetrics text format.
const METRICS_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Connections that a worker needs at most.
pub const CONNECTIONS_MAX: usize = 256;
/// How long the listener may be broken before [`serve`] fails.
const FAILURE_LIMIT: Duration = Duration::from_secs(30);
/// Longest wait for a client.
const CLIENT_TIMEOUT: Duration = Duration::from_secs(10);

/// KV blocks that other workers may read.
#[derive(Clone)]
pub struct SharedBlocks {
    /// The folder of the blocks.
    pub folder: PathBuf,
    /// The secret that readers send as a bearer token.
    pub key: String,
}

impl std::fmt::Debug for SharedBlocks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SharedBlocks").field("folder", &self.folder).finish_non_exhaustive()
    }
}

impl SharedBlocks {
    fn check_key(&self, headers: &HeaderMap) -> Result<(), StatusCode> {
        let given = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
        let given = given.and_then(|value| value.strip_prefix("Bearer "));
        let given = given.ok_or(StatusCode::UNAUTHORIZED)?;
        // Hashes are compared in constant time.
        let is_equal = blake3::hash(given.as_bytes()) == blake3::hash(self.key.as_bytes());
        if is_equal && !self.key.is_empty() { Ok(()) } else { Err(StatusCode::UNAUTHORIZED) }
    }
}

/// Opens a listener for [`serve`]; returns its address with the actual port for port 0.
///
/// # Errors
/// If the address is taken.
pub async fn listen(address: SocketAddr) -> io::Result<(TcpListener, SocketAddr)> {
    let listener = TcpListener::bind(address).await?;
    let address = listener.local_addr()?;
    Ok((listener, address))
}

/// Serves until the future is dropped. A new connection is always served: if there are too many, or no file
/// descriptor is free, the one that has waited longest for its client is closed. The process needs as many
/// file descriptors as there are connections, and [`tritmill_http::SLACK`].
///
/// # Errors
/// If the listener has been broken for 30 seconds.
pub async fn serve(
    listener: TcpListener,
    pages: Arc<Pages>,
    blocks: Option<SharedBlocks>,
    connections: usize,
) -> io::Result<()> {
    let bounds = Bounds {
        client_timeout: CLIENT_TIMEOUT,
        give_up_after: Some(FAILURE_LIMIT),
        ..Bounds::of_connections(connections)
    };
    serve_within(bounds, listener, pages, blocks).await
}

async fn serve_within(
    bounds: Bounds,
    listener: TcpListener,
    pages: Arc<Pages>,
    blocks: Option<SharedBlocks>,
) -> io::Result<()> {
    let http = pages.http.clone();
    let router = Router::new()
        // Shows only that the process runs and its async side is not stuck.
        .route("/healthz", get(async || "ok\n"))
        .route("/readyz", get(ready))
        .route("/metrics", get(metrics_text))
        .with_state(pages);
    let router = match blocks {
        Some(blocks) => {
            let of_blocks =
                Router::new().route("/kv/find", post(find)).route("/kv/{hash}", get(block));
            router.merge(of_blocks.with_state(Arc::new(blocks)))
        }
        None => router,
    };
    let server = Server { bounds, metrics: http, ..Server::default() };
    server.serve(listener, router, std::future::pending()).await
}

async fn ready(State(pages): State<Arc<Pages>>) -> impl IntoResponse {
    match pages.not_ready_reason() {
        None => (StatusCode::OK, "ready\n".to_owned()),
        Some(why) => (StatusCode::SERVICE_UNAVAILABLE, why + "\n"),
    }
}

async fn metrics_text(State(pages): State<Arc<Pages>>) -> impl IntoResponse {
    ([(header::CONTENT_TYPE, METRICS_TYPE)], pages.encode())
}

/// Returns the file of a KV block.
async fn block(
    State(blocks): State<Arc<SharedBlocks>>,
    Path(hash): Path<String>,
    headers: HeaderMap,
) -> Result<Vec<u8>, StatusCode> {
    blocks.check_key(&headers)?;
    let read = move || disk::read_file(&blocks.folder, &hash);
    match tokio::task::spawn_blocking(read).await {
        Ok(Ok(Some(file))) => Ok(file),
        Ok(Ok(None)) => Err(StatusCode::NOT_FOUND),
        _ => Err(StatusCode::INTERNAL_SERVER_ERROR),
    }
}

/// Returns which of some KV blocks and states there are, by their places among the names.
async fn find(
    State(blocks): State<Arc<SharedBlocks>>,
    headers: HeaderMap,
    Json(names): Json<Vec<String>>,
) -> Result<Json<Vec<usize>>, StatusCode> {
    blocks.check_key(&headers)?;
    if names.len() > disk::NAMES_MAX {
        return Err(StatusCode::PAYLOAD_TOO_LARGE);
    }
    let find = move || disk::find_files(&blocks.folder, &names);
    let found = tokio::task::spawn_blocking(find).await;
    found.map(Json).map_err(|_| StatusCode::INTERNAL_SERVER_ERROR)
}

#[cfg(test)]
mod tests {
    use std::{
        io::{Read as _, Write as _},
        net::{Shutdown, TcpListener as StdListener, TcpStream as StdStream},
        os::fd::OwnedFd,
    };

    use super::*;
    use crate::pool::Pool;

    #[tokio::test(flavor = "multi_thread")]
    async fn broken_listener_is_reported() {
        let (listener, address) =
            listen(SocketAddr::from(([127, 0, 0, 1], 0))).await.expect("a free port");
        let listener: StdListener = listener.into_std().expect("a listener");
        let again: OwnedFd = listener.try_clone().expect("the same listener").into();
        let listener = TcpListener::from_std(listener).expect("a listener");
        let pages = Pool::new(Vec::new(), None).pages();
        let give_up_after = Some(Duration::from_millis(300));
        let bounds = Bounds { give_up_after, ..Bounds::of_connections(CONNECTIONS_MAX) };
        let serving = tokio::spawn(serve_within(bounds, listener, Arc::new(pages), None));
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
        assert_eq!(failed.kind(), io::ErrorKind::InvalidInput, "{failed}");
    }
}
