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
        screen::{self, Bounds, DigitRow, Digits, Products, STRIDE, Unmade, six},
    },
};

/// Smallest vocabulary that is screened: below, all of it is soon computed.
const VOCAB_MIN: usize = 512;
/// Largest share of the vocabulary that may be asked for, and of candidates before a row of logits is
/// computed as a whole.
pub(in crate::backend) const SHARE: usize = 8;
/// Rows of the head that a task estimates.
const TASK_ROWS: usize = 192;
/// Hidden rows up to which six bits are multiplied first, by both digits. With two, that takes as long as
/// it saves.
const FEW: usize = 1;
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
    scales: Vec<f32>,
    of_rows: OfRows,
    /// Where a kernel makes use of them.
    six: Option<Six>,
}

/// The high six bits of the copy. // (vocab, six::size(stride))
struct Six {
    rows: AlignedBytes,
    of_rows: OfRows,
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

/// As in [`OfRow`], of all rows.
struct OfRows {
    sums: Vec<i32>,
    errors: Vec<f32>,
    norms: Vec<f32>,
}

impl OfRows {
    fn new(rows: &[OfRow]) -> Self {
        Self {
            sums: rows.iter().map(|row| row.sum).collect(),
            errors: rows.iter().map(|row| row.error).collect(),
            norms: rows.iter().map(|row| row.norm).collect(),
        }
    }

    fn size_bytes(&self) -> usize {
        self.sums.len() * (size_of::<OfRow>() - size_of::<f32>())
    }

    /// How far estimates of some logits may be off, by the factors of a hidden row.
    fn bounds(&self, range: Range<usize>, (by_error, by_norm): (f32, f32)) -> Bounds<'_> {
        let (errors, norms) = (&self.errors[range.clone()], &self.norms[range]);
        Bounds { errors, norms, by_error, by_norm }
    }
}

impl Six {
    /// The bits of an int8 copy `(vocab, stride)` of a head.
    fn of(dense: Dense<'_>, int8: &[u8], stride: usize, scales: &[f32]) -> Self {
        let mut rows = AlignedBytes::zeroed(six::size(int8.len()));
        let packed =
            rows.par_chunks_exact_mut(six::size(stride)).zip(int8.par_chunks_exact(stride));
        let of_rows: Vec<OfRow> = packed
            .enumerate()
            .map_init(
                || vec![0f32; dense.cols],
                |wide, (row, (out, int8))| {
                    let int8: &[i8] = bytemuck::cast_slice(int8);
                    six::pack(int8, out);
                    dense.row(row, wide);
                    of_row(wide, int8.iter().map(|&element| six::rounded(element)), scales[row])
                },
            )
            .collect();
        Self { rows, of_rows: OfRows::new(&of_rows) }
    }

    fn rows(&self, range: Range<usize>, stride: usize) -> &[u8] {
        let bytes = six::size(stride);
        &self.rows[range.start * bytes..range.end * bytes]
    }
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
        let scales: Vec<f32> = of_rows.iter().map(|row| row.scale).collect();
        let six = screen::machine_has_six().then(|| Six::of(dense, &rows, stride, &scales));
        Some(Self { rows, stride, scales, of_rows: OfRows::new(&of_rows), six })
    }

    /// Bytes held.
    pub fn size_bytes(&self) -> usize {
        let six = self.six.as_ref().map_or(0, |six| six.rows.len() + six.of_rows.size_bytes());
        self.rows.len() + self.scales.len() * 4 + self.of_rows.size_bytes() + six
    }

    /// Bytes read to estimate all logits of one hidden row.
    pub fn step_bytes(&self, isa: Isa) -> usize {
        let rows = self.six(isa, 1).map_or(&self.rows, |six| &six.rows);
        rows.len() + self.scales.len() * 4 + self.of_rows.size_bytes()
    }

    /// The bits that so many hidden rows are multiplied by first.
    fn six(&self, isa: Isa, n: usize) -> Option<&Six> {
        self.six.as_ref().filter(|_| n <= FEW && screen::has_six(isa))
    }

    /// Whether so many of the largest logits are found faster than all.
    pub fn pays_for(&self, count: usize) -> bool {
        count.saturating_mul(SHARE) <= self.scales.len()
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
            job.kernels.leave_out(&bounds, threshold, estimates, positions);
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
    for (q, w) in out.iter_mut().zip(w) {
        *q = screen::nearest((w / scale).clamp(-127.0, 127.0)) as i8 as u8;
    }
    of_row(w, out.iter().map(|&q| q as i8), scale)
}

/// What is known of a row of which `scale · int8` are held.
fn of_row(w: &[f32], int8: impl Iterator<Item = i8>, scale: f32) -> OfRow {
    let (mut error, mut norm, mut sum) = (0f64, 0f64, 0i32);
    for (w, q) in w.iter().zip(int8) {
        let value = f64::from(q) * f64::from(scale);
        let left = f64::from(*w) - value;
        (error, norm, sum) = (error + left * left, norm + value * value, sum + i32::from(q));
    }
    OfRow { scale, sum, error: error.sqrt() as f32 * UP, norm: norm.sqrt() as f32 * UP }
}
