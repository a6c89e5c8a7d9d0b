//! How often the source or the sink of a batch that fails is tried again.

use std::time::Duration;

/// Pause before the next step of a batch for which all slots of this process are taken, or of which the source gave nothing.
pub(super) const WAIT: Duration = Duration::from_secs(1);
/// How long it is tried again, from the first failure on.
pub(super) const RETRY_FOR: Duration = Duration::from_secs(600);
/// Longest pause between two tries.
const PAUSE_MAX: Duration = Duration::from_secs(60);

/// Returns the pause after so many failures before this one.
pub(super) fn pause_after(failures: u32) -> Duration {
    Duration::from_secs(1 << failures.min(6)).min(PAUSE_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_up_to_a_minute() {
        let seconds: Vec<u64> = (0..9).map(|failures| pause_after(failures).as_secs()).collect();
        assert_eq!(seconds, [1, 2, 4, 8, 16, 32, 60, 60, 60]);
    }
}
