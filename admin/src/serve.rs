//! [`serve`]: the listener, with bounds on connections.

use std::{
    convert::Infallible,
    io,
    net::IpAddr,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use axum::Router;
use hyper::{
    Request,
    body::{Body, Bytes, Frame, Incoming, SizeHint},
    header::{self, HeaderValue},
    server::conn::http1,
    service::{Service as _, service_fn},
};
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    server::graceful::{GracefulShutdown, Watcher},
    service::TowerToHyperService,
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, TcpStream},
    sync::Semaphore,
    time::{sleep, timeout},
};
use tokio_rustls::server::TlsStream;

use crate::tls::Tls;

/// Connections at once; further ones wait in the system's backlog.
pub const CONNECTIONS_MAX: usize = 8192;
/// Most bytes of a request's line and headers.
const HEAD_BYTES_MAX: usize = 32 << 10;
/// Most headers of a request.
const HEADERS_MAX: usize = 64;
/// Longest time for a request's line and headers to arrive, and for a TLS handshake.
const HEAD_WITHIN: Duration = Duration::from_secs(15);
/// Pause after a failed accept, such as for lack of file descriptors.
const ACCEPT_WAIT: Duration = Duration::from_millis(100);
/// Time for running requests to finish at shutdown.
const DRAIN: Duration = Duration::from_secs(10);

/// The peer of a connection, in the extensions of its requests.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Peer {
    /// Address of the client, or of a proxy in between.
    pub address: IpAddr,
    /// Whether the connection uses TLS.
    pub is_secure: bool,
}

/// Serves requests until `stop` resolves, then gives running requests time to finish.
pub async fn serve(
    listener: TcpListener,
    tls: Option<Tls>,
    router: Router,
    stop: impl Future<Output = ()>,
) {
    let mut stop = std::pin::pin!(stop);
    let connections = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    let graceful = GracefulShutdown::new();
    loop {
        let next = async {
            let permit = Arc::clone(&connections).acquire_owned().await;
            let permit = permit.expect("the semaphore is never closed");
            (permit, listener.accept().await)
        };
        let (permit, accepted) = tokio::select! {
            next = next => next,
            () = &mut stop => break,
        };
        let (stream, address) = match accepted {
            Ok((stream, address)) => (stream, address.ip()),
            Err(error) if is_connection_error(&error) => continue,
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection, trying again");
                sleep(ACCEPT_WAIT).await;
                continue;
            }
        };
        // Sends small pieces of a stream at once. Fails if the peer is already gone.
        let _ = stream.set_nodelay(true);
        let (tls, router, watcher) = (tls.clone(), router.clone(), graceful.watcher());
        tokio::spawn(async move {
            let peer = Peer { address, is_secure: tls.is_some() };
            match tls {
                None => serve_connection(stream, peer, router, watcher).await,
                Some(tls) => {
                    if let Some(stream) = handshake(&tls, stream).await {
                        serve_connection(stream, peer, router, watcher).await;
                    }
                }
            }
            drop(permit);
        });
    }
    drop(listener);
    if timeout(DRAIN, graceful.shutdown()).await.is_err() {
        tracing::warn!("requests still running were cut off");
    }
}

async fn handshake(tls: &Tls, stream: TcpStream) -> Option<TlsStream<TcpStream>> {
    match timeout(HEAD_WITHIN, tls.accept(stream)).await {
        Ok(Ok(stream)) => Some(stream),
        Ok(Err(error)) => {
            tracing::debug!(%error, "a TLS handshake failed");
            None
        }
        Err(_) => None,
    }
}

/// A request body that records whether it was read to its end.
struct Watched {
    body: Incoming,
    ended: Arc<AtomicBool>,
}

impl Body for Watched {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let frame = Pin::new(&mut self.body).poll_frame(context);
        if matches!(frame, Poll::Ready(None)) || self.body.is_end_stream() {
            self.ended.store(true, Ordering::Relaxed);
        }
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// Serves the requests of a connection.
async fn serve_connection(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    peer: Peer,
    router: Router,
    watcher: Watcher,
) {
    let router = TowerToHyperService::new(router);
    let service = service_fn(move |mut request: Request<Incoming>| {
        request.extensions_mut().insert(peer);
        let ended = Arc::new(AtomicBool::new(request.body().is_end_stream()));
        let request = request.map(|body| Watched { body, ended: Arc::clone(&ended) });
        let response = router.call(request);
        async move {
            let mut response = response.await?;
            // An error response may precede the end of the body; the unread rest then ends the connection.
            // Without this header a client would send its next request on it.
            if !ended.load(Ordering::Relaxed) {
                let close = HeaderValue::from_static("close");
                response.headers_mut().insert(header::CONNECTION, close);
            }
            Ok::<_, Infallible>(response)
        }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_WITHIN)
        .max_buf_size(HEAD_BYTES_MAX)
        .max_headers(HEADERS_MAX)
        .serve_connection(TokioIo::new(stream), service);
    if let Err(error) = watcher.watch(connection).await {
        tracing::debug!(%error, "a connection ended");
    }
}

fn is_connection_error(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset};
    matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset)
}
