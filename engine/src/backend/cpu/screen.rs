//! Finds the largest logits, or the largest sums of logit and noise, without computing all logits.
//!
//! A copy of the head in int8, half the bytes of f16, gives every logit up to a known error bound. For
//! few hidden rows, only the high six bits of the copy are read first. Rows that can still be among the
//! largest are then computed in full precision, by the same kernels as a whole head: the result is
//! equal to the bit.
//!
//! With `w = s·q + e` (a head row, its int8 or six-bit copy, and the error of the copy) and `x = t·u + f`
//! (a hidden row, its digits, and their error),
//!
//! ```text
//! w·x = s·t·(q·u) + s·q·f + e·x
//! |w·x − s·t·(q·u)| ≤ ‖s·q‖·‖f‖ + ‖e‖·‖x‖                       (Cauchy–Schwarz)
//! ```
//!
//! Hidden rows are split into two digits. The first estimate of every logit uses, for few hidden rows,
//! both digits and the six bits of the head row (a larger `e`), and for many, the first digit and the
//! whole int8 (a larger `f`). Head rows that this does not rule out are estimated again with both digits
//! and the whole int8.
//!
//! Noise is a function of the token: an upper bound is added to the first estimate, and all of it to the second.
//!
//! A logit computed in f32 is within `rounding(len)·(‖s·q‖ + ‖e‖)·‖x‖` of `w·x`. A row is left out if
//! its upper bound is below the k-th largest of all lower bounds, since k rows have larger logits.

mod at_least;
pub mod copies;
mod estimates;
mod search;
mod state;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod tight;

use self::{
    copies::{SCREEN_SHARE, Screen},
    estimates::Estimates,
    search::{Search, TASK_ROWS},
    state::CandidateTask,
};
pub use self::{estimates::ScreenInput, state::ScreenState};
use super::{
    buffers::{Scratch, with_scratch},
    disjoint::Disjoint,
    head::HEAD_ROWS,
    pool::Pool,
};
use crate::{
    backend::logits::ScreenedRows,
    kernels::screen::{self, Digits, Unfilled},
    sampling::{Largest, TokenLogit},
};

impl Screen {
    /// Computes each row's logits of tokens that can be among those asked for, or of the given tokens, and stores them in
    /// [`ScreenState::found`]. Keeps what the questions ask for.
    pub fn largest(
        &self,
        input: &ScreenInput<'_>,
        kept: &mut ScreenedRows,
        pool: &mut Pool,
        state: &mut ScreenState,
    ) {
        let (vocab, n) = (self.scales.len(), input.questions.len());
        if n == 0 {
            state.collect(0, input.given);
            return self.compute_found(input, pool, state);
        }
        let width = input.width();
        split_rows(input, width, pool, &mut state.digits);
        state.searches.resize_with(n.max(state.searches.len()), Search::default);
        for (search, question) in state.searches.iter_mut().zip(input.questions) {
            search.reset(question);
        }
        let mut next = 0..;
        state.kept_rows.clear();
        let kept_row = |question: &Largest| question.others_follow.then(|| next.next()).flatten();
        state.kept_rows.extend(input.questions.iter().map(kept_row));
        let rows = input.questions.iter().zip(input.xs.chunks_exact(width));
        for (_, x) in rows.filter(|(question, _)| question.others_follow) {
            kept.hidden.extend_from_slice(x);
        }
        kept.estimates.resize(next.start * vocab, 0.0);
        kept.from_six = self.six(input.isa, n).is_some();
        let (searches, kept_rows) = (&state.searches, &state.kept_rows);
        let kept = Disjoint::new(&mut kept.estimates);
        let estimates = Estimates { screen: self, input, digits: &state.digits };
        pool.run(vocab.div_ceil(TASK_ROWS), &|task| {
            let range = task * TASK_ROWS..((task + 1) * TASK_ROWS).min(vocab);
            let keep = |row: usize, of_range: &[f32]| {
                if let Some(row) = kept_rows[row] {
                    let range = row * vocab + range.start..row * vocab + range.end;
                    // SAFETY: each task has another range, and each row another place.
                    unsafe { kept.part(range) }.copy_from_slice(of_range);
                }
            };
            let range = range.clone();
            with_scratch(|scratch| estimates.estimate_range(range, searches, keep, scratch));
        });
        state.collect(n, input.given);
        self.compute_found(input, pool, state);
    }

    /// Computes the logits of the tokens in [`ScreenState::found`].
    fn compute_found(&self, input: &ScreenInput<'_>, pool: &mut Pool, state: &mut ScreenState) {
        let (tasks, found) = (&state.tasks, Disjoint::new(&mut state.found));
        if tasks.is_empty() {
            return;
        }
        let width = input.width();
        pool.run(tasks.len(), &|task| {
            let CandidateTask { row, found: range } = tasks[task].clone();
            let x = &input.xs[row * width..(row + 1) * width];
            // SAFETY: each task has different candidates.
            let candidates = unsafe { found.part(range) };
            with_scratch(|scratch| self.compute(input, x, candidates, scratch));
        });
    }

    /// Computes the candidates' logits for a hidden row.
    fn compute(
        &self,
        input: &ScreenInput<'_>,
        x: &[f32],
        candidates: &mut [TokenLogit],
        scratch: &mut Scratch,
    ) {
        let ScreenInput { head, kernels, .. } = input;
        let Scratch { floats, more_floats, .. } = scratch;
        // Candidates from `few` on are in neighbourhoods with few of them.
        let (mut few, mut at) = (0, 0);
        while at < candidates.len() {
            let first = candidates[at].id as usize / HEAD_ROWS * HEAD_ROWS;
            let count = HEAD_ROWS.min(self.scales.len() - first);
            let is_near = |token: &&TokenLogit| (token.id as usize) < first + count;
            let end = at + 1 + candidates[at + 1..].iter().take_while(is_near).count();
            if (end - at) * SCREEN_SHARE > count {
                head.logits_of(kernels, &mut candidates[few..at], x, more_floats);
                floats.resize(count, 0.0);
                head.logits(kernels, first, count, x, more_floats, floats);
                for candidate in &mut candidates[at..end] {
                    candidate.logit = floats[candidate.id as usize - first];
                }
                few = end;
            }
            at = end;
        }
        head.logits_of(kernels, &mut candidates[few..], x, more_floats);
    }
}

/// Splits the hidden rows into digits.
fn split_rows(input: &ScreenInput<'_>, width: usize, pool: &mut Pool, digits: &mut Digits) {
    let Unfilled { first, second, rows, len, bits } =
        digits.begin(input.isa, input.questions.len(), width);
    let (first, second) = (Disjoint::new(first), Disjoint::new(second));
    let rows = Disjoint::new(rows);
    pool.run(input.questions.len(), &|r| {
        let x = &input.xs[r * width..(r + 1) * width];
        // SAFETY: each task writes its own row.
        unsafe {
            let (first, second) =
                (first.part(r * len..(r + 1) * len), second.part(r * len..(r + 1) * len));
            rows.part(r..r + 1)[0] = screen::split(x, bits, first, second);
        }
    });
    digits.end(input.isa);
}
