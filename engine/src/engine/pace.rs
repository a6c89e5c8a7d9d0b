//! How many prompt tokens a step may take while a caller reads along.
//!
//! A step takes as long for its decodes as for its prefill chunks, and full chunks make it long. While a sequence
//! of the highest priority decodes, the rows of a step are therefore limited to what takes about a target time;
//! otherwise steps are full. The limit follows measured times:
//!
//! ```text
//! rows of the next limited step = rows · target / time      if the last one was too long
//!                               = the mean of that and rows  if it was much too short
//!                               = rows                       in between, so that nothing flaps
//! ```
//!
//! Pure: the same times give the same limits.

use std::time::Duration;

use crate::kv::BLOCK_TOKENS;

/// Rows of a limited step before any step was measured.
const ROWS_FIRST: usize = 64;
/// Fewest rows of prefill chunks in a step: prompts always continue.
const PREFILL_ROWS_MIN: usize = BLOCK_TOKENS;
/// Steps with fewer rows say little about the time of a row.
const ROWS_MEASURED_MIN: usize = 64;
/// Steps of up to this many times the target are not too long.
const LONG: f64 = 1.15;
/// Steps of at least this many times the target are not too short.
const SHORT: f64 = 0.75;

/// The limit of steps, from their times so far.
#[derive(Debug, Clone)]
pub(super) struct Pace {
    /// `None`: steps are always full.
    target: Option<Duration>,
    /// Rows of a step that takes about the target time.
    rows: f64,
    /// Whether `rows` is from a limited step, so that full ones do not change it.
    is_settled: bool,
}

impl Pace {
    pub fn new(target: Option<Duration>) -> Self {
        Self { target, rows: ROWS_FIRST as f64, is_settled: false }
    }

    /// Returns the most rows of prefill chunks beside this many decodes in a limited step; `None` without a
    /// target.
    pub fn prefill_rows(&self, decodes: usize) -> Option<usize> {
        self.target?;
        let rows = (self.rows as usize).saturating_sub(decodes);
        Some((rows / BLOCK_TOKENS * BLOCK_TOKENS).max(PREFILL_ROWS_MIN))
    }

    /// Records the time of a step. `limit` is the limit that its prefill chunks had.
    pub fn record(&mut self, prefill: usize, decodes: usize, limit: Option<usize>, time: Duration) {
        let (Some(target), rows) = (self.target, (prefill + decodes) as f64) else { return };
        let share = time.as_secs_f64() / target.as_secs_f64().max(f64::MIN_POSITIVE);
        if prefill == 0 || share <= 0.0 {
            return;
        }
        let fitting = rows / share;
        let is_used_up = limit.is_some_and(|limit| prefill + BLOCK_TOKENS > limit);
        if limit.is_none() {
            if !self.is_settled && rows >= ROWS_MEASURED_MIN as f64 {
                self.rows = fitting;
            }
        } else if share > LONG {
            (self.rows, self.is_settled) = (fitting, true);
        } else if share < SHORT && is_used_up {
            // A short step has a larger share of fixed costs.
            (self.rows, self.is_settled) = (f64::midpoint(self.rows, fitting.max(self.rows)), true);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TARGET: Duration = Duration::from_millis(150);

    /// A machine: milliseconds of a step, and of each row.
    #[derive(Clone, Copy)]
    struct Machine(f64, f64);

    impl Machine {
        fn time(self, rows: usize) -> Duration {
            Duration::from_secs_f64((self.0 + self.1 * rows as f64) / 1000.0)
        }

        /// Runs limited steps with endless prompts; returns their times in milliseconds.
        fn run(self, pace: &mut Pace, decodes: usize, steps: usize) -> Vec<f64> {
            let step = |_| {
                let limit = pace.prefill_rows(decodes).expect("there is a target");
                let time = self.time(limit + decodes);
                pace.record(limit, decodes, Some(limit), time);
                time.as_secs_f64() * 1000.0
            };
            (0..steps).map(step).collect()
        }
    }

    #[test]
    fn limited_steps_take_about_the_target_time() {
        for machine in [Machine(10.0, 1.6), Machine(40.0, 0.3), Machine(1.0, 4.0)] {
            for decodes in [1, 8] {
                let mut pace = Pace::new(Some(TARGET));
                let times = machine.run(&mut pace, decodes, 40);
                let target = TARGET.as_secs_f64() * 1000.0;
                let least = SHORT * target - BLOCK_TOKENS as f64 * machine.1;
                for time in &times[10..] {
                    assert!((least..=LONG * target).contains(time), "{times:?}");
                }
                let settled = &times[30..];
                assert!(settled.iter().all(|time| *time == settled[0]), "flaps: {times:?}");
            }
        }
    }

    #[test]
    fn first_limited_step_uses_what_full_steps_took() {
        let (machine, mut pace) = (Machine(20.0, 2.0), Pace::new(Some(TARGET)));
        pace.record(512, 0, None, machine.time(512));
        let first = machine.run(&mut pace, 1, 1)[0];
        assert!(first > 100.0 && first < 1.15 * 150.0, "{first}");
        let learned = pace.prefill_rows(1);
        pace.record(512, 0, None, 10 * machine.time(512));
        assert_eq!(pace.prefill_rows(1), learned.map(|rows| rows.min(16)), "not settled yet");
    }

    #[test]
    fn prompts_continue_on_the_slowest_machine() {
        let mut pace = Pace::new(Some(TARGET));
        Machine(500.0, 100.0).run(&mut pace, 8, 10);
        assert_eq!(pace.prefill_rows(8), Some(PREFILL_ROWS_MIN));
        assert_eq!(pace.prefill_rows(1000), Some(PREFILL_ROWS_MIN));
    }

    #[test]
    fn steps_that_say_nothing_change_nothing() {
        let mut pace = Pace::new(Some(TARGET));
        let before = pace.prefill_rows(1);
        pace.record(0, 8, Some(64), TARGET * 10);
        pace.record(8, 0, None, TARGET);
        pace.record(16, 1, Some(64), TARGET / 100);
        pace.record(64, 1, Some(64), Duration::ZERO);
        assert_eq!(pace.prefill_rows(1), before);
        assert_eq!(Pace::new(None).prefill_rows(1), None);
    }
}
