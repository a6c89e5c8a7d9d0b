//! The listener: connections within bounds, until told to stop.

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

/// Connections at once; others wait in the system's backlog.
pub const CONNECTIONS_MAX: usize = 8192;
/// Bytes of a request's line and headers.
const HEAD_BYTES_MAX: usize = 32 << 10;
/// Headers of a request.
const HEADERS_MAX: usize = 64;
/// How long line and headers may take to arrive, and a handshake before them.
const HEAD_WITHIN: Duration = Duration::from_secs(15);
/// Wait before the listener is asked again after a failure, as for want of file descriptors.
const ACCEPT_WAIT: Duration = Duration::from_millis(100);
/// How long requests that run get to finish.
const DRAIN: Duration = Duration::from_secs(10);

/// Who is at the other end of a connection: among the extensions of its requests.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Peer {
    /// Where from; of a proxy, if there is one between.
    pub address: IpAddr,
    /// Whether the connection is secured here.
    pub is_secure: bool,
}

/// Answers until `stop` resolves, then lets the requests that run finish for a while.
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
            let permit = permit.expect("nobody closes the semaphore");
            (permit, listener.accept().await)
        };
        let (permit, accepted) = tokio::select! {
            next = next => next,
            () = &mut stop => break,
        };
        let (stream, address) = match accepted {
            Ok((stream, address)) => (stream, address.ip()),
            Err(error) if of_the_connection(&error) => continue,
            Err(error) => {
                tracing::warn!(%error, "no connection accepted, trying again");
                sleep(ACCEPT_WAIT).await;
                continue;
            }
        };
        // Small pieces of a stream are not to wait for more. Fails for one that is gone already.
        let _ = stream.set_nodelay(true);
        let (tls, router, watcher) = (tls.clone(), router.clone(), graceful.watcher());
        tokio::spawn(async move {
            let peer = Peer { address, is_secure: tls.is_some() };
            match tls {
                None => answer(stream, peer, router, watcher).await,
                Some(tls) => {
                    if let Some(stream) = shake_hands(&tls, stream).await {
                        answer(stream, peer, router, watcher).await;
                    }
                }
            }
            drop(permit);
        });
    }
    drop(listener);
    if timeout(DRAIN, graceful.shutdown()).await.is_err() {
        tracing::warn!("requests that ran on were cut off");
    }
}

async fn shake_hands(tls: &Tls, stream: TcpStream) -> Option<TlsStream<TcpStream>> {
    match timeout(HEAD_WITHIN, tls.accept(stream)).await {
        Ok(Ok(stream)) => Some(stream),
        Ok(Err(error)) => {
            tracing::debug!(%error, "a handshake failed");
            None
        }
        Err(_) => None,
    }
}

/// A request's body that says when it was read to its end.
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

/// Answers the requests of a connection.
async fn answer(
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
        let answer = router.call(request);
        async move {
            let mut response = answer.await?;
            // A refusal may come before the body: what is left of that ends the connection. Who is not
            // told sends the next request on it.
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

fn of_the_connection(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset};
    matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset)
}
