//! How many rows a step should have.

use std::time::Duration;

use crate::formats::Format;

/// Rows that a kernel multiplies at a time: a step with a multiple of it wastes none.
pub const TILE_ROWS: usize = 16;

/// Rows of a step, of prefill chunks and decodes together. A step reads all weights however few rows it has, and with
/// enough rows the reading takes less time than the products.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowTarget {
    /// A step with fewer rows takes about as long as with these: an idle engine waits for them.
    pub least: usize,
    /// More rows save little time per row: steps of bounded time start with these.
    pub most: usize,
}

impl RowTarget {
    /// Returns the target of a packing.
    pub const fn for_format(format: Format) -> Self {
        match format {
            Format::I2S => Self { least: 32, most: 64 },
            // Their tables are built for each row, and are the larger part of a step earlier.
            Format::Tl1 | Format::Tl2 => Self { least: 16, most: 32 },
        }
    }

    /// Returns how much longer an idle engine waits for further requests, for a first step with more rows: after `waited`
    /// of `limit`, with so many rows to compute. `None` to start the step.
    pub fn wait(self, rows: usize, waited: Duration, limit: Duration) -> Option<Duration> {
        let left = limit.saturating_sub(waited);
        ((1..self.least).contains(&rows) && !left.is_zero()).then_some(left)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_are_whole_tiles() {
        for format in Format::ALL {
            let RowTarget { least, most } = RowTarget::for_format(format);
            assert!(least.is_multiple_of(TILE_ROWS) && most.is_multiple_of(TILE_ROWS));
            assert!(least < most, "{format}");
        }
    }

    #[test]
    fn idle_engine_waits_for_more_rows_within_the_limit() {
        let (target, ms) = (RowTarget::for_format(Format::I2S), Duration::from_millis);
        assert_eq!(target.wait(8, ms(3), ms(10)), Some(ms(7)));
        assert_eq!(target.wait(31, ms(0), ms(10)), Some(ms(10)));
        assert_eq!(target.wait(32, ms(0), ms(10)), None, "enough rows");
        assert_eq!(target.wait(8, ms(10), ms(10)), None, "waited long enough");
        assert_eq!(target.wait(0, ms(0), ms(10)), None, "nothing to compute");
        assert_eq!(target.wait(8, ms(0), ms(0)), None, "no waits");
    }
}
