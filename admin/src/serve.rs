//! The listener: connections within bounds, until told to stop.

use std::{io, sync::Arc, time::Duration};

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    server::graceful::GracefulShutdown,
    service::TowerToHyperService,
};
use tokio::{
    net::TcpListener,
    sync::Semaphore,
    time::{sleep, timeout},
};

/// Connections at once; others wait in the system's backlog.
pub const CONNECTIONS_MAX: usize = 8192;
/// Bytes of a request's line and headers.
const HEAD_BYTES_MAX: usize = 32 << 10;
/// Headers of a request.
const HEADERS_MAX: usize = 64;
/// How long line and headers may take to arrive.
const HEAD_WITHIN: Duration = Duration::from_secs(15);
/// Wait before the listener is asked again after a failure, as for want of file descriptors.
const ACCEPT_WAIT: Duration = Duration::from_millis(100);
/// How long requests that run get to finish.
const DRAIN: Duration = Duration::from_secs(10);

/// Answers until `stop` resolves, then lets the requests that run finish for a while.
pub async fn serve(listener: TcpListener, router: Router, stop: impl Future<Output = ()>) {
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
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(error) if of_the_connection(&error) => continue,
            Err(error) => {
                tracing::warn!(%error, "no connection accepted, trying again");
                sleep(ACCEPT_WAIT).await;
                continue;
            }
        };
        // Small pieces of a stream are not to wait for more. Fails for one that is gone already.
        let _ = stream.set_nodelay(true);
        let service = TowerToHyperService::new(router.clone());
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(HEAD_WITHIN)
            .max_buf_size(HEAD_BYTES_MAX)
            .max_headers(HEADERS_MAX)
            .serve_connection(TokioIo::new(stream), service);
        let connection = graceful.watch(connection);
        tokio::spawn(async move {
            if let Err(error) = connection.await {
                tracing::debug!(%error, "a connection ended");
            }
            drop(permit);
        });
    }
    drop(listener);
    if timeout(DRAIN, graceful.shutdown()).await.is_err() {
        tracing::warn!("requests that ran on were cut off");
    }
}

fn of_the_connection(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset};
    matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset)
}
