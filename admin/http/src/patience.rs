//! [`Patience`]: the time that a client may keep the server waiting.

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
pub(crate) struct Patience {
    limit: Duration,
    waited: Duration,
    /// Begin of the current wait.
    since: Option<Instant>,
    timer: Option<Pin<Box<Sleep>>>,
}

impl Patience {
    pub fn new(limit: Duration) -> Self {
        Self { limit, waited: Duration::ZERO, since: None, timer: None }
    }

    /// Continues to wait; ready once the client has taken too long.
    pub fn poll_end(&mut self, context: &mut Context<'_>) -> Poll<()> {
        let since = *self.since.get_or_insert_with(Instant::now);
        let end = since + self.limit.saturating_sub(self.waited);
        let timer = self.timer.get_or_insert_with(|| Box::pin(sleep_until(end)));
        if timer.deadline() != end {
            timer.as_mut().reset(end);
        }
        timer.as_mut().poll(context)
    }

    /// Ends the current wait.
    pub fn resume(&mut self) {
        if let Some(since) = self.since.take() {
            self.waited += since.elapsed();
        }
    }

    /// Forgives a part of the time spent waiting, for progress of this many bytes.
    pub fn forgive(&mut self, bytes: usize) {
        let bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
        let time = Duration::from_secs(1) * bytes / BYTES_PER_SECOND;
        self.waited = self.waited.saturating_sub(time);
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use tokio::time::{sleep, timeout};

    use super::*;

    const LIMIT: Duration = Duration::from_secs(10);

    /// Waits for as long as a client takes; returns whether it took too long.
    async fn is_over(patience: &mut Patience, takes: Duration) -> bool {
        let over = timeout(takes, poll_fn(|context| patience.poll_end(context))).await.is_ok();
        patience.resume();
        over
    }

    #[tokio::test(start_paused = true)]
    async fn waits_add_up_and_time_of_the_server_does_not() {
        let mut patience = Patience::new(LIMIT);
        assert!(!is_over(&mut patience, LIMIT / 2).await);
        sleep(LIMIT * 5).await;
        assert!(!is_over(&mut patience, LIMIT / 3).await);
        assert!(is_over(&mut patience, LIMIT / 3).await);
    }

    #[tokio::test(start_paused = true)]
    async fn progress_at_the_slowest_rate_goes_on_for_ever() {
        let mut patience = Patience::new(LIMIT);
        for _ in 0..100 {
            assert!(!is_over(&mut patience, LIMIT / 2).await);
            patience.forgive(5 * BYTES_PER_SECOND as usize + 8);
        }
        // A byte now and then is not progress.
        assert!(!is_over(&mut patience, LIMIT * 2 / 3).await);
        patience.forgive(1);
        assert!(is_over(&mut patience, LIMIT * 2 / 3).await);
    }
}
