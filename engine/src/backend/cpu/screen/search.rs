//! The search for a row's largest logits. Several threads add estimates to it in any order.

use std::sync::{
    Mutex, PoisonError,
    atomic::{AtomicU32, Ordering},
};

use super::TASK_ROWS;

/// Smallest length of the list at which candidates that later ones have ruled out are removed.
const CANDIDATES_MIN: usize = 64;

/// One row's search. Its threshold only rises, so a logit below it at any time is below it at the end, and
/// the result does not depend on the order.
#[derive(Default)]
pub(super) struct Search {
    /// The threshold, as the bits of an f32: at least `count` logits are certainly at least this large.
    threshold: AtomicU32,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    count: usize,
    candidates: Vec<Candidate>,
    /// Number of candidates at which the list is pruned.
    limit: usize,
}

#[derive(Debug, Clone, Copy)]
struct Candidate {
    token: u32,
    /// Lower bound of the logit; −∞ instead of NaN.
    lower: f32,
    /// Upper bound of the logit; +∞ instead of NaN.
    upper: f32,
}

impl State {
    /// Drops candidates that are certainly not among the largest. Returns the threshold, or `None` while
    /// there are fewer than `count` candidates.
    fn prune(&mut self) -> Option<f32> {
        let place = self.count.max(1) - 1;
        let threshold = (place < self.candidates.len()).then(|| {
            let descending = |a: &Candidate, b: &Candidate| b.lower.total_cmp(&a.lower);
            self.candidates.select_nth_unstable_by(place, descending).1.lower
        })?;
        self.candidates.retain(|candidate| candidate.upper >= threshold);
        Some(threshold)
    }
}

impl Search {
    /// Starts a search for the `count` largest logits.
    pub fn reset(&mut self, count: usize) {
        *self.threshold.get_mut() = f32::NEG_INFINITY.to_bits();
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        state.count = count;
        state.limit = CANDIDATES_MIN.max(2 * count);
        state.candidates.clear();
        // Enough for most steps, so that these allocate nothing.
        state.candidates.reserve(2 * state.limit + TASK_ROWS);
    }

    /// Returns the threshold. Logits that are certainly below it need not be added.
    pub fn threshold(&self) -> f32 {
        f32::from_bits(self.threshold.load(Ordering::Relaxed))
    }

    /// Adds tokens, their estimated logits and the error bounds of the estimates.
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

    /// Returns the tokens that can be among the largest, in ascending order.
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
        fn largest_logits_are_found_in_any_order(
            logits in prop::collection::vec((-9.0f32..9.0, 0.0f32..2.0, -1.0f32..1.0), 1..700),
            count in 0usize..40,
        ) {
            let mut search = Search::default();
            search.reset(count);
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
            let least = sorted[count.clamp(1, sorted.len()) - 1];
            for (token, (logit, _, _)) in logits.iter().enumerate() {
                prop_assert!(*logit < least || found.contains(&(token as u32)));
            }
        }
    }
}
