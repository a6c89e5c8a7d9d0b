//! How often the source or the sink of a batch that fails is tried again.

use std::time::Duration;

use tritmill_queue::Timestamp;

use crate::store::step_state::Tries;

/// Pause before the next step of a batch for which all slots of this process are taken, or of which the source gave nothing.
pub(super) const WAIT: Duration = Duration::from_secs(1);
/// How long it is tried again, from the first failure on.
const RETRY_FOR: Duration = Duration::from_secs(600);
/// Longest pause between two tries.
const PAUSE_MAX: Duration = Duration::from_secs(60);

impl Tries {
    /// Adds a failure. Returns the pause before the next try; `None` if it has failed for long.
    pub(super) fn again(&mut self, now: Timestamp) -> Option<Duration> {
        let since = *self.failing_since.get_or_insert(now);
        if now.since(since) >= RETRY_FOR {
            return None;
        }
        let pause = Duration::from_secs(1 << self.failures.min(6)).min(PAUSE_MAX);
        self.failures = self.failures.saturating_add(1);
        Some(pause)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_up_to_a_minute_for_ten_minutes() {
        let mut tries = Tries::default();
        let mut again = |seconds: i64| tries.again(Timestamp(seconds * 1000));
        let pauses = [0, 1, 3, 7, 15, 31, 63, 123, 599].map(&mut again);
        let expected = [1, 2, 4, 8, 16, 32, 60, 60, 60].map(|s| Some(Duration::from_secs(s)));
        assert_eq!(pauses, expected);
        assert_eq!(again(600), None);
    }
}
