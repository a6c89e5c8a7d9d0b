//! The time of a step by its rows: a line through the measured times, the newest of which count most.

/// What older times count with each new one.
const KEEPS: f64 = 0.97;
/// Share of a step with one row that a further row takes, before that is known.
const ROW_FIRST: f64 = 0.08;
/// Rows and weight of the assumed measurement that says so.
const ASSUMED: (f64, f64) = (8.0, 0.5);
/// Smallest share of a step's time that a row takes.
const ROW_MIN: f64 = 0.002;

/// Weighted sums for a line by least squares.
#[derive(Debug, Clone, Copy, Default)]
pub struct StepTimes {
    weight: f64,
    rows: f64,
    squares: f64,
    seconds: f64,
    products: f64,
}

impl StepTimes {
    /// Records the time of a step.
    pub fn record(&mut self, rows: usize, seconds: f64) {
        if rows == 0 || seconds <= 0.0 {
            return;
        }
        if self.weight == 0.0 {
            let (more, weight) = ASSUMED;
            self.add(rows as f64 + more, seconds * (1.0 + ROW_FIRST * more), weight);
        }
        let Self { weight, rows: sum, squares, seconds: times, products } = self;
        for value in [weight, sum, squares, times, products] {
            *value *= KEEPS;
        }
        self.add(rows as f64, seconds, 1.0);
    }

    fn add(&mut self, rows: f64, seconds: f64, weight: f64) {
        self.weight += weight;
        self.rows += weight * rows;
        self.squares += weight * rows * rows;
        self.seconds += weight * seconds;
        self.products += weight * rows * seconds;
    }

    /// Returns the time of one more row as a share of the time of a step with this many rows; `None` before any step
    /// was measured.
    pub fn share_of_row(&self, rows: usize) -> Option<f64> {
        if self.weight == 0.0 {
            return None;
        }
        let (mean_rows, mean) = (self.rows / self.weight, self.seconds / self.weight);
        let spread = self.squares / self.weight - mean_rows * mean_rows;
        let joint = self.products / self.weight - mean_rows * mean;
        // If all steps have the same number of rows, the assumed slope stays.
        let slope = if spread > 1e-6 { joint / spread } else { mean * ROW_FIRST / mean_rows };
        let time = mean + slope * (rows as f64 - mean_rows);
        Some(if time > 0.0 { (slope / time).max(ROW_MIN) } else { 1.0 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn share_of_a_row_follows_the_measured_times() {
        let mut times = StepTimes::default();
        assert_eq!(times.share_of_row(1), None);
        times.record(1, 0.020);
        let first = times.share_of_row(1).expect("measured");
        assert!((first - ROW_FIRST).abs() < 0.03, "{first}");
        for _ in 0..100 {
            for rows in [1, 4, 2] {
                times.record(rows, 0.018 + 0.002 * rows as f64);
            }
        }
        let share = times.share_of_row(1).expect("measured");
        assert!((share - 0.1).abs() < 1e-3, "{share}");
        let share = times.share_of_row(11).expect("measured");
        assert!((share - 0.05).abs() < 1e-3, "{share}");
    }

    #[test]
    fn equal_steps_and_falling_times_have_a_finite_share() {
        let mut times = StepTimes::default();
        (0..2000).for_each(|_| times.record(32, 0.1));
        let share = times.share_of_row(32).expect("measured");
        assert!((0.0..0.1).contains(&share), "{share}");
        (0..100).for_each(|i| times.record(1 + i % 30, 0.5 / (1 + i % 30) as f64));
        let share = times.share_of_row(30).expect("measured");
        assert!((ROW_MIN..=1.0).contains(&share), "{share}");
    }
}
