//! Waits between retries of a failed call.

use std::time::Duration;

/// Exponential backoff: waits double with each failure in a row, up to a limit. Each wait is shortened
/// at random by up to half, so that processes do not retry together.
#[derive(Debug, Clone)]
pub struct Backoff {
    first: Duration,
    longest: Duration,
    /// The next wait, before jitter.
    next: Duration,
}

impl Backoff {
    /// Creates a backoff without failures yet.
    pub const fn new(first: Duration, longest: Duration) -> Self {
        Self { first, longest, next: first }
    }

    /// Records a failure and returns the wait before the next attempt.
    pub fn record_failure(&mut self) -> Duration {
        let wait = self.next.mul_f64(1.0 - fastrand::f64() / 2.0);
        self.next = self.next.saturating_mul(2).min(self.longest);
        wait
    }

    /// Starts over after a success.
    pub fn reset(&mut self) {
        *self = Self::new(self.first, self.longest);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_double_up_to_a_limit_and_start_over_after_a_success() {
        let (first, longest) = (Duration::from_millis(50), Duration::from_secs(5));
        let mut backoff = Backoff::new(first, longest);
        let mut full = first;
        for _ in 0..20 {
            let wait = backoff.record_failure();
            assert!(wait >= full / 2 && wait <= full, "{wait:?} of {full:?}");
            full = (full * 2).min(longest);
        }
        backoff.reset();
        assert!(backoff.record_failure() <= first);
    }
}
