//! [`AcceptFailures`]: what to do when a connection cannot be accepted.

use std::{io, time::Duration};

use tokio::time::Instant;

/// Shortest time between two log lines.
const LOG_EVERY: Duration = Duration::from_secs(60);

/// Failed accepts since the last successful one.
#[derive(Debug, Default)]
pub(crate) struct AcceptFailures {
    /// Begin of failures for which the listener may be to blame.
    since: Option<Instant>,
    logged: Option<Instant>,
    /// Failures since the last log line.
    count: u64,
}

impl AcceptFailures {
    /// Notes a success.
    pub fn reset(&mut self) {
        self.since = None;
    }

    /// Logs a failure, at a bounded rate.
    pub fn log(&mut self, error: &io::Error) {
        self.count += 1;
        if self.logged.is_none_or(|at| at.elapsed() >= LOG_EVERY) {
            tracing::warn!(%error, failures = self.count, "cannot accept connections, trying again");
            (self.logged, self.count) = (Some(Instant::now()), 0);
        }
    }

    /// Returns how long accepting has failed, if the listener may be to blame.
    pub fn duration(&mut self, error: &io::Error, now: Instant) -> Duration {
        if is_exhaustion(error) {
            self.since = None;
            return Duration::ZERO;
        }
        now.duration_since(*self.since.get_or_insert(now))
    }
}

/// Whether only the connection failed that was to be accepted.
pub(crate) fn is_of_connection(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset, Interrupted};
    let kind = error.kind();
    matches!(kind, ConnectionAborted | ConnectionRefused | ConnectionReset | Interrupted)
}

/// Whether the process or the system is short of descriptors or memory, which passes.
pub(crate) fn is_exhaustion(error: &io::Error) -> bool {
    let passing = [libc::EMFILE, libc::ENFILE, libc::ENOBUFS, libc::ENOMEM];
    error.raw_os_error().is_some_and(|code| passing.contains(&code))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_broken_listener_fails_for_long() {
        let (mut failures, mut now) = (AcceptFailures::default(), Instant::now());
        let mut after = |code| {
            now += Duration::from_secs(20);
            failures.duration(&io::Error::from_raw_os_error(code), now).as_secs()
        };
        assert_eq!([libc::EMFILE, libc::ENFILE, libc::EINVAL].map(&mut after), [0, 0, 0]);
        assert_eq!([libc::EINVAL, libc::EMFILE, libc::EINVAL].map(&mut after), [20, 0, 0]);
    }
}
