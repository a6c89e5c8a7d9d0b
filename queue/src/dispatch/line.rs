//! [`Line`]: what waits in a queue by priority, and how much of it is served before a new entry.

use crate::job::Priority;

/// What waits of one priority.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LinePart {
    /// Entries.
    pub entries: u64,
    /// Tokens that they are expected to use.
    pub tokens: u64,
    /// Tokens of these that are served before a new entry of the demand's tenant. Fewer than all of them where
    /// tenants share a priority fairly and another tenant has more waiting.
    pub before: u64,
}

impl LinePart {
    /// Mean number of tokens of an entry.
    fn mean(&self) -> f64 {
        self.tokens as f64 / self.entries.max(1) as f64
    }
}

/// What waits in a queue, by priority.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Line {
    /// The parts, in the order of [`Priority::ALL`].
    pub parts: [LinePart; 3],
}

impl Line {
    /// Returns the part of a priority.
    pub fn of(&mut self, priority: Priority) -> &mut LinePart {
        &mut self.parts[priority as usize]
    }

    /// Returns the entries of all priorities.
    pub fn entries(&self) -> u64 {
        self.parts.iter().map(|part| part.entries).sum()
    }

    /// Adds what waits in another shard of the queue.
    pub(super) fn merge(&mut self, other: &Self) {
        for (part, other) in self.parts.iter_mut().zip(&other.parts) {
            part.entries += other.entries;
            part.tokens += other.tokens;
            part.before += other.before;
        }
    }

    /// Returns the tokens that are served before a new entry of this priority: all of the higher ones, what is
    /// before it in its own, and of the lower ones the share that their weight gives them meanwhile.
    pub fn tokens_before(&self, priority: Priority) -> f64 {
        let own = self.parts[priority as usize];
        // Entries of its own priority that go first, with the new one.
        let turns = own.before as f64 / own.mean().max(1.0) + 1.0;
        let tokens = Priority::ALL.into_iter().zip(&self.parts).map(|(other, part)| {
            if other == priority {
                return part.before as f64;
            }
            if other < priority {
                return part.tokens as f64;
            }
            let share = f64::from(other.weight()) / f64::from(priority.weight());
            // Less than a whole turn is none.
            (turns * share).floor().min(part.entries as f64) * part.mean()
        });
        tokens.sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(entries: u64, tokens: u64) -> LinePart {
        LinePart { entries, tokens, before: tokens }
    }

    fn check(parts: [(u64, u64); 3], expected: [u64; 3]) {
        let line = Line { parts: parts.map(|(entries, tokens)| part(entries, tokens)) };
        for (priority, expected) in Priority::ALL.into_iter().zip(expected) {
            let tokens = line.tokens_before(priority);
            assert!((tokens - expected as f64).abs() < 0.01, "{priority:?}: {tokens} of {line:?}");
        }
    }

    #[test]
    fn higher_priorities_go_first_and_lower_ones_get_their_share() {
        check([(0, 0), (0, 0), (0, 0)], [0, 0, 0]);
        check([(3, 300), (0, 0), (0, 0)], [300, 300, 300]);
        // One entry of priority normal for four of priority high, one of low for sixteen.
        check([(15, 1500), (100, 1000), (100, 5000)], [1500 + 40 + 50, 1500 + 1000 + 1250, 7500]);
        check([(0, 0), (100, 1000), (2, 5000)], [0, 1000 + 5000, 6000]);
        check([(2, 200), (100, 1000), (100, 5000)], [200, 200 + 1000 + 1250, 6200]);
    }

    #[test]
    fn others_of_a_fair_priority_go_first_only_in_part() {
        let mut line = Line::default();
        *line.of(Priority::Normal) = LinePart { entries: 1000, tokens: 100_000, before: 300 };
        *line.of(Priority::Low) = part(10, 50);
        assert!((line.tokens_before(Priority::Normal) - 305.0).abs() < 0.01);
    }
}
