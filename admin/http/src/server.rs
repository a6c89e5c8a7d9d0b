//! [`Server`]: accepts connections and serves a router on them.

use std::{
    convert::Infallible,
    io,
    net::{IpAddr, Ipv6Addr},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use axum::Router;
use hyper::{
    Request,
    body::Incoming,
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
    net::TcpListener,
    sync::Semaphore,
    time::{Instant, sleep, timeout},
};

use crate::{
    Exchange, Limit, Metrics, Tls,
    accept::{AcceptFailures, is_exhaustion, is_of_connection},
    connections::Connections,
    exchange::{RequestBody, ResponseBody},
    proxies::Proxies,
    request_memory::RequestMemory,
    socket::Socket,
};

/// Connections above [`Bounds::connections`] that may be about to close.
pub const SLACK: usize = 64;
/// Most bytes of a request's line and headers.
const HEAD_BYTES_MAX: usize = 32 << 10;
/// Most headers of a request.
const HEADERS_MAX: usize = 64;
/// Pause after a failed accept, and after one for which a connection was closed.
const ACCEPT_WAIT: Duration = Duration::from_millis(100);
const CLOSE_WAIT: Duration = Duration::from_millis(5);
/// Time for running requests to finish at shutdown.
const DRAIN: Duration = Duration::from_secs(10);

/// Bounds of a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bounds {
    /// Connections at once. The process needs as many file descriptors, and [`SLACK`].
    pub connections: usize,
    /// The part of `connections` that admitted requests never take. Health checks use it.
    pub reserved: usize,
    /// Connections of one address that wait for their client.
    pub per_address: usize,
    /// Longest wait for a client: for a body that is not an upload, or for the next part of an upload;
    /// half of it for a handshake or a request head; twice as long for the client to read.
    pub client_timeout: Duration,
    /// Bytes of request bodies in memory, over all connections. A body that finds no room waits for a second and then
    /// fails.
    pub request_bytes: usize,
    /// Time after which a listener that accepts nothing counts as broken; `None` never gives up. Lack of
    /// file descriptors or memory does not count.
    pub give_up_after: Option<Duration>,
}

impl Bounds {
    /// Bounds for this many connections, with defaults for the rest.
    pub const fn of_connections(connections: usize) -> Self {
        let (quarter, eighth) = (connections / 4, connections / 8);
        Self {
            connections,
            reserved: if quarter < 64 { quarter } else { 64 },
            per_address: if eighth < 16 { 16 } else { eighth },
            client_timeout: Duration::from_secs(30),
            request_bytes: 256 << 20,
            give_up_after: None,
        }
    }
}

impl Default for Bounds {
    fn default() -> Self {
        Self::of_connections(8192)
    }
}

/// The peer of a connection, in the extensions of its requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Peer {
    /// Address of the client, or of a proxy in between that is not one of [`Server::proxies`].
    pub ip: IpAddr,
    /// Whether the client uses TLS.
    pub is_secure: bool,
}

impl Peer {
    /// Returns what limits per address count as one: an IPv4 address, or the network (/64) of an IPv6 address, because
    /// one client has all of it.
    pub fn network(&self) -> IpAddr {
        network(self.ip)
    }
}

/// Serves HTTP.
#[derive(Clone, Default)]
pub struct Server {
    /// Bounds on connections and their time.
    pub bounds: Bounds,
    /// Encrypts connections.
    pub tls: Option<Tls>,
    /// Counters of this server.
    pub metrics: Metrics,
    /// Proxies that say for which client they forward a request.
    pub proxies: Proxies,
    /// Whether clients reach this server by HTTPS alone, through a proxy that does not say so.
    pub is_https: bool,
}

impl Server {
    /// Serves requests until `stop` resolves, then gives running requests time to finish.
    ///
    /// # Errors
    /// If the listener is broken for [`Bounds::give_up_after`].
    pub async fn serve(
        self,
        listener: TcpListener,
        router: Router,
        stop: impl Future<Output = ()>,
    ) -> io::Result<()> {
        let mut stop = std::pin::pin!(stop);
        let permits = Arc::new(Semaphore::new(self.bounds.connections + SLACK));
        let connections = Arc::new(Connections::new(self.bounds, self.metrics.clone()));
        let memory = self.metrics.request_bytes.clone();
        let memory = Arc::new(RequestMemory::new(self.bounds.request_bytes, memory));
        let graceful = GracefulShutdown::new();
        let mut failures = AcceptFailures::default();
        loop {
            let next = async {
                // Waits only for connections that are about to close.
                let permit = Arc::clone(&permits).acquire_owned().await;
                let permit = permit.expect("the semaphore is never closed");
                (permit, listener.accept().await)
            };
            let (permit, accepted) = tokio::select! {
                next = next => next,
                () = &mut stop => break,
            };
            let (stream, address) = match accepted {
                Ok((stream, address)) => (stream, address.ip().to_canonical()),
                Err(error) if is_of_connection(&error) => continue,
                Err(error) => {
                    failures.log(&error);
                    let limit = self.bounds.give_up_after;
                    if limit.is_some_and(|limit| failures.duration(&error, Instant::now()) >= limit)
                    {
                        return Err(error);
                    }
                    let freed = is_exhaustion(&error) && connections.close_longest_wait();
                    sleep(if freed { CLOSE_WAIT } else { ACCEPT_WAIT }).await;
                    continue;
                }
            };
            failures.reset();
            let (server, connections) = (self.clone(), Arc::clone(&connections));
            let (router, watcher) = (router.clone(), graceful.watcher());
            let memory = Arc::clone(&memory);
            // Before the next accept, so that connections are in the order of their arrival.
            let connection = match self.proxies.contain(address) {
                true => connections.open_of_proxy(network(address)),
                false => connections.open(network(address)),
            };
            tokio::spawn(async move {
                let limit = server.bounds.client_timeout * 2;
                let socket = Socket::new(stream, limit, server.metrics.clone());
                let connection_id = connection.id();
                let service =
                    Service { server, connections, memory, router, connection: connection_id };
                tokio::select! {
                    biased;
                    () = connection.closed() => tracing::debug!("closed for another connection"),
                    () = service.run(socket, address, watcher) => {}
                }
                drop(connection);
                drop(permit);
            });
        }
        drop(listener);
        if timeout(DRAIN, graceful.shutdown()).await.is_err() {
            tracing::warn!("requests still running were cut off");
        }
        Ok(())
    }
}

/// Returns what limits per address count as one.
fn network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V4(address) => address.into(),
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() >> 64 << 64).into(),
    }
}

/// The service on one connection.
struct Service {
    server: Server,
    connections: Arc<Connections>,
    memory: Arc<RequestMemory>,
    router: Router,
    connection: u64,
}

impl Service {
    /// Performs the TLS handshake, if any, and serves requests.
    async fn run(self, socket: Socket, address: IpAddr, watcher: Watcher) {
        let is_secure = self.server.is_https;
        let Some(tls) = self.server.tls.clone() else {
            return self.requests(socket, Peer { ip: address, is_secure }, watcher).await;
        };
        match timeout(self.server.bounds.client_timeout / 2, tls.accept(socket)).await {
            Ok(Ok(stream)) => {
                self.requests(stream, Peer { ip: address, is_secure: true }, watcher).await;
            }
            Ok(Err(error)) => tracing::debug!(%error, "a TLS handshake failed"),
            Err(_) => self.server.metrics.refuse(Limit::HandshakeTime),
        }
    }

    /// Serves the requests of a connection.
    async fn requests(
        self,
        stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
        peer: Peer,
        watcher: Watcher,
    ) {
        let Self { server, connections, memory, router, connection } = self;
        let Server { bounds: Bounds { client_timeout, .. }, metrics, proxies, .. } = server;
        let router = TowerToHyperService::new(router);
        let is_first = AtomicBool::new(true);
        let service = service_fn(|mut request: Request<Incoming>| {
            is_first.store(false, Ordering::Relaxed);
            let exchange = Exchange::new(Arc::clone(&connections), connection, memory.hold());
            let peer = proxies.client(peer, request.headers());
            request.extensions_mut().insert(peer);
            request.extensions_mut().insert(exchange.clone());
            let request = request.map(|body| {
                RequestBody::new(body, exchange.clone(), client_timeout, metrics.clone())
            });
            let response = router.call(request);
            async move {
                let mut response = response.await?;
                exchange.release_memory();
                // An error response may precede the end of the body; the unread rest then ends the
                // connection. Without this header a client would send its next request on it.
                if !exchange.is_received() {
                    let close = HeaderValue::from_static("close");
                    response.headers_mut().insert(header::CONNECTION, close);
                }
                Ok::<_, Infallible>(response.map(|body| ResponseBody::new(body, exchange)))
            }
        });
        let serving = http1::Builder::new()
            .timer(TokioTimer::new())
            // Also the longest pause between two requests.
            .header_read_timeout(client_timeout / 2)
            .max_buf_size(HEAD_BYTES_MAX)
            .max_headers(HEADERS_MAX)
            .serve_connection(TokioIo::new(stream), service);
        if let Err(error) = watcher.watch(serving).await {
            tracing::debug!(%error, "a connection ended");
            if error.is_timeout() && is_first.load(Ordering::Relaxed) {
                metrics.refuse(Limit::HeadTime);
            }
        }
    }
}
