//! Detects a step of the engine that does not end.

/// Number of checks within the limit: a hang is detected late by at most a sixteenth of the limit.
pub(in crate::worker) const CHECKS: u32 = 16;

/// Counts the checks that have found the same step running. Since it counts checks instead of
/// reading a clock, a process that was stopped and continued does not count as hung.
#[derive(Debug)]
pub(super) struct Watchdog {
    engines: Vec<Seen>,
}

/// The step that an engine was in, and how often in a row.
#[derive(Debug, Clone, Copy, Default)]
struct Seen {
    step: Option<u64>,
    times: u32,
}

impl Watchdog {
    /// Creates a watchdog over this many engines.
    pub fn new(engines: usize) -> Self {
        Self { engines: vec![Seen::default(); engines] }
    }

    /// Given the steps that run now, returns the first engine with a step that has run for the limit.
    pub fn check(&mut self, running: &[Option<u64>]) -> Option<usize> {
        for (seen, step) in self.engines.iter_mut().zip(running) {
            let times = if step.is_some() && *step == seen.step { seen.times + 1 } else { 0 };
            *seen = Seen { step: *step, times };
        }
        self.engines.iter().position(|seen| seen.times >= CHECKS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn same_step_seen_for_the_limit_is_a_hang() {
        let mut watchdog = Watchdog::new(2);
        for step in 0..100 {
            assert_eq!(watchdog.check(&[Some(step), None]), None, "steps end");
            assert_eq!(watchdog.check(&[None, None]), None, "the engines are idle");
        }
        let hangs: Vec<_> =
            (0..=CHECKS).map(|n| watchdog.check(&[Some(n.into()), Some(7)])).collect();
        assert_eq!(hangs.iter().flatten().count(), 1);
        assert_eq!(hangs.last(), Some(&Some(1)), "the other engine's steps end");
    }
}
