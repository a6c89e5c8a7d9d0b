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

mod copies;
mod search;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod tight;

use std::ops::Range;

pub use self::copies::Screen;
pub(in crate::backend) use self::copies::{RowStats, can_screen, quantize};
use self::{
    copies::{ROUND_UP, Six},
    search::Search,
};
use super::{
    buffers::{Scratch, with_scratch},
    disjoint::Disjoint,
    head::{HEAD_ROWS, Head},
    pool::Pool,
};
use crate::{
    backend::{Ranking, Rest, ScaledNoise, TokenLogit},
    kernels::{
        Isa,
        float::FloatKernels,
        screen::{self, Bounds, DigitRow, Digits, Products, RangeNoise, Unfilled},
    },
};

/// A screen finds at most `1 / SCREEN_SHARE` of the vocabulary. A neighbourhood of head rows with a larger
/// share of candidates is computed as a whole.
pub(in crate::backend) const SCREEN_SHARE: usize = 8;
/// Head rows that a task estimates.
const TASK_ROWS: usize = 192;
/// Candidates that few rows exceed: the lists have room for them from the start.
const FOUND_MOST: usize = 64;
/// More than the relative rounding of noise to f32, and of its sum with a logit.
const NOISE_ROUNDING: f32 = 1e-6;
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
    rests: Vec<Option<Rest>>,  // (row)
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

    /// What the last [`Screen::largest`] knows of the tokens that are not in the lists, for each row that asks for it.
    pub fn rests(&self) -> impl Iterator<Item = Option<Rest>> {
        self.rests.iter().copied()
    }

    /// Lists the candidates and cuts the lists into tasks, between neighbourhoods of [`HEAD_ROWS`].
    fn collect(&mut self, rows: usize) {
        let Self { searches, tasks, found, ranges, rests, .. } = self;
        rests.clear();
        tasks.clear();
        found.clear();
        ranges.clear();
        found.reserve(rows * FOUND_MOST);
        tasks.reserve(rows * FOUND_MOST);
        for (row, search) in searches[..rows].iter_mut().enumerate() {
            let start = found.len();
            found.extend(search.finish().map(|id| TokenLogit { id, logit: 0.0 }));
            ranges.push(start..found.len());
            rests.push(search.rest());
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
    /// [`ScreenState::found`].
    pub fn largest(&self, input: &ScreenInput<'_>, pool: &mut Pool, state: &mut ScreenState) {
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
    /// again, more exactly. Each row's search receives the tokens that can be among those asked for.
    fn estimate_range(&self, range: Range<usize>, searches: &[Search], scratch: &mut Scratch) {
        let Self { screen, digits, input } = *self;
        let (n, count) = (input.rankings.len(), range.len());
        let Scratch { sums: dots, floats: estimates, positions, candidates, .. } = scratch;
        let six = screen.six(input.isa, n);
        dots.resize(count * n.max(2), 0);
        if six.is_none() {
            screen::dots(input.isa, screen.rows(range.clone()), digits, &mut dots[..count * n]);
        }
        estimates.resize(count, 0.0);
        for (row, (ranking, search)) in input.rankings.iter().zip(searches).enumerate() {
            let bounds = match six {
                Some(six) => self.estimate_six(six, row, range.clone(), dots, estimates),
                None => self.estimate_first(row, range.clone(), dots, estimates),
            };
            let (threshold, noise) = (search.threshold(), ranking.noise);
            let of_range = noise.map(|noise| RangeNoise::new(noise, range.start));
            let of_range = of_range.as_ref();
            if let Some(temperature) = ranking.weigh.filter(|_| threshold > f32::NEG_INFINITY) {
                let weight = input.kernels.weigh_below(&bounds, threshold, temperature, estimates);
                search.rule_out(threshold, weight.into());
            }
            positions.clear();
            positions.reserve(count);
            input.kernels.select_candidates(&bounds, of_range, threshold, estimates, positions);
            candidates.clear();
            candidates.reserve(count);
            let refined = positions.iter().map(|&j| {
                let known = six.is_none().then(|| dots[row * count + j]);
                let refined = self.refined(row, range.start + j, known);
                noise.map_or(refined, |noise| with_noise(&noise, refined))
            });
            // Not `>=`: a NaN must stay a candidate.
            candidates.extend(refined.filter(|(_, estimate, bound)| {
                let is_below = estimate + bound < threshold;
                if is_below {
                    search.rule_out(estimate + bound, 1.0);
                }
                !is_below
            }));
            if !candidates.is_empty() {
                search.add(candidates.drain(..));
            }
        }
    }

    /// Estimates a row's logits from the products of its first digits; returns the bounds of the errors. `dots` has the
    /// products of all rows. // (row, range)
    fn estimate_first(
        &self,
        row: usize,
        range: Range<usize>,
        dots: &[i32],
        out: &mut [f32],
    ) -> Bounds<'_> {
        let Self { screen, digits, input } = *self;
        let (count, digit_row) = (range.len(), &digits.rows()[row]);
        let first = &dots[row * count..(row + 1) * count];
        let (scales, sums) = (&screen.scales[range.clone()], &screen.row_stats.sums[range.clone()]);
        let products = Products { first, second: None, digits, row, scales, sums };
        input.kernels.estimate(&products, out);
        screen.row_stats.bounds(range, self.factors(digit_row, digit_row.first_error))
    }

    /// Estimates a row's logits from the products of both digits and the six-bit copy; returns the bounds of the errors.
    /// `dots` is scratch.
    fn estimate_six<'s>(
        &self,
        six: &'s Six,
        row: usize,
        range: Range<usize>,
        dots: &mut [i32],
        out: &mut [f32],
    ) -> Bounds<'s> {
        let Self { screen, digits, input } = *self;
        let (count, digit_row) = (range.len(), &digits.rows()[row]);
        let (first, second) = dots[..2 * count].split_at_mut(count);
        let head_rows = six.rows(range.clone(), screen.stride);
        screen::six_dots(input.isa, head_rows, digits, row, [&mut *first, &mut *second]);
        let (scales, sums) = (&screen.scales[range.clone()], &six.row_stats.sums[range.clone()]);
        let products = Products { first, second: Some(second), digits, row, scales, sums };
        input.kernels.estimate(&products, out);
        six.row_stats.bounds(range, self.factors(digit_row, digit_row.error))
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

/// Adds its noise to a token's estimate, and the roundings of that to the bound.
fn with_noise(
    noise: &ScaledNoise,
    (token, estimate, bound): (usize, f32, f32),
) -> (usize, f32, f32) {
    let added = noise.add_to(token as u32, 0.0) as f32;
    (token, estimate + added, bound + added.abs() * NOISE_ROUNDING)
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
