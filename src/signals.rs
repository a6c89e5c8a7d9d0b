//! SIGTERM and Ctrl-C: the wish to stop.

use std::{io, process};

use tokio::sync::watch;
use tritmill_worker::Stop;

/// Stopped by a signal.
pub const EXIT_INTERRUPTED: u8 = 130;

/// Both signals, from the moment this is made. A process without it ends by them, unless it is the
/// first of its container: then the system ignores them.
#[derive(Debug)]
pub struct Signals {
    #[cfg(unix)]
    terminate: tokio::signal::unix::Signal,
    #[cfg(unix)]
    interrupt: tokio::signal::unix::Signal,
}

impl Signals {
    /// Listens, within a runtime.
    #[cfg(unix)]
    pub fn listen() -> io::Result<Self> {
        use tokio::signal::unix::{SignalKind, signal};
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
        })
    }

    /// Listens, within a runtime.
    #[cfg(not(unix))]
    pub fn listen() -> io::Result<Self> {
        Ok(Self {})
    }

    /// The next of either.
    pub async fn next(&mut self) {
        #[cfg(unix)]
        tokio::select! {
            Some(()) = self.terminate.recv() => {}
            Some(()) = self.interrupt.recv() => {}
            else => std::future::pending().await,
        }
        #[cfg(not(unix))]
        if tokio::signal::ctrl_c().await.is_err() {
            // Without a handler the system's own ends the process.
            std::future::pending::<()>().await;
        }
    }

    /// Says so with the first signal; the second ends the process.
    pub async fn stop(mut self, stop: watch::Sender<Stop>) {
        self.next().await;
        eprintln!("stopping: running jobs finish first; once more to stop at once");
        // The run may just have ended.
        let _ = stop.send(Stop::Drain);
        self.next().await;
        process::exit(i32::from(EXIT_INTERRUPTED));
    }
}
