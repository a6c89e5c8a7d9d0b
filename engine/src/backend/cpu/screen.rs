//! Finds the largest logits without computing all logits.
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
//! A logit computed in f32 is within `rounding(len)·(‖s·q‖ + ‖e‖)·‖x‖` of `w·x`. A row is left out if
//! its upper bound is below the k-th largest of all lower bounds, since k rows have larger logits.

mod copies;
mod search;
#[cfg(test)]
mod tests;

use std::ops::Range;

pub use self::copies::Screen;
pub(in crate::backend) use self::copies::{RowStats, can_screen, quantize};
use self::{copies::ROUND_UP, search::Search};
use super::{
    buffers::{Scratch, with_scratch},
    disjoint::Disjoint,
    head::{HEAD_ROWS, Head},
    pool::Pool,
};
use crate::{
    backend::TokenLogit,
    kernels::{
        Isa,
        float::FloatKernels,
        screen::{self, DigitRow, Digits, Products, Unfilled},
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

/// Returns the error bound of an f32 dot product of `len` elements, relative to the norms: 16 running sums
/// of fused multiply-adds and a tree of four additions, each with half an ulp of error. The bound is
/// doubled for safety, and includes the rounding of scales and bounds to f32.
fn rounding(len: usize) -> f64 {
    (len.div_ceil(16) + 32) as f64 * f64::from(f32::EPSILON)
}

/// Buffers and results of a screen, kept between steps.
#[derive(Default)]
pub struct ScreenState {
    digits: Digits,
    searches: Vec<Search>,
    tasks: Vec<CandidateTask>,
    found: Vec<TokenLogit>,
    ranges: Vec<Range<usize>>, // of `found`, per row
}

/// Candidates of a row for which one task computes the logits.
#[derive(Debug, Clone)]
struct CandidateTask {
    row: usize,
    found: Range<usize>,
}

impl ScreenState {
    /// Returns the results of the last [`Screen::largest`]: a list for each row, by ascending token.
    pub fn found(&self) -> impl Iterator<Item = &[TokenLogit]> {
        self.ranges.iter().map(|range| &self.found[range.clone()])
    }

    /// Lists the candidates and cuts the lists into tasks, between neighbourhoods of [`HEAD_ROWS`].
    fn collect(&mut self, rows: usize) {
        let Self { searches, tasks, found, ranges, .. } = self;
        tasks.clear();
        found.clear();
        ranges.clear();
        found.reserve(rows * FOUND_MOST);
        tasks.reserve(rows * FOUND_MOST);
        for (row, search) in searches[..rows].iter_mut().enumerate() {
            let start = found.len();
            found.extend(search.finish().map(|id| TokenLogit { id, logit: 0.0 }));
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
}

/// Hidden rows to find the largest logits for, and the head.
pub struct ScreenInput<'a> {
    pub head: &'a Head,
    pub kernels: &'a FloatKernels,
    pub isa: Isa,
    /// The hidden rows, after the norm. // (rows, hidden)
    pub xs: &'a [f32],
    /// Number of largest logits requested for each row. // (rows,)
    pub counts: &'a [usize],
}

impl Screen {
    /// Computes each row's logits that can be among its largest, and stores them in
    /// [`ScreenState::found`].
    pub fn largest(&self, input: &ScreenInput<'_>, pool: &mut Pool, state: &mut ScreenState) {
        let (vocab, n) = (self.scales.len(), input.counts.len());
        if n == 0 {
            return state.collect(0);
        }
        let width = input.xs.len() / n;
        split_rows(input, width, pool, &mut state.digits);
        state.searches.resize_with(n.max(state.searches.len()), Search::default);
        for (search, count) in state.searches.iter_mut().zip(input.counts) {
            search.reset(*count);
        }
        let searches = &state.searches;
        let estimates = Estimates { screen: self, input, digits: &state.digits };
        pool.run(vocab.div_ceil(TASK_ROWS), &|task| {
            let range = task * TASK_ROWS..((task + 1) * TASK_ROWS).min(vocab);
            with_scratch(|scratch| estimates.estimate_range(range, searches, scratch));
        });
        state.collect(n);
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

/// Estimates logits and bounds their errors.
struct Estimates<'a> {
    screen: &'a Screen,
    input: &'a ScreenInput<'a>,
    digits: &'a Digits,
}

impl Estimates<'_> {
    /// Factors of a head row's error and norm in the bound of its logit. `error` is the norm of the part
    /// of the hidden row that the digits do not represent.
    fn factors(&self, row: &DigitRow, error: f64) -> (f32, f32) {
        let rounding = rounding(self.screen.stride) * row.norm;
        ((row.norm + rounding) as f32 * ROUND_UP, (error + rounding) as f32 * ROUND_UP)
    }

    /// Estimates a range of the vocabulary for all rows. Tokens that this does not rule out are estimated
    /// again, more exactly. Each row's search receives the tokens that can be among its largest.
    fn estimate_range(&self, range: Range<usize>, searches: &[Search], scratch: &mut Scratch) {
        let Self { screen, digits, input } = *self;
        let (n, count, isa) = (input.counts.len(), range.len(), input.isa);
        let Scratch { sums: dots, floats: estimates, positions, candidates, .. } = scratch;
        let six = screen.six(isa, n);
        dots.resize(count * n.max(2), 0);
        if six.is_none() {
            screen::dots(isa, screen.rows(range.clone()), digits, &mut dots[..count * n]);
        }
        estimates.resize(count, 0.0);
        let scales = &screen.scales[range.clone()];
        let head_stats = six.map_or(&screen.row_stats, |six| &six.row_stats);
        let sums = &head_stats.sums[range.clone()];
        for (row, (digit_row, search)) in digits.rows().iter().zip(searches).enumerate() {
            let (first, second, error) = match six {
                Some(six) => {
                    let (first, second) = dots[..2 * count].split_at_mut(count);
                    let head_rows = six.rows(range.clone(), screen.stride);
                    screen::six_dots(isa, head_rows, digits, row, [&mut *first, &mut *second]);
                    (&*first, Some(&*second), digit_row.error)
                }
                None => (&dots[row * count..(row + 1) * count], None, digit_row.first_error),
            };
            let products = Products { first, second, digits, row, scales, sums };
            input.kernels.estimate(&products, estimates);
            let bounds = head_stats.bounds(range.clone(), self.factors(digit_row, error));
            let threshold = search.threshold();
            positions.clear();
            positions.reserve(count);
            input.kernels.select_candidates(&bounds, threshold, estimates, positions);
            candidates.clear();
            candidates.reserve(count);
            let refined = positions.iter().map(|&j| {
                let known = six.is_none().then_some(first[j]);
                self.refined(row, range.start + j, known)
            });
            // Not `>=`: a NaN must stay a candidate.
            candidates.extend(refined.filter(|(_, estimate, bound)| {
                let is_below = estimate + bound < threshold;
                !is_below
            }));
            if !candidates.is_empty() {
                search.add(candidates.drain(..));
            }
        }
    }

    /// Returns the token, its logit estimated with both digits and the whole int8, and the error bound of
    /// the estimate. `first` is the product with the first digits, if it is known.
    fn refined(&self, row: usize, token: usize, first: Option<i32>) -> (usize, f32, f32) {
        let Self { screen, digits, input } = *self;
        let head_row = screen.rows(token..token + 1);
        let [first, second] = screen::both_dots(input.isa, head_row, digits, row, first);
        let mut estimate = [0.0];
        let products = Products {
            first: &[first],
            second: Some(&[second]),
            digits,
            row,
            scales: &screen.scales[token..=token],
            sums: &screen.row_stats.sums[token..=token],
        };
        input.kernels.estimate(&products, &mut estimate);
        let digit_row = &digits.rows()[row];
        let factors = self.factors(digit_row, digit_row.error);
        let bounds = screen.row_stats.bounds(token..token + 1, factors);
        (token, estimate[0], bounds.at(0))
    }
}

/// Splits the hidden rows into digits.
fn split_rows(input: &ScreenInput<'_>, width: usize, pool: &mut Pool, digits: &mut Digits) {
    let Unfilled { first, second, rows, len, bits } =
        digits.begin(input.isa, input.counts.len(), width);
    let (first, second) = (Disjoint::new(first), Disjoint::new(second));
    let rows = Disjoint::new(rows);
    pool.run(input.counts.len(), &|r| {
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
