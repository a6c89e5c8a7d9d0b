//! How much a step may compute while a caller reads along.
//!
//! A step takes as long for its decodes as for its prefill chunks, and full chunks make it long. While a sequence
//! of the highest priority decodes, the rows of a step are therefore limited to what takes about a target time;
//! otherwise steps are full (`full_steps.rs`). If the decodes of others alone take longer, these are limited, too, and decode in turns.
//! Each limit follows measured times:
//!
//! ```text
//! rows of the next limited step = rows · target / time            if the last one was too long
//!                               = more, by whole tiles            if these would take less than the longest time even
//!                                                                 if every row took its share of all the time
//!                               = rows                            otherwise, so that nothing flaps
//! ```
//!
//! A step has whole tiles of rows. The first limited step has the most rows of its [`RowTarget`].
//!
//! Pure: the same times give the same limits.

use std::time::Duration;

use super::rows::{RowTarget, TILE_ROWS};
use crate::scheduler::StepLimits;

/// Fewest rows of prefill chunks in a step: prompts always continue.
const PREFILL_ROWS_MIN: usize = TILE_ROWS / 2;
/// Fewest decodes of others in a step.
const DECODES_MIN: f64 = 4.0;
/// Steps with fewer rows say little about the time of a row.
const ROWS_MEASURED_MIN: usize = 64;
/// Steps of up to this many times the target are not too long.
const LONG: f64 = 1.15;
/// Steps of at least this many times the target are not too short for their decodes.
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
    /// Decodes that take about the target time; `None` before a step with too many.
    decodes: Option<f64>,
}

impl Pace {
    pub fn new(target: Option<Duration>, row_target: RowTarget) -> Self {
        let rows = row_target.most as f64;
        Self { target, rows, is_settled: false, decodes: None }
    }

    /// Returns the limits of a step with this many decodes of the highest priority and of others, at most `most` of these if it is
    /// given; none without a target.
    pub fn limits(&self, highest: usize, others: usize, most: Option<usize>) -> StepLimits {
        if self.target.is_none() {
            return StepLimits::default();
        }
        let fitting = self.decodes.map(|all| (all - highest as f64).max(DECODES_MIN) as usize);
        let decodes = [fitting, most].into_iter().flatten().min();
        let decoded = highest + decodes.map_or(others, |most| others.min(most));
        let rows = (self.rows as usize / TILE_ROWS * TILE_ROWS).max(rows_min(decoded));
        StepLimits { prefill: Some(rows - decoded), decodes, rows: None }
    }

    /// Records the time of a step, and the limits that it had.
    pub fn record(&mut self, prefill: usize, decodes: usize, limits: StepLimits, time: Duration) {
        let Some(target) = self.target else { return };
        let share = time.as_secs_f64() / target.as_secs_f64().max(f64::MIN_POSITIVE);
        if share <= 0.0 {
            return;
        }
        let is_limited = limits.prefill.is_some();
        if is_limited && share > LONG && prefill + decodes <= rows_min(decodes) {
            // Only fewer decodes make the step shorter.
            self.decodes = Some(decodes as f64 / share);
            return;
        }
        if prefill > 0 {
            self.record_rows(prefill, decodes, limits.prefill, share);
        }
        if share < SHORT && limits.decodes.is_some_and(|most| decodes >= most) {
            let fitting = decodes as f64 / share;
            let more = self.decodes.map(|rows| f64::midpoint(rows, fitting.max(rows)));
            let rows = more.map_or(0, |more| rows_min(more as usize)) as f64;
            if share * rows / (prefill + decodes) as f64 <= LONG {
                self.decodes = more;
            }
        }
    }

    fn record_rows(&mut self, prefill: usize, decodes: usize, limit: Option<usize>, share: f64) {
        let rows = (prefill + decodes) as f64;
        let fitting = rows / share;
        let is_used_up = limit.is_some_and(|limit| prefill + TILE_ROWS > limit);
        let larger = rows + TILE_ROWS as f64;
        if limit.is_none() {
            if !self.is_settled && rows >= ROWS_MEASURED_MIN as f64 {
                self.rows = fitting;
            }
        } else if share > LONG {
            (self.rows, self.is_settled) = (fitting, true);
        } else if is_used_up && fitting * LONG >= larger {
            // Part of the time does not grow with the rows, so the next step takes less than its proportional time.
            (self.rows, self.is_settled) = (f64::midpoint(rows, fitting).max(larger), true);
        }
    }
}

/// Returns the fewest rows of a step with so many decodes.
fn rows_min(decodes: usize) -> usize {
    (decodes + PREFILL_ROWS_MIN).next_multiple_of(TILE_ROWS)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TARGET: Duration = Duration::from_millis(150);
    const ROWS: RowTarget = RowTarget { least: 32, most: 64 };
    const FULL: StepLimits = StepLimits { prefill: None, decodes: None, rows: None };

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
                let limits = pace.limits(1, decodes - 1, None);
                let prefill = limits.prefill.expect("there is a target");
                let decoded = limits.decodes.map_or(decodes, |most| decodes.min(1 + most));
                let time = self.time(prefill + decoded);
                pace.record(prefill, decoded, limits, time);
                time.as_secs_f64() * 1000.0
            };
            (0..steps).map(step).collect()
        }
    }

    #[test]
    fn limited_steps_take_about_the_target_time() {
        for machine in [Machine(10.0, 1.6), Machine(40.0, 0.3), Machine(1.0, 4.0)] {
            for decodes in [1, 8] {
                let mut pace = Pace::new(Some(TARGET), ROWS);
                let times = machine.run(&mut pace, decodes, 40);
                let target = TARGET.as_secs_f64() * 1000.0;
                let least = SHORT * target - TILE_ROWS as f64 * machine.1;
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
        let (machine, mut pace) = (Machine(20.0, 2.0), Pace::new(Some(TARGET), ROWS));
        pace.record(512, 0, FULL, machine.time(512));
        let first = machine.run(&mut pace, 1, 1)[0];
        assert!(first > 100.0 && first < 1.15 * 150.0, "{first}");
        let learned = pace.limits(1, 0, None).prefill;
        pace.record(512, 0, FULL, 10 * machine.time(512));
        let now = pace.limits(1, 0, None).prefill;
        assert_eq!(now, learned.map(|rows| rows.min(15)), "not settled yet");
    }

    #[test]
    fn prompts_continue_on_the_slowest_machine() {
        let mut pace = Pace::new(Some(TARGET), ROWS);
        Machine(500.0, 100.0).run(&mut pace, 8, 10);
        let least = |prefill| StepLimits {
            prefill: Some(prefill),
            decodes: Some(4),
            ..StepLimits::default()
        };
        assert_eq!(pace.limits(8, 0, None), least(8), "a tile of 16 rows");
        assert_eq!(pace.limits(1, 1000, None), least(11), "5 of them decodes");
    }

    #[test]
    fn fewer_decodes_of_others_leave_more_rows_to_prompts() {
        let (machine, mut pace) = (Machine(20.0, 2.0), Pace::new(Some(TARGET), ROWS));
        machine.run(&mut pace, 33, 40);
        let of = |most| pace.limits(1, 32, most);
        let (all, one) = (of(None), of(Some(1)));
        assert_eq!((all.decodes, one.decodes), (None, Some(1)));
        assert_eq!(one.prefill, all.prefill.map(|rows| rows + 31));
        assert_eq!(Pace::new(None, ROWS).limits(1, 32, Some(1)), FULL, "without a target");
    }

    #[test]
    fn steps_that_say_nothing_change_nothing() {
        let mut pace = Pace::new(Some(TARGET), ROWS);
        let before = pace.limits(1, 8, None);
        let short = StepLimits { prefill: Some(64), ..StepLimits::default() };
        pace.record(0, 8, FULL, TARGET * 10);
        pace.record(8, 0, FULL, TARGET);
        pace.record(16, 1, short, TARGET / 100);
        pace.record(64, 1, short, Duration::ZERO);
        assert_eq!(pace.limits(1, 8, None), before);
        assert_eq!(Pace::new(None, ROWS).limits(1, 8, None), FULL);
    }

    #[test]
    fn decodes_are_limited_where_they_alone_take_too_long() {
        let machine = Machine(20.0, 5.0);
        let mut pace = Pace::new(Some(TARGET), ROWS);
        let times = machine.run(&mut pace, 64, 40);
        let settled = &times[20..];
        assert!(settled.iter().all(|time| *time <= LONG * 150.0), "{times:?}");
        assert!(settled.iter().all(|time| *time == settled[0]), "flaps: {times:?}");
        let (time, one_tile_more) = (settled[0], settled[0] + 16.0 * machine.1);
        assert!(time >= SHORT * 150.0 || one_tile_more > LONG * 150.0, "{times:?}");
        // The machine has become faster.
        Machine(10.0, 0.5).run(&mut pace, 64, 40);
        let limits = pace.limits(1, 63, None);
        assert!(limits.decodes.is_none_or(|most| most >= 63), "{limits:?}");
    }
}
