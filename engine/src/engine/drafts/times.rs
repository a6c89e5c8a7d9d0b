//! The time of a step by its rows. Each number of rows has the mean of its own times, as far as there are any, the newest of
//! which count most: kernels take rows in groups, so that some further rows cost much and others little. For other numbers
//! there is a line through all measured times.

/// What older times of the line count with each new one.
const KEEPS: f64 = 0.99;
/// Share of a step with one row that a further row takes, before that is known.
const ROW_FIRST: f64 = 0.08;
/// Rows and weight of the assumed measurement that says so.
const ASSUMED: (f64, f64) = (8.0, 0.5);
/// Smallest share of a step's time that a row takes.
const ROW_MIN: f64 = 0.002;
/// Most rows with means of their own.
const ROWS_MAX: usize = 64;
/// Most times that the mean of a number of rows counts as, beside a new one.
const MEAN_WEIGHT_MAX: f64 = 24.0;
/// Times that the line counts as, beside such a mean.
const LINE_WEIGHT: f64 = 3.0;
/// What the mean of a number of rows counts with each step that came after it: later the line alone is taken.
const UNUSED_KEEPS: f64 = 0.997;

/// The mean time of steps with one number of rows.
#[derive(Debug, Clone, Copy, Default)]
struct Mean {
    seconds: f64,
    weight: f64,
    /// Number of the newest of these steps.
    step: u64,
}

/// Measured times of steps.
#[derive(Debug, Clone, Default)]
pub struct StepTimes {
    /// Sums for a line by least squares.
    weight: f64,
    rows: f64,
    squares: f64,
    seconds: f64,
    products: f64,
    /// By number of rows.
    means: Vec<Mean>,
    /// Measured steps.
    steps: u64,
}

impl StepTimes {
    /// Records the time of a step.
    pub fn record(&mut self, rows: usize, seconds: f64) {
        if rows == 0 || seconds <= 0.0 {
            return;
        }
        if self.weight == 0.0 {
            let (more, weight) = ASSUMED;
            self.add(
                rows as f64 + more,
                seconds + more * assumed_slope(rows as f64, seconds),
                weight,
            );
            self.means = vec![Mean::default(); ROWS_MAX + 1];
        }
        let Self { weight, rows: sum, squares, seconds: times, products, .. } = self;
        for value in [weight, sum, squares, times, products] {
            *value *= KEEPS;
        }
        self.add(rows as f64, seconds, 1.0);
        self.steps += 1;
        let step = self.steps;
        if let Some(mean) = self.means.get_mut(rows) {
            let weight = mean.weight_at(step).min(MEAN_WEIGHT_MAX);
            let seconds = (mean.seconds * weight + seconds) / (weight + 1.0);
            *mean = Mean { seconds, weight: weight + 1.0, step };
        }
    }

    fn add(&mut self, rows: f64, seconds: f64, weight: f64) {
        self.weight += weight;
        self.rows += weight * rows;
        self.squares += weight * rows * rows;
        self.seconds += weight * seconds;
        self.products += weight * rows * seconds;
    }

    /// Returns the expected time of a step with this many rows; `None` before any step was measured.
    pub fn time(&self, rows: usize) -> Option<f64> {
        let by_line = self.by_line(rows)?;
        let Some(mean) = self.means.get(rows) else { return Some(by_line) };
        let weight = mean.weight_at(self.steps);
        Some((LINE_WEIGHT * by_line + weight * mean.seconds) / (LINE_WEIGHT + weight))
    }

    fn by_line(&self, rows: usize) -> Option<f64> {
        if self.weight == 0.0 {
            return None;
        }
        let (mean_rows, mean) = (self.rows / self.weight, self.seconds / self.weight);
        let spread = self.squares / self.weight - mean_rows * mean_rows;
        let joint = self.products / self.weight - mean_rows * mean;
        // If all steps have the same number of rows, the assumed slope stays.
        let slope = if spread > 1e-6 { joint / spread } else { assumed_slope(mean_rows, mean) };
        let slope = slope.max(mean * ROW_MIN);
        // Where all measured steps have many rows, the line may be below zero for few.
        Some((mean + slope * (rows as f64 - mean_rows)).max(mean * ROW_MIN))
    }
}

/// Returns the assumed time of a row, if a step with so many rows takes this time.
fn assumed_slope(rows: f64, seconds: f64) -> f64 {
    seconds * ROW_FIRST / (1.0 + ROW_FIRST * (rows - 1.0))
}

impl Mean {
    fn weight_at(&self, step: u64) -> f64 {
        let since = i32::try_from(step - self.step).unwrap_or(i32::MAX);
        self.weight * UNUSED_KEEPS.powi(since)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_follow_a_line_through_the_measured_ones() {
        let mut times = StepTimes::default();
        assert_eq!(times.time(1), None);
        times.record(1, 0.020);
        let row = times.time(2).expect("measured") / times.time(1).expect("measured") - 1.0;
        assert!((row - ROW_FIRST).abs() < 0.03, "{row}");
        for _ in 0..1000 {
            for rows in [1, 4, 2] {
                times.record(rows, 0.018 + 0.002 * rows as f64);
            }
        }
        for rows in [1, 2, 3, 11, 100] {
            let time = times.time(rows).expect("measured");
            assert!((time - 0.018 - 0.002 * rows as f64).abs() < 1e-4, "{rows}: {time}");
        }
    }

    #[test]
    fn rows_that_kernels_take_together_have_their_own_times() {
        let mut times = StepTimes::default();
        // Four rows at a time.
        let time = |rows: usize| 0.02 + 0.01 * rows.div_ceil(4) as f64;
        (0..30).flat_map(|_| 1..=9).for_each(|rows| times.record(rows, time(rows)));
        let more =
            |rows| times.time(rows + 1).expect("measured") - times.time(rows).expect("measured");
        assert!(more(3).abs() < 0.002 && more(7).abs() < 0.002);
        assert!(more(4) > 0.007 && more(8) > 0.007);
        // After a long time without such steps, the mean of them counts no more.
        (0..5000).for_each(|_| times.record(1, 0.5));
        assert!(times.time(4).expect("measured") > 0.4);
    }

    #[test]
    fn equal_steps_and_falling_times_have_finite_times() {
        let mut times = StepTimes::default();
        (0..5000).for_each(|_| times.record(32, 0.1));
        let (at, more) = (times.time(32).expect("measured"), times.time(33).expect("measured"));
        assert!((at - 0.1).abs() < 1e-9 && (0.1..0.11).contains(&more), "{at} {more}");
        (0..100).for_each(|i| times.record(1 + i % 30, 0.5 / (1 + i % 30) as f64));
        for rows in [1, 30, 31, 64, 65, 1000] {
            let time = times.time(rows).expect("measured");
            assert!(time > 0.0 && time.is_finite(), "{rows}: {time}");
        }
    }
}
