//! A server on a real socket, and clients that misbehave.

use std::{
    io::{self, ErrorKind, Read as _, Write as _},
    net::{Shutdown, SocketAddr, TcpStream},
    os::fd::OwnedFd,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use axum::{
    Extension, Router,
    body::Body,
    http::StatusCode,
    routing::{get, post},
};
use hyper::body::{Bytes, Frame, SizeHint};
use tokio::{
    net::TcpListener,
    runtime::Runtime,
    sync::{Semaphore, oneshot},
    task::JoinHandle,
};

use crate::{BodyError, Bounds, Exchange, Limit, Metrics, Server};

/// Time that clients of these tests have.
const PATIENCE: Duration = Duration::from_millis(300);
/// More than any step of a test takes.
const LONG: Duration = Duration::from_secs(60);

/// A running server.
struct Running {
    runtime: Runtime,
    address: SocketAddr,
    metrics: Metrics,
    ended: JoinHandle<io::Result<()>>,
    /// Shared by the admitted requests.
    permit: Arc<()>,
    _stop: oneshot::Sender<()>,
}

/// A response body without end, which tells when it is dropped.
struct Endless(Arc<AtomicBool>);

impl hyper::body::Body for Endless {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        self: std::pin::Pin<&mut Self>,
        _: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        std::task::Poll::Ready(Some(Ok(Frame::data(Bytes::from_static(&[7; 1 << 16])))))
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::default()
    }
}

impl Drop for Endless {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Reads a body; tells how that ended.
async fn receive(body: Body) -> (StatusCode, String) {
    match axum::body::to_bytes(body, 1 << 20).await {
        Ok(bytes) => (StatusCode::OK, bytes.len().to_string()),
        Err(error) => match BodyError::find(&error) {
            Some(BodyError::Timeout) => (StatusCode::REQUEST_TIMEOUT, "late".to_owned()),
            Some(BodyError::NoMemory) => (StatusCode::SERVICE_UNAVAILABLE, "full".to_owned()),
            _ => (StatusCode::BAD_REQUEST, error.to_string()),
        },
    }
}

impl Running {
    fn start(bounds: Bounds) -> Self {
        Self::with(bounds, Router::new())
    }

    /// Starts a server with some routes of its own.
    fn with(bounds: Bounds, router: Router) -> Self {
        let runtime = Runtime::new().expect("a runtime");
        let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).expect("a free port");
        Self::on(runtime, listener, bounds, router)
    }

    fn on(runtime: Runtime, listener: TcpListener, bounds: Bounds, router: Router) -> Self {
        let address = listener.local_addr().expect("an address");
        let permit = Arc::new(());
        let held = Arc::clone(&permit);
        let router = router
            .route("/healthz", get(async || "ok"))
            .route("/form", post(receive))
            .route(
                "/upload",
                post(async |Extension(exchange): Extension<Exchange>, body: Body| {
                    exchange.expect_upload();
                    receive(body).await
                }),
            )
            .route(
                "/held",
                post(async move |Extension(exchange): Extension<Exchange>, body: Body| {
                    match exchange.admit(held) {
                        Ok(()) => receive(body).await,
                        Err(error) => (StatusCode::TOO_MANY_REQUESTS, error.to_string()),
                    }
                }),
            );
        let metrics = Metrics::default();
        let server = Server { bounds, metrics: metrics.clone(), ..Server::default() };
        let (stop, stopped) = oneshot::channel::<()>();
        let until = async move {
            // A dropped sender is a stop, too.
            let _ = stopped.await;
        };
        let ended = runtime.spawn(server.serve(listener, router, until));
        Self { runtime, address, metrics, ended, permit, _stop: stop }
    }

    fn open(&self, bytes: &[u8]) -> TcpStream {
        let mut stream = TcpStream::connect(self.address).expect("it listens");
        stream.set_read_timeout(Some(LONG)).expect("a socket");
        stream.write_all(bytes).expect("it reads");
        stream
    }

    /// Whether a health check is answered.
    fn is_healthy(&self) -> bool {
        let head = b"GET /healthz HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n";
        rest(&mut self.open(head)).starts_with("HTTP/1.1 200")
    }

    fn open_now(&self) -> i64 {
        self.metrics.connections.get()
    }
}

/// Returns a request to send a body of `length` bytes.
fn head(path: &str, length: usize) -> String {
    format!("POST {path} HTTP/1.1\r\nHost: a\r\nContent-Length: {length}\r\n\r\n")
}

/// Reads until the server closes the connection.
fn rest(stream: &mut TcpStream) -> String {
    let mut bytes = Vec::new();
    if let Err(error) = stream.read_to_end(&mut bytes) {
        assert_ne!(error.kind(), ErrorKind::WouldBlock, "the connection was not closed");
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

fn eventually(what: &str, holds: impl Fn() -> bool) {
    let started = Instant::now();
    while !holds() {
        assert!(started.elapsed() < LONG, "not within a minute: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn impatient() -> Bounds {
    Bounds { client_timeout: PATIENCE, ..Bounds::default() }
}

#[test]
fn health_checks_are_answered_while_strangers_take_every_connection() {
    let bounds = Bounds { connections: 50, reserved: 5, per_address: 1000, ..Bounds::default() };
    let server = Running::start(bounds);
    let strangers: Vec<TcpStream> =
        (0..200).map(|_| server.open((head("/form", 9) + "k").as_bytes())).collect();
    for _ in 0..10 {
        assert!(server.is_healthy());
    }
    assert!(server.metrics.refusals(Limit::Connections) >= 150);
    // A connection that is told to close is open until its task has run.
    eventually("no more are open than may be", || server.open_now() <= 50);
    drop(strangers);
}

#[test]
fn admitted_requests_go_on_while_strangers_come_and_go() {
    let bounds = Bounds { connections: 20, reserved: 10, per_address: 1000, ..Bounds::default() };
    let server = Running::start(bounds);
    let mut held: Vec<TcpStream> =
        (0..10).map(|_| server.open((head("/held", 2) + "a").as_bytes())).collect();
    // One of them is the test's, and one the router's.
    eventually("all are admitted", || Arc::strong_count(&server.permit) == 12);
    // One more than there are connections for is refused.
    let more = rest(&mut server.open((head("/held", 2) + "a").as_bytes()));
    assert!(more.starts_with("HTTP/1.1 429") && more.ends_with("too many requests at once"));
    let strangers: Vec<TcpStream> = (0..100).map(|_| server.open(b"GET ")).collect();
    assert!(server.is_healthy());
    for stream in &mut held {
        stream.write_all(b"b").expect("it is open");
        let mut bytes = [0; 12];
        stream.read_exact(&mut bytes).expect("it answers");
        assert_eq!(&bytes, b"HTTP/1.1 200");
    }
    drop(strangers);
}

#[test]
fn address_keeps_its_newest_connections() {
    let server = Running::start(Bounds { per_address: 3, ..Bounds::default() });
    let mut open: Vec<TcpStream> = (0..5).map(|_| server.open(b"GET ")).collect();
    assert_eq!([rest(&mut open[0]), rest(&mut open[1])], ["", ""]);
    open[4].write_all(b"/healthz HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n").expect("open");
    assert!(rest(&mut open[4]).starts_with("HTTP/1.1 200"));
    assert_eq!(server.metrics.refusals(Limit::AddressConnections), 2);
}

#[test]
fn slow_heads_and_bodies_end_in_time() {
    let server = Running::start(impatient());
    assert_eq!(rest(&mut server.open(b"")), "");
    // It is counted when the connection has ended.
    eventually("it is counted", || server.metrics.refusals(Limit::HeadTime) == 1);
    let answer = rest(&mut server.open((head("/form", 9) + "k").as_bytes()));
    assert!(answer.starts_with("HTTP/1.1 408") && answer.contains("connection: close"), "{answer}");
    // Bytes that trickle in do not help.
    let mut trickle = server.open((head("/form", 9000) + "k").as_bytes());
    let mut writer = trickle.try_clone().expect("the same socket");
    let dripping = std::thread::spawn(move || {
        while writer.write_all(b"k").is_ok() {
            std::thread::sleep(PATIENCE / 20);
        }
    });
    assert!(rest(&mut trickle).starts_with("HTTP/1.1 408"));
    trickle.shutdown(Shutdown::Both).ok();
    dripping.join().expect("no panic");
    assert_eq!(server.metrics.refusals(Limit::BodyTime), 2);
    // A connection that is done with one request and sends no other one is closed.
    let idle = rest(&mut server.open(b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n"));
    assert!(idle.starts_with("HTTP/1.1 200"));
    assert_eq!(server.metrics.refusals(Limit::HeadTime), 1);
    eventually("all are closed", || server.open_now() == 0);
}

#[test]
fn upload_may_take_long_at_a_fair_rate_and_not_stop() {
    let server = Running::start(impatient());
    let (parts, bytes) = (12, 1024);
    let mut steady = server.open(head("/upload", parts * bytes).as_bytes());
    let started = Instant::now();
    for _ in 0..parts {
        steady.write_all(&vec![7; bytes]).expect("it reads on");
        std::thread::sleep(PATIENCE / 3);
    }
    assert!(started.elapsed() > PATIENCE * 3, "longer than a form may take");
    steady.shutdown(Shutdown::Write).expect("open");
    let answer = rest(&mut steady);
    assert!(answer.starts_with("HTTP/1.1 200") && answer.ends_with("12288"), "{answer}");
    let mut stops = server.open((head("/upload", 9000) + "k").as_bytes());
    assert!(rest(&mut stops).starts_with("HTTP/1.1 408"));
}

#[test]
fn bodies_of_all_connections_have_one_budget() {
    let bounds = Bounds { request_bytes: 100_000, ..impatient() };
    let (hold, held) = (Arc::new(Semaphore::new(0)), Arc::new(AtomicBool::new(false)));
    let (until, reached) = (Arc::clone(&hold), Arc::clone(&held));
    let slow = post(async move |body: Body| {
        let received = receive(body).await;
        reached.store(true, Ordering::Relaxed);
        let _ended = until.acquire().await;
        received
    });
    let server = Running::with(bounds, Router::new().route("/slow", slow));
    let ask =
        |path, length| server.open(&[head(path, length).as_bytes(), &vec![7; length]].concat());
    let mut first = ask("/slow", 60_000);
    eventually("it has its body", || held.load(Ordering::Relaxed));
    assert_eq!(server.metrics.request_bytes.get(), 60_000);
    // The rest of the budget is free.
    assert!(rest(&mut ask("/form", 30_000)).starts_with("HTTP/1.1 200"));
    let refused = rest(&mut ask("/form", 60_000));
    assert!(refused.starts_with("HTTP/1.1 503") && refused.ends_with("full"), "{refused}");
    assert_eq!(server.metrics.refusals(Limit::RequestMemory), 1);
    assert!(server.is_healthy());
    // A client that only announces a body takes nothing.
    let _announced: Vec<TcpStream> =
        (0..9).map(|_| server.open(head("/form", 1 << 19).as_bytes())).collect();
    let mut waiting = ask("/form", 60_000);
    hold.add_permits(1);
    assert!(rest(&mut waiting).starts_with("HTTP/1.1 200"));
    first.shutdown(Shutdown::Write).expect("open");
    assert!(rest(&mut first).starts_with("HTTP/1.1 200"));
    eventually("everything is given back", || server.metrics.request_bytes.get() == 0);
}

#[test]
fn response_ends_when_its_client_stops_reading() {
    let dropped = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&dropped);
    let endless = get(async move || Body::new(Endless(Arc::clone(&flag))));
    let server = Running::with(impatient(), Router::new().route("/endless", endless));
    let mut stream = server.open(b"GET /endless HTTP/1.1\r\nHost: a\r\n\r\n");
    // While the client reads, the response goes on.
    let (started, mut buffer) = (Instant::now(), vec![0; 1 << 20]);
    while started.elapsed() < PATIENCE * 4 {
        assert!(stream.read(&mut buffer).expect("it goes on") > 0);
    }
    assert!(!dropped.load(Ordering::Relaxed));
    eventually("the response is dropped", || dropped.load(Ordering::Relaxed));
    eventually("the connection is closed", || server.open_now() == 0);
    assert_eq!(server.metrics.refusals(Limit::ReadTime), 1);
}

#[test]
fn broken_listener_is_given_up_and_a_stop_ends_the_server() {
    let runtime = Runtime::new().expect("a runtime");
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
    listener.set_nonblocking(true).expect("a socket");
    let again: OwnedFd = listener.try_clone().expect("the same listener").into();
    let listener = {
        let _context = runtime.enter();
        TcpListener::from_std(listener).expect("a listener")
    };
    let bounds = Bounds { give_up_after: Some(PATIENCE), ..Bounds::default() };
    let broken = Running::on(runtime, listener, bounds, Router::new());
    assert!(broken.is_healthy());
    // From here on every accept fails at once.
    TcpStream::from(again).shutdown(Shutdown::Both).expect("a socket");
    let ended = broken.runtime.block_on(async { tokio::time::timeout(LONG, broken.ended).await });
    assert!(ended.expect("it gives up").expect("no panic").is_err());

    let Running { runtime, ended, _stop, .. } = Running::start(Bounds::default());
    drop(_stop);
    let ended = runtime.block_on(async { tokio::time::timeout(LONG, ended).await });
    assert!(ended.expect("it ends").expect("no panic").is_ok());
}
