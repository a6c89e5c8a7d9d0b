//! How many rows a step has that no caller waits for: one who comes during it waits for its end.
//!
//! On most machines prompts are computed as fast with 64 or 128 rows in a step as with more; with AMX, more rows save time. So the
//! number is found from measured times: twice as many rows are tried, and kept if a row takes less time with them; half as many are
//! tried, and kept if a row takes hardly more. Steps that take less than the target have more rows in any case.
//!
//! Pure: the same times give the same limits.

use std::time::Duration;

/// Fewest rows of a full step.
const ROWS_MIN: usize = 64;
/// Twice as many rows must save this much of a row's time. Where they save less, any number of rows saves at most twice as much: the
/// part of the time that does not grow with the rows is halved with each doubling.
const SAVED: f64 = 1.01;
/// Steps of a trial: of their times the shortest counts, since other programs only make steps longer.
const STEPS: usize = 3;
/// Steps between a trial that failed and the next one.
const RETRY: usize = 64;
/// A step with at least this share of its rows in prompts says how long a row of a prompt takes.
const OF_PROMPTS: f64 = 0.75;

/// Rows of full steps, from their times so far.
#[derive(Debug, Clone)]
pub(super) struct FullSteps {
    target: Duration,
    /// Rows that a step may have at all.
    most: usize,
    /// Rows of the next steps.
    rows: usize,
    /// Whether a time was recorded.
    is_timed: bool,
    /// During a trial: the rows before it, and the time of one in seconds.
    before: Option<(usize, f64)>,
    /// Shortest time of a row in steps of the current size, in seconds, and the number of these steps.
    shortest: f64,
    steps: usize,
    /// Steps until the next trial, and whether it is one of more rows.
    wait: usize,
    goes_up: bool,
}

impl FullSteps {
    /// Returns the limits before any step: `first` rows of `most`, once the first time is known.
    pub fn new(target: Duration, first: usize, most: usize) -> Self {
        Self {
            target,
            most,
            rows: first.min(most),
            is_timed: false,
            before: None,
            shortest: f64::INFINITY,
            steps: 0,
            wait: STEPS,
            goes_up: true,
        }
    }

    /// Returns the most rows of a step: all, if no times are recorded.
    pub fn limit(&self) -> usize {
        if self.is_timed { self.rows } else { self.most }
    }

    /// Records the time of a step with this many rows of prompts and decodes, which was not limited further.
    pub fn record(&mut self, prefill: usize, decodes: usize, time: Duration) {
        self.is_timed = true;
        let (rows, current) = ((prefill + decodes) as f64, self.rows as f64);
        let is_full = (0.9 * current..=1.1 * current).contains(&rows);
        if !is_full || (prefill as f64) < OF_PROMPTS * rows || time.is_zero() {
            return;
        }
        self.shortest = self.shortest.min(time.as_secs_f64() / rows);
        self.steps += 1;
        match self.before {
            Some(before) if self.steps >= STEPS => self.end_trial(before),
            None if self.takes(2 * self.rows) <= 1.0 && 2 * self.rows <= self.most => {
                (self.rows, self.shortest, self.steps) = (2 * self.rows, f64::INFINITY, 0);
            }
            None if self.steps >= self.wait => self.begin_trial(),
            _ => {}
        }
    }

    /// Returns the time of a step with so many rows, in targets.
    fn takes(&self, rows: usize) -> f64 {
        self.shortest * rows as f64 / self.target.as_secs_f64().max(f64::MIN_POSITIVE)
    }

    fn begin_trial(&mut self) {
        let up = Some(2 * self.rows).filter(|rows| *rows <= self.most);
        let is_long = self.takes(self.rows) > 1.0;
        let down = Some(self.rows / 2).filter(|rows| *rows >= ROWS_MIN && is_long);
        let Some(next) = (if self.goes_up { up.or(down) } else { down.or(up) }) else {
            self.steps = 0;
            return;
        };
        self.before = Some((self.rows, self.shortest));
        (self.rows, self.shortest, self.steps) = (next, f64::INFINITY, 0);
    }

    fn end_trial(&mut self, (rows, time): (usize, f64)) {
        let was_up = self.rows > rows;
        let pays =
            if was_up { self.shortest * SAVED < time } else { self.shortest <= time * SAVED };
        (self.before, self.steps) = (None, 0);
        if pays {
            (self.wait, self.goes_up) = (STEPS, was_up);
        } else {
            (self.rows, self.shortest) = (rows, f64::INFINITY);
            (self.wait, self.goes_up) = (RETRY, !was_up);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TARGET: Duration = Duration::from_millis(150);

    fn full_steps() -> FullSteps {
        FullSteps::new(TARGET, 64, 512)
    }

    /// Runs full steps of prompts that take `step` milliseconds and `row` for each row; returns their rows.
    fn run(full: &mut FullSteps, (step, row): (f64, f64), steps: usize) -> Vec<usize> {
        let run = |_| {
            let rows = full.limit();
            let time = Duration::from_secs_f64((step + row * rows as f64) / 1e3);
            full.record(rows, 0, time);
            rows
        };
        (0..steps).map(run).collect()
    }

    #[test]
    fn rows_are_as_few_as_cost_nothing() {
        for (machine, expected) in [
            ((0.5, 5.7), 64),
            ((20.0, 5.7), 256),
            ((4.0, 3.0), 128),
            ((100.0, 1.0), 512),
            // Short steps have more rows, though these save nothing.
            ((1.0, 1.0), 128),
            ((1.0, 0.1), 512),
        ] {
            let mut full = full_steps();
            let rows = run(&mut full, machine, 1000);
            let settled = &rows[40..];
            let of = settled.iter().filter(|rows| **rows == expected).count();
            assert!(of > settled.len() * 9 / 10, "{machine:?}: {of} of {}", settled.len());
        }
    }

    #[test]
    fn engines_without_a_clock_have_full_steps() {
        let mut full = full_steps();
        assert_eq!(full.limit(), 512);
        full.record(1, 1, TARGET);
        assert_eq!(full.limit(), 64);
    }

    #[test]
    fn machine_that_changes_has_other_rows() {
        let mut full = full_steps();
        run(&mut full, (100.0, 1.0), 40);
        assert_eq!(full.limit(), 512);
        run(&mut full, (0.5, 5.7), 700);
        assert!(full.limit() <= 128, "{}", full.limit());
        run(&mut full, (0.5, 0.05), 700);
        assert_eq!(full.limit(), 512);
    }

    #[test]
    fn slow_steps_between_others_change_nothing() {
        let mut full = full_steps();
        for round in 0..200 {
            run(&mut full, (0.5, 5.7), 2);
            if round % 3 == 0 {
                let rows = full.limit();
                full.record(rows, 0, 10 * TARGET);
            }
        }
        let rows = run(&mut full, (0.5, 5.7), 100);
        assert!(rows.iter().filter(|rows| **rows == 64).count() > 90, "{rows:?}");
    }

    #[test]
    fn steps_that_say_nothing_do_not_count() {
        let mut full = full_steps();
        for _ in 0..100 {
            full.record(40, 0, TARGET / 100);
            full.record(512, 0, TARGET / 100);
            full.record(32, 32, TARGET / 100);
            full.record(64, 0, Duration::ZERO);
        }
        assert_eq!(full.limit(), 64);
    }
}
