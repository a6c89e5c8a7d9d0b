//! Finding the largest logits without computing them all.
//!
//! A copy of the head in int8, half the bytes of f16, gives every logit up to an error that is known; for
//! few hidden rows, the high six bits of that are read first. Only rows that may still be among the largest
//! are then computed in full precision, by the same kernels as ever: what is chosen is equal to the bit.
//!
//! With `w = s·q + e` (a head row and its int8, or what stands for that) and `x = t·u + f` (a hidden row and its digits),
//!
//! ```text
//! w·x = s·t·(q·u) + s·q·f + e·x
//! |w·x − s·t·(q·u)| ≤ ‖s·q‖·‖f‖ + ‖e‖·‖x‖                       (Cauchy–Schwarz)
//! ```
//!
//! Hidden rows are taken apart into two digits. Few are multiplied by the six bits of every head row, many
//! by its whole int8, but for the second digits; those that this, with its larger `e` or `f`, does not
//! rule out, by all that is known.
//!
//! A logit computed in f32 is within `ROUNDING(len)·(‖s·q‖ + ‖e‖)·‖x‖` of `w·x`. A row is left out
//! if its upper bound is below the k-th largest of all lower bounds: k rows have larger logits.

mod copies;
mod search;
#[cfg(test)]
mod tests;

use std::ops::Range;

pub use self::copies::Screen;
pub(in crate::backend) use self::copies::{OfRow, is_worth, quantize};
use self::{copies::UP, search::Search};
use super::{
    disjoint::Disjoint,
    forward::{Scratch, with_scratch},
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

/// Largest share of the vocabulary that may be asked for, and of candidates before a row of logits is
/// computed as a whole.
pub(in crate::backend) const SHARE: usize = 8;
/// Rows of the head that a task estimates.
const TASK_ROWS: usize = 192;
/// Candidates whose logits a task computes, or more if many are neighbours.
const TASK_CANDIDATES: usize = 8;

/// How the sums of an f32 dot product of `len` elements may be off, relative to the norms: 16 running
/// sums of fused multiply-adds and a tree of four additions, each to half an ulp, twice for good
/// measure; scales and bounds of f32 are in it too.
fn rounding(len: usize) -> f64 {
    (len.div_ceil(16) + 32) as f64 * f64::from(f32::EPSILON)
}

/// Kept between steps.
#[derive(Default)]
pub struct Screening {
    digits: Digits,
    searches: Vec<Search>,
    tasks: Vec<Candidates>,
    found: Vec<TokenLogit>,
    ranges: Vec<Range<usize>>, // of `found`, per row
}

/// Some candidates of a row, whose logits one task computes.
#[derive(Debug, Clone)]
struct Candidates {
    row: usize,
    found: Range<usize>,
}

impl Screening {
    /// What [`Screen::largest`] found last: a list for each row, by ascending token.
    pub fn found(&self) -> impl Iterator<Item = &[TokenLogit]> {
        self.ranges.iter().map(|range| &self.found[range.clone()])
    }

    /// Lists the candidates and cuts the lists into tasks, between neighbourhoods of [`HEAD_ROWS`].
    fn collect(&mut self, rows: usize) {
        let Self { searches, tasks, found, ranges, .. } = self;
        tasks.clear();
        found.clear();
        ranges.clear();
        for (row, search) in searches[..rows].iter_mut().enumerate() {
            let start = found.len();
            found.extend(search.end().map(|id| TokenLogit { id, logit: 0.0 }));
            ranges.push(start..found.len());
            let mut from = start;
            for at in start..found.len() {
                let end = found.get(at + 1).is_none_or(|next| {
                    next.id as usize / HEAD_ROWS != found[at].id as usize / HEAD_ROWS
                });
                if at + 1 == found.len() || end && at + 1 - from >= TASK_CANDIDATES {
                    tasks.push(Candidates { row, found: from..at + 1 });
                    from = at + 1;
                }
            }
        }
    }
}

/// What the rows of a step have in common.
pub struct Job<'a> {
    pub head: &'a Head,
    pub kernels: &'a FloatKernels,
    pub isa: Isa,
    /// The hidden rows, normed. // (rows, hidden)
    pub xs: &'a [f32],
    /// How many of the largest logits of each count. // (rows,)
    pub counts: &'a [usize],
}

impl Screen {
    /// Computes the logits that may be among the largest of each row: [`Screening::found`].
    pub fn largest(&self, job: &Job<'_>, pool: &mut Pool, screening: &mut Screening) {
        let (vocab, n) = (self.scales.len(), job.counts.len());
        if n == 0 {
            return screening.collect(0);
        }
        let width = job.xs.len() / n;
        take_apart(job, width, pool, &mut screening.digits);
        screening.searches.resize_with(n.max(screening.searches.len()), Search::default);
        for (search, count) in screening.searches.iter_mut().zip(job.counts) {
            search.begin(*count);
        }
        let searches = &screening.searches;
        let estimates = Estimates { screen: self, job, digits: &screening.digits };
        pool.run(vocab.div_ceil(TASK_ROWS), &|task| {
            let range = task * TASK_ROWS..((task + 1) * TASK_ROWS).min(vocab);
            with_scratch(|scratch| estimates.look(range, searches, scratch));
        });
        screening.collect(n);
        let (tasks, found) = (&screening.tasks, Disjoint::new(&mut screening.found));
        pool.run(tasks.len(), &|task| {
            let Candidates { row, found: range } = tasks[task].clone();
            let x = &job.xs[row * width..(row + 1) * width];
            // SAFETY: each task has candidates of its own.
            let candidates = unsafe { found.part(range) };
            with_scratch(|scratch| self.compute(job, x, candidates, scratch));
        });
    }

    /// The candidates' logits for a hidden row.
    fn compute(
        &self,
        job: &Job<'_>,
        x: &[f32],
        candidates: &mut [TokenLogit],
        scratch: &mut Scratch,
    ) {
        let Job { head, kernels, .. } = job;
        let Scratch { floats, more_floats, .. } = scratch;
        let neighbours =
            |a: &TokenLogit, b: &TokenLogit| a.id as usize / HEAD_ROWS == b.id as usize / HEAD_ROWS;
        for some in candidates.chunk_by_mut(neighbours) {
            let first = some[0].id as usize / HEAD_ROWS * HEAD_ROWS;
            let count = HEAD_ROWS.min(self.scales.len() - first);
            if some.len() * SHARE > count {
                floats.resize(count, 0.0);
                head.logits(kernels, first, count, x, more_floats, floats);
                for candidate in some {
                    candidate.logit = floats[candidate.id as usize - first];
                }
                continue;
            }
            for TokenLogit { id, logit } in some {
                let logit = std::slice::from_mut(logit);
                head.logits(kernels, *id as usize, 1, x, more_floats, logit);
            }
        }
    }
}

/// Estimated logits and how far they may be off.
struct Estimates<'a> {
    screen: &'a Screen,
    job: &'a Job<'a>,
    digits: &'a Digits,
}

impl Estimates<'_> {
    /// Factors of a head row's error and norm in the bound of its logit, where digits leave out so much.
    fn factors(&self, row: &DigitRow, left: f64) -> (f32, f32) {
        let rounding = rounding(self.screen.stride) * row.norm;
        ((row.norm + rounding) as f32 * UP, (left + rounding) as f32 * UP)
    }

    /// Estimates some of the vocabulary for all rows, those again as well as can be that this does not rule
    /// out, and tells each row's search what may be among its largest.
    fn look(&self, range: Range<usize>, searches: &[Search], scratch: &mut Scratch) {
        let Self { screen, digits, job } = *self;
        let (n, count, isa) = (job.counts.len(), range.len(), job.isa);
        let Scratch { sums: dots, floats: estimates, positions, candidates, .. } = scratch;
        let six = screen.six(isa, n);
        dots.resize(count * n.max(2), 0);
        if six.is_none() {
            screen::dots(isa, screen.rows(range.clone()), digits, &mut dots[..count * n]);
        }
        estimates.resize(count, 0.0);
        let scales = &screen.scales[range.clone()];
        let of_rows = six.map_or(&screen.of_rows, |six| &six.of_rows);
        let sums = &of_rows.sums[range.clone()];
        for (row, (of_row, search)) in digits.rows().iter().zip(searches).enumerate() {
            let (first, second, left) = match six {
                Some(six) => {
                    let (first, second) = dots[..2 * count].split_at_mut(count);
                    let head_rows = six.rows(range.clone(), screen.stride);
                    screen::six_dots(isa, head_rows, digits, row, [&mut *first, &mut *second]);
                    (&*first, Some(&*second), of_row.error)
                }
                None => (&dots[row * count..(row + 1) * count], None, of_row.first_error),
            };
            let products = Products { first, second, digits, row, scales, sums };
            job.kernels.estimate(&products, estimates);
            let bounds = of_rows.bounds(range.clone(), self.factors(of_row, left));
            let threshold = search.threshold();
            positions.clear();
            job.kernels.select_candidates(&bounds, threshold, estimates, positions);
            candidates.clear();
            let refined = positions.iter().map(|&j| {
                let known = six.is_none().then_some(first[j]);
                self.refined(row, range.start + j, known)
            });
            candidates.extend(refined.filter(|(_, estimate, bound)| {
                let is_below = estimate + bound < threshold;
                !is_below
            }));
            if !candidates.is_empty() {
                search.add(candidates.drain(..));
            }
        }
    }

    /// A token, its logit by both digits and the whole int8, and how far that may be off. The product with
    /// the first digits may be known.
    fn refined(&self, row: usize, token: usize, first: Option<i32>) -> (usize, f32, f32) {
        let Self { screen, digits, job } = *self;
        let head_row = screen.rows(token..token + 1);
        let [first, second] = screen::both_dots(job.isa, head_row, digits, row, first);
        let mut estimate = [0.0];
        let products = Products {
            first: &[first],
            second: Some(&[second]),
            digits,
            row,
            scales: &screen.scales[token..=token],
            sums: &screen.of_rows.sums[token..=token],
        };
        job.kernels.estimate(&products, &mut estimate);
        let of_row = &digits.rows()[row];
        let bounds = screen.of_rows.bounds(token..token + 1, self.factors(of_row, of_row.error));
        (token, estimate[0], bounds.at(0))
    }
}

/// Takes the hidden rows apart into digits.
fn take_apart(job: &Job<'_>, width: usize, pool: &mut Pool, digits: &mut Digits) {
    let Unfilled { first, second, rows, len, bits } =
        digits.begin(job.isa, job.counts.len(), width);
    let (first, second) = (Disjoint::new(first), Disjoint::new(second));
    let rows = Disjoint::new(rows);
    pool.run(job.counts.len(), &|r| {
        let x = &job.xs[r * width..(r + 1) * width];
        // SAFETY: each task writes its own row.
        unsafe {
            let (first, second) =
                (first.part(r * len..(r + 1) * len), second.part(r * len..(r + 1) * len));
            rows.part(r..r + 1)[0] = screen::split(x, bits, first, second);
        }
    });
    digits.end(job.isa);
}
