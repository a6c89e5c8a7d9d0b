//! The search for the first tokens of a row's question, by values: logits, or logits with noise. Several threads add estimates to it in any order.

use std::sync::{
    Mutex, PoisonError,
    atomic::{AtomicU32, Ordering},
};

use crate::sampling::Largest;

/// Head rows that a task estimates.
pub(super) const TASK_ROWS: usize = 192;
/// Smallest length of the list at which candidates that later ones have ruled out are removed.
const CANDIDATES_MIN: usize = 64;
/// More than the relative rounding of a difference.
const ROUNDING: f32 = 1e-6;

/// One row's search. Its threshold only rises, so a logit below it at any time is below it at the end, and
/// the result does not depend on the order.
#[derive(Default)]
pub(super) struct Search {
    /// The threshold, as the bits of an f32: at least `count` values are certainly at least this large, or at most
    /// `within` below.
    threshold: AtomicU32,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    count: usize,
    within: f32,
    candidates: Vec<Candidate>,
    /// Number of candidates at which the list is pruned.
    limit: usize,
}

#[derive(Debug, Clone, Copy)]
struct Candidate {
    token: u32,
    /// Lower bound of the value; −∞ instead of NaN.
    lower: f32,
    /// Upper bound of the value; +∞ instead of NaN.
    upper: f32,
}

impl State {
    /// Drops candidates that are certainly not asked for. Returns the threshold, or `None` while there are fewer than
    /// `count` candidates.
    fn prune(&mut self) -> Option<f32> {
        let place = self.count.max(1) - 1;
        let least = (place < self.candidates.len()).then(|| {
            let descending = |a: &Candidate, b: &Candidate| b.lower.total_cmp(&a.lower);
            self.candidates.select_nth_unstable_by(place, descending).1.lower
        })?;
        let threshold = match self.within {
            0.0 => least,
            // NaN, for an infinite one, rules out nothing.
            within => (least - within - least.abs() * ROUNDING).max(f32::NEG_INFINITY),
        };
        self.candidates.retain(|candidate| candidate.upper >= threshold);
        Some(threshold)
    }
}

impl Search {
    /// Starts a search for the first tokens of a question.
    pub fn reset(&mut self, question: &Largest) {
        let Largest { count, within, .. } = *question;
        *self.threshold.get_mut() = f32::NEG_INFINITY.to_bits();
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        (state.count, state.within) = (count, within);
        state.limit = CANDIDATES_MIN.max(2 * count);
        state.candidates.clear();
        // Enough for most steps, so that these allocate nothing.
        state.candidates.reserve(2 * state.limit + TASK_ROWS);
    }

    /// Returns the threshold. Values that are certainly below it need not be added.
    pub fn threshold(&self) -> f32 {
        f32::from_bits(self.threshold.load(Ordering::Relaxed))
    }

    /// Adds tokens, their estimated values and the error bounds of the estimates.
    pub fn add(&self, estimates: impl Iterator<Item = (usize, f32, f32)>) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.candidates.extend(estimates.map(|(token, estimate, bound)| {
            let or = |value: f32, other: f32| if value.is_nan() { other } else { value };
            Candidate {
                token: token as u32,
                lower: or(estimate - bound, f32::NEG_INFINITY),
                upper: or(estimate + bound, f32::INFINITY),
            }
        }));
        if state.candidates.len() < state.limit {
            return;
        }
        if let Some(threshold) = state.prune() {
            self.threshold.store(threshold.to_bits(), Ordering::Relaxed);
        }
        state.limit = (CANDIDATES_MIN.max(2 * state.count)).max(2 * state.candidates.len());
    }

    /// Returns the tokens that can be among those asked for, in ascending order.
    pub fn finish(&mut self) -> impl Iterator<Item = u32> {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        state.prune();
        state.candidates.sort_unstable_by_key(|candidate| candidate.token);
        state.candidates.iter().map(|candidate| candidate.token)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn first_tokens_are_found_in_any_order(
            logits in prop::collection::vec((-9.0f32..9.0, 0.0f32..2.0, -1.0f32..1.0), 1..700),
            count in 0usize..40,
            within in prop_oneof![Just(0.0f32), 0.0f32..9.0],
        ) {
            let mut search = Search::default();
            search.reset(&Largest { within, ..Largest::logits(count) });
            let estimates: Vec<(usize, f32, f32)> = logits
                .iter()
                .enumerate()
                // The error of the estimate is within its bound.
                .map(|(token, (logit, bound, part))| (token, logit + part * 0.99 * bound, *bound))
                .collect();
            for part in estimates.chunks(7) {
                let threshold = search.threshold();
                let kept = part.iter().copied().filter(|(_, e, bound)| e + bound >= threshold);
                search.add(kept);
            }
            let found: Vec<u32> = search.finish().collect();
            prop_assert!(found.is_sorted_by(|a, b| a < b));
            let mut sorted: Vec<f32> = logits.iter().map(|(logit, _, _)| *logit).collect();
            sorted.sort_by(|a, b| b.total_cmp(a));
            let least = sorted[count.clamp(1, sorted.len()) - 1] - within;
            for (token, (logit, _, _)) in logits.iter().enumerate() {
                prop_assert!(*logit < least || found.contains(&(token as u32)));
            }
        }
    }

    #[test]
    fn all_of_fewer_tokens_than_asked_for_are_found() {
        for count in 3..6 {
            let mut search = Search::default();
            search.reset(&Largest::logits(count));
            search.add([(7, 1.0, 0.5), (2, 3.0, 0.0), (5, -1.0, 0.0)].into_iter());
            assert!(search.finish().eq([2, 5, 7]), "{count}");
        }
    }
}
