//! How many rows a step has that is as full as it may be: a caller who comes during a step waits for its end.
//!
//! Half as many rows are tried as long as steps take longer than the target, and kept if a row takes hardly longer with them: on most
//! machines the rate of prompts is the same from 64 or 128 rows on. Where more rows do save time (AMX, GPUs with long steps), steps
//! stay full.
//!
//! Pure: the same times give the same limits.

use std::time::Duration;

/// Fewest rows of a full step.
const ROWS_MIN: usize = 64;
/// A row may take this many times as long as in steps with more rows.
const DEARER: f64 = 1.02;
/// Steps of one size before sizes are compared: of their times the shortest counts, since other programs only make steps longer.
const STEPS: usize = 3;
/// Steps until half as many rows are tried again.
const RETRY: usize = 64;
/// A step with at least this share of its rows in prompts says how long a row of a prompt takes.
const OF_PROMPTS: f64 = 0.75;

/// The rows of full steps, from their times so far.
#[derive(Debug, Clone)]
pub(super) struct FullSteps {
    target: Duration,
    /// Rows that a step may have at all.
    most: usize,
    /// Rows of the current steps.
    rows: usize,
    /// Shortest time of a row in steps with more rows, in seconds; `None` if it is not to be compared.
    of_larger: Option<f64>,
    /// Shortest time of a row in steps of the current rows, in seconds.
    shortest: f64,
    /// Steps of the current rows so far, and before the next comparison.
    steps: usize,
    compare_after: usize,
}

impl FullSteps {
    /// Returns the limit before any step: `most` rows.
    pub fn new(target: Duration, most: usize) -> Self {
        let (of_larger, shortest, steps) = (None, f64::INFINITY, 0);
        Self { target, most, rows: most, of_larger, shortest, steps, compare_after: STEPS }
    }

    /// Returns the most rows of a step; `None` if it may have all.
    pub fn limit(&self) -> Option<usize> {
        (self.rows < self.most).then_some(self.rows)
    }

    /// Records the time of a step with this many rows of prompts and decodes, which was not limited further.
    pub fn record(&mut self, prefill: usize, decodes: usize, time: Duration) {
        let (rows, current) = ((prefill + decodes) as f64, self.rows as f64);
        let is_full = rows >= 0.9 * current;
        if !is_full || (prefill as f64) < OF_PROMPTS * rows || time.is_zero() {
            return;
        }
        self.shortest = self.shortest.min(time.as_secs_f64() / rows);
        self.steps += 1;
        if self.steps < self.compare_after {
            return;
        }
        let is_long = self.shortest * current > self.target.as_secs_f64();
        if self.of_larger.is_some_and(|larger| self.shortest > DEARER * larger) {
            self.begin(2 * self.rows, None, RETRY);
        } else if is_long && self.rows / 2 >= ROWS_MIN {
            let best = self.of_larger.map_or(self.shortest, |larger| larger.min(self.shortest));
            self.begin(self.rows / 2, Some(best), STEPS);
        }
    }

    /// Begins steps of another size.
    fn begin(&mut self, rows: usize, of_larger: Option<f64>, compare_after: usize) {
        let (rows, shortest) = (rows.min(self.most), f64::INFINITY);
        *self = Self { rows, of_larger, shortest, steps: 0, compare_after, ..*self };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TARGET: Duration = Duration::from_millis(150);

    /// Runs full steps of prompts that take `step` milliseconds and `row` for each row; returns their rows.
    fn run(full: &mut FullSteps, (step, row): (f64, f64), steps: usize) -> Vec<usize> {
        let run = |_| {
            let rows = full.limit().unwrap_or(512);
            let time = Duration::from_secs_f64((step + row * rows as f64) / 1e3);
            full.record(rows, 0, time);
            rows
        };
        (0..steps).map(run).collect()
    }

    #[test]
    fn steps_become_short_where_more_rows_save_nothing() {
        for (machine, rows) in
            [((0.5, 5.7), 64), ((20.0, 5.7), 256), ((4.0, 3.0), 64), ((1.0, 1.0), 128)]
        {
            let mut full = FullSteps::new(TARGET, 512);
            run(&mut full, machine, 40);
            assert_eq!(full.limit(), Some(rows), "{machine:?}");
        }
    }

    #[test]
    fn steps_stay_full_where_rows_save_time_or_steps_are_short() {
        for machine in [(100.0, 1.0), (1.0, 0.25)] {
            let mut full = FullSteps::new(TARGET, 512);
            let rows = run(&mut full, machine, 500);
            let most = rows.iter().filter(|rows| **rows == 512).count();
            assert!(most > 470, "{machine:?}: {most} of 500 steps");
        }
    }

    #[test]
    fn one_slow_step_changes_nothing() {
        let mut full = FullSteps::new(TARGET, 512);
        full.record(512, 0, 10 * TARGET);
        run(&mut full, (0.5, 0.25), 20);
        assert_eq!(full.limit(), None);
    }

    #[test]
    fn steps_that_say_nothing_do_not_count() {
        let mut full = FullSteps::new(TARGET, 512);
        for _ in 0..100 {
            full.record(300, 0, 10 * TARGET);
            full.record(256, 256, 10 * TARGET);
            full.record(512, 0, Duration::ZERO);
        }
        assert_eq!(full.limit(), None);
    }
}
