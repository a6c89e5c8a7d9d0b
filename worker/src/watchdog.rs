//! Sees when a step of the engine does not end.

use std::time::Duration;

use tokio::time::{Interval, MissedTickBehavior, interval};

/// Looks within the limit: a hang is seen at most a sixteenth late.
const LOOKS: u32 = 16;

/// Counts how often it has seen one and the same step running. Counting looks rather than reading a
/// clock spares a process that was stopped and continued: nothing looked meanwhile.
#[derive(Debug)]
pub struct Watchdog {
    looks: Interval,
    step: Option<u64>,
    seen: u32,
}

impl Watchdog {
    /// A watchdog that lets a step run for `limit`.
    pub fn new(limit: Duration) -> Self {
        let mut looks = interval((limit / LOOKS).max(Duration::from_millis(1)));
        looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Self { looks, step: None, seen: 0 }
    }

    /// Resolves when it is time for a [`Watchdog::look`].
    pub async fn wait(&mut self) {
        self.looks.tick().await;
    }

    /// Whether the step that runs now has run for the limit.
    pub fn look(&mut self, running: Option<u64>) -> bool {
        self.seen = if running.is_some() && running == self.step { self.seen + 1 } else { 0 };
        self.step = running;
        self.seen >= LOOKS
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn only_one_step_seen_long_enough_is_a_hang() {
        let mut dog = Watchdog::new(Duration::from_secs(1));
        for step in 0..100 {
            assert!(!dog.look(Some(step)), "steps that end are no hang");
            assert!(!dog.look(None), "an idle engine is no hang");
        }
        let hangs: Vec<bool> = (0..=LOOKS).map(|_| dog.look(Some(7))).collect();
        assert_eq!(hangs.iter().filter(|hang| **hang).count(), 1);
        assert_eq!(hangs.last(), Some(&true));
    }
}
