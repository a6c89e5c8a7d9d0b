//! [`ClientTimeout`]: the time that a client may keep the server waiting.

use std::{
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use tokio::time::{Instant, Sleep, sleep_until};

/// Bytes that make up for a second of waiting: the slowest client that is served to the end.
const BYTES_PER_SECOND: u32 = 1024;

/// Time spent waiting for one client. Only time in which the server could go on and the client does not
/// counts, never time that the server itself takes.
struct Budget {
    limit: Duration,
    waited: Duration,
    /// Begin of the current wait.
    since: Option<Instant>,
}

impl Budget {
    /// Begins or continues a wait; returns when the client has taken too long.
    fn end(&mut self, now: Instant) -> Instant {
        *self.since.get_or_insert(now) + self.limit.saturating_sub(self.waited)
    }

    /// Ends the current wait.
    fn resume(&mut self, now: Instant) {
        if let Some(since) = self.since.take() {
            self.waited += now.duration_since(since);
        }
    }

    /// Forgives a part of the time spent waiting, for progress of this many bytes.
    fn forgive(&mut self, bytes: usize) {
        let bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
        let time = Duration::from_secs(1) * bytes / BYTES_PER_SECOND;
        self.waited = self.waited.saturating_sub(time);
    }
}

/// Waits for a client within a limit.
pub(crate) struct ClientTimeout {
    budget: Budget,
    timer: Option<Pin<Box<Sleep>>>,
}

impl ClientTimeout {
    pub fn new(limit: Duration) -> Self {
        let budget = Budget { limit, waited: Duration::ZERO, since: None };
        Self { budget, timer: None }
    }

    /// Continues to wait; ready once the client has taken too long.
    pub fn poll_end(&mut self, context: &mut Context<'_>) -> Poll<()> {
        let end = self.budget.end(Instant::now());
        let timer = self.timer.get_or_insert_with(|| Box::pin(sleep_until(end)));
        if timer.deadline() != end {
            timer.as_mut().reset(end);
        }
        timer.as_mut().poll(context)
    }

    /// Ends the current wait.
    pub fn resume(&mut self) {
        self.budget.resume(Instant::now());
    }

    /// Forgives a part of the time spent waiting, for progress of this many bytes.
    pub fn forgive(&mut self, bytes: usize) {
        self.budget.forgive(bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(10);

    /// A client of a budget, at its own time.
    struct Client(Budget, Instant);

    impl Client {
        fn new() -> Self {
            let budget = Budget { limit: LIMIT, waited: Duration::ZERO, since: None };
            Self(budget, Instant::now())
        }

        /// Keeps the server waiting; returns whether it took too long.
        fn takes(&mut self, time: Duration) -> bool {
            let end = self.0.end(self.1);
            self.1 += time;
            assert_eq!(self.0.end(self.1), end, "a wait that goes on keeps its end");
            self.0.resume(self.1);
            self.1 >= end
        }
    }

    #[test]
    fn waits_add_up_and_time_of_the_server_does_not() {
        let mut client = Client::new();
        assert!(!client.takes(LIMIT / 2));
        client.1 += LIMIT * 5;
        assert!(!client.takes(LIMIT / 3));
        assert!(client.takes(LIMIT / 3));
    }

    #[test]
    fn progress_at_the_slowest_rate_goes_on_for_ever() {
        let mut client = Client::new();
        for _ in 0..100 {
            assert!(!client.takes(LIMIT / 2));
            client.0.forgive(5 * BYTES_PER_SECOND as usize);
        }
        // A byte now and then is not progress.
        assert!(!client.takes(LIMIT * 2 / 3));
        client.0.forgive(1);
        assert!(client.takes(LIMIT * 2 / 3));
    }
}
