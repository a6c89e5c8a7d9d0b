//! A TCP proxy that can close its connections, and delay or hold their data.

use std::{
    io::{Read as _, Write as _},
    net::{Ipv4Addr, Shutdown, TcpListener, TcpStream},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU16, AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

use anyhow::Context as _;

/// How often a silent connection looks whether data may pass.
const SILENCE_POLL: Duration = Duration::from_millis(10);

#[derive(Default)]
struct Shared {
    /// Both ends of every connection so far; shutting down a closed one has no effect.
    streams: Mutex<Vec<TcpStream>>,
    /// Port of the server; 0 if there is none yet.
    target: AtomicU16,
    delay_ms: AtomicU64,
    is_silent: AtomicBool,
}

/// Forwards connections to one port until the process ends.
#[derive(Clone)]
pub struct Proxy {
    port: u16,
    shared: Arc<Shared>,
}

impl Proxy {
    /// Listens on a free port; closes connections until it knows where to forward them.
    pub fn start() -> anyhow::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("no free port")?;
        let port = listener.local_addr()?.port();
        let shared = Arc::new(Shared::default());
        let proxy = Self { port, shared: Arc::clone(&shared) };
        thread::spawn(move || {
            for client in listener.incoming().flatten() {
                // Closes the client's connection if the server is down.
                let target = (Ipv4Addr::LOCALHOST, shared.target.load(Ordering::Relaxed));
                let Ok(server) = TcpStream::connect(target) else {
                    continue;
                };
                shared.forward(client, server);
            }
        });
        Ok(proxy)
    }

    /// Forwards new connections to this port from now on.
    pub fn forward_to(&self, port: u16) {
        self.shared.target.store(port, Ordering::Relaxed);
    }

    /// Returns the port that clients connect to.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Closes every connection.
    pub fn close_connections(&self) {
        let mut streams = self.shared.streams.lock().unwrap_or_else(PoisonError::into_inner);
        for stream in streams.drain(..) {
            // Fails for a connection that is closed already.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    /// Delays every piece of data by this time from now on.
    pub fn set_delay(&self, delay: Duration) {
        let ms = u64::try_from(delay.as_millis()).unwrap_or(u64::MAX);
        self.shared.delay_ms.store(ms, Ordering::Relaxed);
    }

    /// Holds all data from now on, with the connections open, or lets it pass again.
    pub fn set_silent(&self, is_silent: bool) {
        self.shared.is_silent.store(is_silent, Ordering::Relaxed);
    }
}

impl Shared {
    fn forward(self: &Arc<Self>, client: TcpStream, server: TcpStream) {
        let both = || Some((client.try_clone().ok()?, server.try_clone().ok()?));
        let (Some((client_in, server_out)), Some((client_out, server_in))) = (both(), both())
        else {
            return;
        };
        let mut streams = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
        streams.extend([client, server]);
        drop(streams);
        for (from, to) in [(client_in, server_out), (server_in, client_out)] {
            let shared = Arc::clone(self);
            thread::spawn(move || shared.copy(from, to));
        }
    }

    fn copy(&self, mut from: TcpStream, mut to: TcpStream) {
        let mut buffer = vec![0; 64 << 10];
        while let Ok(length @ 1..) = from.read(&mut buffer) {
            let delay = self.delay_ms.load(Ordering::Relaxed);
            if delay > 0 {
                thread::sleep(Duration::from_millis(delay));
            }
            while self.is_silent.load(Ordering::Relaxed) {
                thread::sleep(SILENCE_POLL);
            }
            if to.write_all(&buffer[..length]).is_err() {
                break;
            }
        }
        let _ = from.shutdown(Shutdown::Both);
        let _ = to.shutdown(Shutdown::Both);
    }
}
