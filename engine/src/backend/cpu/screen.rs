//! Finding the largest logits without computing them all.
//!
//! A copy of the head in int8, half the bytes of f16, gives every logit up to an error that is known.
//! Only rows that may still be among the largest are then computed in full precision, by the same
//! kernels as ever: what is chosen is equal to the bit.
//!
//! With `w = s·q + e` (a head row and its int8) and `x = t·u + f` (a hidden row and its digits),
//!
//! ```text
//! w·x = s·t·(q·u) + s·q·f + e·x
//! |w·x − s·t·(q·u)| ≤ ‖s·q‖·‖f‖ + ‖e‖·‖x‖                       (Cauchy–Schwarz)
//! ```
//!
//! Hidden rows are taken apart into two digits. The first is multiplied by every head row, the second only
//! by those that the first, with its larger `f`, does not rule out.
//!
//! A logit computed in f32 is within `ROUNDING(len)·(‖s·q‖ + ‖e‖)·‖x‖` of `w·x`. A row is left out
//! if its upper bound is below the k-th largest of all lower bounds: k rows have larger logits.

mod search;
#[cfg(test)]
mod tests;

use std::ops::Range;

use rayon::prelude::*;

use self::search::Search;
use super::{
    disjoint::Disjoint,
    forward::{Scratch, with_scratch},
    head::{HEAD_ROWS, Head},
    pool::Pool,
};
use crate::{
    backend::TokenLogit,
    files::Dense,
    formats::memory::AlignedBytes,
    kernels::{
        Isa,
        float::FloatKernels,
        screen::{self, Bounds, DigitRow, Digits, Products, STRIDE, Unmade},
    },
};

/// Smallest vocabulary that is screened: below, all of it is soon computed.
const VOCAB_MIN: usize = 512;
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

/// The int8 copy of a head. // (vocab, stride)
pub struct Screen {
    rows: AlignedBytes, // of i8
    stride: usize,
    scales: Vec<f32>, // as in `OfRow`
    sums: Vec<i32>,
    errors: Vec<f32>,
    norms: Vec<f32>,
}

/// What is known of a row.
#[derive(Clone, Copy)]
pub(in crate::backend) struct OfRow {
    /// `w ≈ scale · int8`
    pub scale: f32,
    /// `Σ int8`
    sum: i32,
    /// `‖w − scale · int8‖`, rounded up.
    pub error: f32,
    /// `‖scale · int8‖`, rounded up.
    pub norm: f32,
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

/// Whether a matrix is large enough to be screened.
pub(in crate::backend) fn is_worth(dense: Dense<'_>) -> bool {
    dense.rows >= VOCAB_MIN && dense.cols <= screen::LEN_MAX
}

impl Screen {
    /// The copy of a matrix that is large enough to be worth one.
    pub fn of(dense: Dense<'_>) -> Option<Self> {
        if !is_worth(dense) {
            return None;
        }
        let stride = dense.cols.next_multiple_of(STRIDE);
        let mut rows = AlignedBytes::zeroed(dense.rows * stride);
        let of_rows: Vec<OfRow> = rows
            .par_chunks_exact_mut(stride)
            .enumerate()
            .map_init(
                || vec![0f32; dense.cols],
                |wide, (row, out)| {
                    dense.row(row, wide);
                    quantize(wide, out)
                },
            )
            .collect();
        Some(Self {
            rows,
            stride,
            scales: of_rows.iter().map(|row| row.scale).collect(),
            sums: of_rows.iter().map(|row| row.sum).collect(),
            errors: of_rows.iter().map(|row| row.error).collect(),
            norms: of_rows.iter().map(|row| row.norm).collect(),
        })
    }

    /// Bytes held.
    pub fn size_bytes(&self) -> usize {
        self.rows.len() + self.scales.len() * size_of::<OfRow>()
    }

    /// Whether so many of the largest logits are found faster than all.
    pub fn pays_for(&self, count: usize) -> bool {
        count.saturating_mul(SHARE) <= self.scales.len()
    }

    /// How far estimates of some logits may be off, by the factors of a hidden row.
    fn bounds(&self, range: Range<usize>, (by_error, by_norm): (f32, f32)) -> Bounds<'_> {
        let (errors, norms) = (&self.errors[range.clone()], &self.norms[range]);
        Bounds { errors, norms, by_error, by_norm }
    }

    fn rows(&self, range: Range<usize>) -> &[i8] {
        bytemuck::cast_slice(&self.rows[range.start * self.stride..range.end * self.stride])
    }

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

    /// Estimates some of the vocabulary for all rows, those again by both digits that the first do not
    /// rule out, and tells each row's search what may be among its largest.
    fn look(&self, range: Range<usize>, searches: &[Search], scratch: &mut Scratch) {
        let (count, screen, isa) = (range.len(), self.screen, self.job.isa);
        let Scratch { sums, floats: estimates, positions, candidates, .. } = scratch;
        sums.resize(self.job.counts.len() * count, 0);
        estimates.resize(count, 0.0);
        let head_rows = screen.rows(range.clone());
        screen::dots(isa, head_rows, self.digits, sums);
        let kernels = self.job.kernels;
        for (row, dots) in sums.chunks_exact(count).enumerate() {
            let products = Products {
                dots,
                digits: self.digits,
                row,
                scales: &screen.scales[range.clone()],
                sums: &screen.sums[range.clone()],
            };
            let (of_row, threshold) = (&self.digits.rows()[row], searches[row].threshold());
            let bounds = screen.bounds(range.clone(), self.factors(of_row, of_row.first_error));
            kernels.estimate(&products, estimates);
            positions.clear();
            kernels.leave_out(&bounds, threshold, estimates, positions);
            let bounds = screen.bounds(range.clone(), self.factors(of_row, of_row.error));
            candidates.clear();
            candidates.extend(positions.iter().filter_map(|&j| {
                let head_row = &head_rows[j * screen.stride..(j + 1) * screen.stride];
                let second = screen::second_dot(isa, head_row, self.digits, row);
                let (estimate, bound) = (products.refined(j, second), bounds.at(j));
                let is_below = estimate + bound < threshold;
                (!is_below).then_some((range.start + j, estimate, bound))
            }));
            if !candidates.is_empty() {
                searches[row].add(candidates.drain(..));
            }
        }
    }
}

/// Takes the hidden rows apart into digits.
fn take_apart(job: &Job<'_>, width: usize, pool: &mut Pool, digits: &mut Digits) {
    let Unmade { first, second, rows, len, bits } = digits.begin(job.isa, job.counts.len(), width);
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

/// More than the roundings on the way to a bound.
const UP: f32 = 1.0 + 1e-5;

/// `scale = max|w| / 127`, `int8 = round_half_even(w / scale)`, into `out`, whose rest stays zero.
pub(in crate::backend) fn quantize(w: &[f32], out: &mut [u8]) -> OfRow {
    let largest = w.iter().fold(0f32, |a, b| a.max(b.abs()));
    let scale = if largest > 0.0 { largest / 127.0 } else { 1.0 };
    let (mut error, mut norm, mut sum) = (0f64, 0f64, 0i32);
    for (q, w) in out.iter_mut().zip(w) {
        let nearest = screen::nearest((w / scale).clamp(-127.0, 127.0));
        let value = f64::from(nearest) * f64::from(scale);
        let left = f64::from(*w) - value;
        (error, norm, sum) = (error + left * left, norm + value * value, sum + nearest as i32);
        *q = nearest as i8 as u8;
    }
    OfRow { scale, sum, error: error.sqrt() as f32 * UP, norm: norm.sqrt() as f32 * UP }
}
