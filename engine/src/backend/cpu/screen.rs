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
//! and the whole int8. Where further tokens may be looked for, the latter is the first estimate already: it leaves
//! less to look at, and takes less time than to estimate many head rows one by one.
//!
//! Noise is a function of the token: an upper bound is added to the first estimate, and all of it to the second.
//!
//! A logit computed in f32 is within `rounding(len)·(‖s·q‖ + ‖e‖)·‖x‖` of `w·x`. A row is left out if
//! its upper bound is below the k-th largest of all lower bounds, since k rows have larger logits.

mod above;
mod copies;
mod estimates;
mod search;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod tight;

use std::{ops::Range, sync::Mutex};

pub use self::copies::Screen;
pub(in crate::backend) use self::copies::{RowStats, can_screen, quantize};
use self::{above::FoundAbove, estimates::Estimates, search::Search};
use super::{
    buffers::{Scratch, with_scratch},
    disjoint::Disjoint,
    head::{HEAD_ROWS, Head},
    pool::Pool,
};
use crate::{
    backend::{Ranking, TokenLogit, logits::Kept},
    kernels::{
        Isa,
        float::FloatKernels,
        screen::{self, Digits, Unfilled},
    },
};

/// A screen finds at most `1 / SCREEN_SHARE` of the vocabulary. A neighbourhood of head rows with a larger
/// share of candidates is computed as a whole.
pub(in crate::backend) const SCREEN_SHARE: usize = 8;
/// Head rows that a task estimates.
const TASK_ROWS: usize = 192;
/// Candidates that few rows exceed: the lists have room for them from the start.
const FOUND_MOST: usize = 64;
/// Candidates per task; a neighbourhood with more candidates is not divided.
const TASK_CANDIDATES: usize = 8;

/// Buffers and results of a screen, kept between steps.
#[derive(Default)]
pub struct ScreenState {
    digits: Digits,
    searches: Vec<Search>,
    tasks: Vec<CandidateTask>,
    found: Vec<TokenLogit>,
    ranges: Vec<Range<usize>>,     // of `found`, per row
    kept_rows: Vec<Option<usize>>, // (rows)
    above: Mutex<FoundAbove>,
}

/// Candidates of a row for which one task computes the logits.
#[derive(Debug, Clone)]
struct CandidateTask {
    row: usize,
    found: Range<usize>,
}

impl ScreenState {
    /// Returns the results of the last [`Screen::largest`] or [`Screen::above`]: a list for each row, by ascending token.
    pub fn found(&self) -> impl Iterator<Item = &[TokenLogit]> {
        self.ranges.iter().map(|range| &self.found[range.clone()])
    }

    /// Removes the lists.
    fn clear(&mut self) {
        self.tasks.clear();
        self.found.clear();
        self.ranges.clear();
    }

    /// Lists the candidates of all searches.
    fn collect(&mut self, rows: usize) {
        self.clear();
        self.found.reserve(rows * FOUND_MOST);
        self.tasks.reserve(rows * FOUND_MOST);
        let mut searches = std::mem::take(&mut self.searches);
        for search in &mut searches[..rows] {
            self.push_list(search.finish());
        }
        self.searches = searches;
    }

    /// Adds the list of the next row, by ascending token, and cuts it into tasks, between neighbourhoods of [`HEAD_ROWS`].
    fn push_list(&mut self, tokens: impl Iterator<Item = u32>) {
        let Self { tasks, found, ranges, .. } = self;
        let (row, start) = (ranges.len(), found.len());
        found.extend(tokens.map(|id| TokenLogit { id, logit: 0.0 }));
        ranges.push(start..found.len());
        let mut from = start;
        for at in start..found.len() {
            let end = found.get(at + 1).is_none_or(|next| {
                next.id as usize / HEAD_ROWS != found[at].id as usize / HEAD_ROWS
            });
            if at + 1 == found.len() || end && at + 1 - from >= TASK_CANDIDATES {
                tasks.push(CandidateTask { row, found: from..at + 1 });
                from = at + 1;
            }
        }
    }
}

/// Hidden rows to find tokens for, and the head.
pub struct ScreenInput<'a> {
    pub head: &'a Head,
    pub kernels: &'a FloatKernels,
    pub isa: Isa,
    /// The hidden rows, after the norm. // (rows, hidden)
    pub xs: &'a [f32],
    /// The tokens to find for each row. // (rows,)
    pub rankings: &'a [Ranking],
}

impl Screen {
    /// Computes each row's logits of tokens that can be among those asked for, and stores them in
    /// [`ScreenState::found`]. Keeps what the rankings ask for.
    pub fn largest(
        &self,
        input: &ScreenInput<'_>,
        kept: &mut Kept,
        pool: &mut Pool,
        state: &mut ScreenState,
    ) {
        let (vocab, n) = (self.scales.len(), input.rankings.len());
        if n == 0 {
            return state.collect(0);
        }
        let width = input.xs.len() / n;
        split_rows(input, width, pool, &mut state.digits);
        state.searches.resize_with(n.max(state.searches.len()), Search::default);
        for (search, ranking) in state.searches.iter_mut().zip(input.rankings) {
            search.reset(ranking);
        }
        let mut next = 0..;
        state.kept_rows.clear();
        let kept_row = |ranking: &Ranking| ranking.keeps.then(|| next.next()).flatten();
        state.kept_rows.extend(input.rankings.iter().map(kept_row));
        let rows = input.rankings.iter().zip(input.xs.chunks_exact(width));
        for (_, x) in rows.filter(|(ranking, _)| ranking.keeps) {
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
        state.collect(n);
        self.compute_found(input, width, pool, state);
    }

    /// Computes the logits of these tokens, in ascending order, for one hidden row, and stores them in
    /// [`ScreenState::found`].
    pub fn logits_of(
        &self,
        input: &ScreenInput<'_>,
        tokens: &[u32],
        pool: &mut Pool,
        state: &mut ScreenState,
    ) {
        state.clear();
        state.push_list(tokens.iter().copied());
        self.compute_found(input, input.xs.len(), pool, state);
    }

    /// Computes the logits of the tokens in [`ScreenState::found`].
    fn compute_found(
        &self,
        input: &ScreenInput<'_>,
        width: usize,
        pool: &mut Pool,
        state: &mut ScreenState,
    ) {
        let (tasks, found) = (&state.tasks, Disjoint::new(&mut state.found));
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
        let neighbours =
            |a: &TokenLogit, b: &TokenLogit| a.id as usize / HEAD_ROWS == b.id as usize / HEAD_ROWS;
        for group in candidates.chunk_by_mut(neighbours) {
            let first = group[0].id as usize / HEAD_ROWS * HEAD_ROWS;
            let count = HEAD_ROWS.min(self.scales.len() - first);
            if group.len() * SCREEN_SHARE > count {
                floats.resize(count, 0.0);
                head.logits(kernels, first, count, x, more_floats, floats);
                for candidate in group {
                    candidate.logit = floats[candidate.id as usize - first];
                }
                continue;
            }
            for TokenLogit { id, logit } in group {
                let logit = std::slice::from_mut(logit);
                head.logits(kernels, *id as usize, 1, x, more_floats, logit);
            }
        }
    }
}

/// Splits the hidden rows into digits.
fn split_rows(input: &ScreenInput<'_>, width: usize, pool: &mut Pool, digits: &mut Digits) {
    let Unfilled { first, second, rows, len, bits } =
        digits.begin(input.isa, input.rankings.len(), width);
    let (first, second) = (Disjoint::new(first), Disjoint::new(second));
    let rows = Disjoint::new(rows);
    pool.run(input.rankings.len(), &|r| {
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
