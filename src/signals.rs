//! SIGTERM and Ctrl-C.

use std::{io, process};

use tokio::sync::watch;
use tritmill_worker::Stop;

/// Exit code: stopped by a signal.
pub const EXIT_INTERRUPTED: u8 = 130;

/// Receives both signals from its creation on. Without it they end the process, except the first
/// process of a container, for which the system ignores them.
#[derive(Debug)]
pub struct Signals {
    #[cfg(unix)]
    terminate: tokio::signal::unix::Signal,
    #[cfg(unix)]
    interrupt: tokio::signal::unix::Signal,
}

impl Signals {
    /// Starts to receive signals; needs a runtime.
    #[cfg(unix)]
    pub fn listen() -> io::Result<Self> {
        use tokio::signal::unix::{SignalKind, signal};
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
        })
    }

    /// Starts to receive signals; needs a runtime.
    #[cfg(not(unix))]
    pub fn listen() -> io::Result<Self> {
        Ok(Self {})
    }

    /// Waits for the next signal.
    pub async fn next(&mut self) {
        #[cfg(unix)]
        tokio::select! {
            Some(()) = self.terminate.recv() => {}
            Some(()) = self.interrupt.recv() => {}
            else => std::future::pending().await,
        }
        #[cfg(not(unix))]
        if tokio::signal::ctrl_c().await.is_err() {
            // Without a handler the default one ends the process.
            std::future::pending::<()>().await;
        }
    }

    /// Sends `Drain` at the first signal and ends the process at the second.
    pub async fn stop(mut self, stop: watch::Sender<Stop>) {
        self.next().await;
        note!("stopping: running jobs finish first; signal again to stop at once");
        // Fails if the run has ended.
        let _ = stop.send(Stop::Drain);
        self.next().await;
        process::exit(i32::from(EXIT_INTERRUPTED));
    }
}
