//! [`Budget`]: the bounds of a step.

use std::time::Duration;

use tokio::time::Instant;

/// Longest time after which a step begins no more work.
const TIME: Duration = Duration::from_secs(2);
/// Most lines of a step.
const LINES: u64 = 20_000;
/// Most bytes that a step reads, or holds of an output.
const BYTES: u64 = 8 << 20;

/// What is left for a step. The last page or slice may exceed it.
pub(super) struct Budget {
    ends_at: Instant,
    lines: u64,
    bytes: u64,
}

impl Budget {
    /// The budget of a step that begins now.
    pub fn new() -> Self {
        Self { ends_at: Instant::now() + TIME, lines: LINES, bytes: BYTES }
    }

    /// Counts work that was done.
    pub fn spend(&mut self, lines: usize, bytes: u64) {
        self.lines = self.lines.saturating_sub(lines as u64);
        self.bytes = self.bytes.saturating_sub(bytes);
    }

    /// Returns the time that is left.
    pub fn time_left(&self) -> Duration {
        self.ends_at.saturating_duration_since(Instant::now())
    }

    /// Whether the step must end.
    pub fn is_spent(&self) -> bool {
        self.lines == 0 || self.bytes == 0 || Instant::now() >= self.ends_at
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn budget_ends_by_lines_by_bytes_and_by_time() {
        let spent = |lines: usize, bytes: u64| {
            let mut budget = Budget::new();
            budget.spend(lines, bytes);
            budget.is_spent()
        };
        assert!(!spent(LINES as usize - 1, BYTES - 1));
        assert!(spent(LINES as usize, 0) && spent(0, BYTES + 1));
        assert!(Budget { ends_at: Instant::now(), ..Budget::new() }.is_spent());
    }
}
