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
    engines: Vec<Seen>,
}

/// The step that an engine was in, and how often in a row.
#[derive(Debug, Clone, Copy, Default)]
struct Seen {
    step: Option<u64>,
    times: u32,
}

impl Watchdog {
    /// A watchdog over so many engines that lets a step run for `limit`.
    pub fn new(limit: Duration, engines: usize) -> Self {
        let mut looks = interval((limit / LOOKS).max(Duration::from_millis(1)));
        looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Self { looks, engines: vec![Seen::default(); engines] }
    }

    /// Resolves when it is time for a [`Watchdog::look`].
    pub async fn wait(&mut self) {
        self.looks.tick().await;
    }

    /// Given the steps that run now, the engine whose step has run for the limit.
    pub fn look(&mut self, running: &[Option<u64>]) -> Option<usize> {
        for (seen, step) in self.engines.iter_mut().zip(running) {
            let times = if step.is_some() && *step == seen.step { seen.times + 1 } else { 0 };
            *seen = Seen { step: *step, times };
        }
        self.engines.iter().position(|seen| seen.times >= LOOKS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn only_one_step_seen_long_enough_is_a_hang() {
        let mut dog = Watchdog::new(Duration::from_secs(1), 2);
        for step in 0..100 {
            assert_eq!(dog.look(&[Some(step), None]), None, "steps that end are no hang");
            assert_eq!(dog.look(&[None, None]), None, "an idle engine is no hang");
        }
        let hangs: Vec<_> = (0..=LOOKS).map(|n| dog.look(&[Some(n.into()), Some(7)])).collect();
        assert_eq!(hangs.iter().flatten().count(), 1);
        assert_eq!(hangs.last(), Some(&Some(1)), "the other one's steps end");
    }
}
