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
//! and a logit computed in f32 is within `ROUNDING(len)·(‖s·q‖ + ‖e‖)·‖x‖` of `w·x`. A row is left out
//! if its upper bound is below the k-th largest of all lower bounds: k rows have larger logits.

use std::{
    ops::Range,
    sync::atomic::{AtomicUsize, Ordering},
};

use rayon::prelude::*;

use super::{
    disjoint::Disjoint,
    forward::{Scratch, with_scratch},
    head::{HEAD_ROWS, Head},
    pool::Pool,
};
use crate::{
    files::Dense,
    formats::memory::AlignedBytes,
    kernels::{
        Isa,
        float::FloatKernels,
        screen::{self, Bounds, Digits, Products, STRIDE},
    },
};

/// Smallest vocabulary that is screened: below, all of it is soon computed.
const VOCAB_MIN: usize = 512;
/// Largest share of the vocabulary that may be asked for, and of candidates before a row of logits is
/// computed as a whole.
const SHARE: usize = 8;
/// Hidden rows from which one digit is enough: more candidates, half the products.
const ONE_DIGIT_ROWS: usize = 4;
/// Share of the vocabulary, above which candidates cost more than a second digit.
const ONE_DIGIT_SHARE: usize = 64;
/// Rows of the head that a task looks through.
const LOOK_ROWS: usize = 4096;

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
struct OfRow {
    /// `w ≈ scale · int8`
    scale: f32,
    /// `Σ int8`
    sum: i32,
    /// `‖w − scale · int8‖`, rounded up.
    error: f32,
    /// `‖scale · int8‖`, rounded up.
    norm: f32,
}

/// Kept between steps.
#[derive(Default)]
pub struct Screening {
    digits: Digits,
    thresholds: Vec<f32>,
    lowest: Vec<f32>, // (rows, tasks)
    /// One digit left too many candidates once: from then on two are used.
    coarse: bool,
}

/// A row of logits of which the largest are wanted.
#[derive(Debug, Clone, Copy)]
pub struct TopRow {
    /// Row of the output.
    pub output: usize,
    /// How many of the largest logits count.
    pub count: usize,
}

/// What the rows of a step have in common.
pub struct Job<'a> {
    pub head: &'a Head,
    pub kernels: &'a FloatKernels,
    pub isa: Isa,
    /// The hidden rows, normed. // (rows, hidden)
    pub xs: &'a [f32],
    pub rows: &'a [TopRow],
}

impl Screen {
    /// The copy of a matrix that is large enough to be worth one.
    pub fn of(dense: Dense<'_>) -> Option<Self> {
        let (stride, fits) = (dense.cols.next_multiple_of(STRIDE), dense.cols <= screen::LEN_MAX);
        if dense.rows < VOCAB_MIN || !fits {
            return None;
        }
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

    /// Writes the logits that may be among the `count` largest of each row to `out` `(…, vocab)`, and
    /// −∞ for all others.
    pub fn largest(
        &self,
        job: &Job<'_>,
        pool: &mut Pool,
        screening: &mut Screening,
        out: &mut [f32],
    ) {
        let (vocab, n) = (self.scales.len(), job.rows.len());
        if n == 0 {
            return;
        }
        let digits = if n < ONE_DIGIT_ROWS || screening.coarse { 2 } else { 1 };
        let width = job.xs.len() / n;
        screening.digits.set(job.isa, job.xs, width, digits);
        let tasks = vocab.div_ceil(HEAD_ROWS);
        screening.lowest.resize(n * tasks, 0.0);
        let (all, lowest) = (Disjoint::new(out), Disjoint::new(&mut screening.lowest));
        let estimates = Estimates { screen: self, job, digits: &screening.digits };
        pool.run(tasks, &|task| {
            let range = task * HEAD_ROWS..((task + 1) * HEAD_ROWS).min(vocab);
            with_scratch(|scratch| {
                estimates.of_task(range.clone(), scratch, |row, estimate| {
                    let start = job.rows[row].output * vocab;
                    // SAFETY: each task writes its own columns, and a place of its own.
                    unsafe {
                        let out = all.part(start + range.start..start + range.end);
                        lowest.part(row * tasks + task..row * tasks + task + 1)[0] = estimate(out);
                    }
                });
            });
        });
        screening.thresholds.resize(n, 0.0);
        let thresholds = Disjoint::new(&mut screening.thresholds);
        let lowest = &screening.lowest;
        pool.run(n, &|row| {
            let TopRow { output, count } = job.rows[row];
            // SAFETY: each task reads and writes what belongs to its row.
            let (logits, threshold) = unsafe {
                (all.part(output * vocab..(output + 1) * vocab), thresholds.part(row..row + 1))
            };
            threshold[0] = match count {
                0 | 1 => {
                    let of_row = &lowest[row * tasks..(row + 1) * tasks];
                    of_row.iter().fold(f32::NEG_INFINITY, |a, b| a.max(*b))
                }
                _ => with_scratch(|scratch| {
                    estimates.kth_lowest(row, logits, count, &mut scratch.floats)
                }),
            };
        });
        let (thresholds, candidates) = (&screening.thresholds, AtomicUsize::new(0));
        let looks = vocab.div_ceil(LOOK_ROWS);
        pool.run(n * looks, &|task| {
            let (row, look) = (task / looks, task % looks);
            let range = look * LOOK_ROWS..((look + 1) * LOOK_ROWS).min(vocab);
            let start = job.rows[row].output * vocab;
            // SAFETY: each task has columns of its own.
            let logits = unsafe { all.part(start + range.start..start + range.end) };
            let found = with_scratch(|scratch| {
                estimates.settle(row, range, thresholds[row], logits, scratch)
            });
            candidates.fetch_add(found, Ordering::Relaxed);
        });
        if digits == 1 && candidates.into_inner() > n * vocab / ONE_DIGIT_SHARE {
            screening.coarse = true;
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
    /// Factors of a head row's error and norm in the bound of its logit.
    fn factors(&self, row: usize) -> (f32, f32) {
        let x = self.digits.rows()[row];
        let rounding = rounding(self.screen.stride) * x.norm;
        ((x.norm + rounding) as f32 * UP, (x.error + rounding) as f32 * UP)
    }

    /// Estimates some of the vocabulary for all rows: gives each row what writes its estimates and
    /// returns the largest of their lower bounds.
    fn of_task(
        &self,
        range: Range<usize>,
        scratch: &mut Scratch,
        mut give: impl FnMut(usize, &dyn Fn(&mut [f32]) -> f32),
    ) {
        let (count, digits, screen) = (range.len(), self.digits.count(), self.screen);
        let sums = &mut scratch.sums;
        sums.resize(self.job.rows.len() * digits * count, 0);
        screen::dots(self.job.isa, screen.rows(range.clone()), self.digits, sums);
        for (row, dots) in sums.chunks_exact(digits * count).enumerate() {
            let products = Products {
                dots,
                digits: self.digits,
                row,
                scales: &screen.scales[range.clone()],
                sums: &screen.sums[range.clone()],
            };
            let bounds = screen.bounds(range.clone(), self.factors(row));
            give(row, &|out| self.job.kernels.estimate(&products, &bounds, out));
        }
    }

    /// The `count`-th largest lower bound of a row.
    fn kth_lowest(&self, row: usize, estimates: &[f32], count: usize, lower: &mut Vec<f32>) -> f32 {
        let bounds = self.screen.bounds(0..estimates.len(), self.factors(row));
        lower.clear();
        lower.extend(estimates.iter().enumerate().map(|(j, estimate)| {
            let bound = estimate - bounds.at(j);
            if bound.is_nan() { f32::NEG_INFINITY } else { bound }
        }));
        let place = count.min(lower.len()) - 1;
        *lower.select_nth_unstable_by(place, |a, b| b.total_cmp(a)).1
    }

    /// Turns estimates of a row into logits where they may be among the largest, and into −∞
    /// elsewhere. Returns how many it computed.
    fn settle(
        &self,
        row: usize,
        range: Range<usize>,
        threshold: f32,
        logits: &mut [f32],
        scratch: &mut Scratch,
    ) -> usize {
        let bounds = self.screen.bounds(range.clone(), self.factors(row));
        let Job { head, kernels, xs, rows, .. } = self.job;
        let width = xs.len() / rows.len();
        let x = &xs[row * width..(row + 1) * width];
        let Scratch { positions, more_floats, .. } = scratch;
        positions.clear();
        kernels.leave_out(&bounds, threshold, logits, positions);
        if positions.len() * SHARE > range.len() {
            head.logits(kernels, range.start, range.len(), x, more_floats, logits);
            return positions.len();
        }
        for j in positions.iter() {
            let logit = &mut logits[*j..j + 1];
            head.logits(kernels, range.start + j, 1, x, more_floats, logit);
        }
        positions.len()
    }
}

/// More than the roundings on the way to a bound.
const UP: f32 = 1.0 + 1e-5;

/// `scale = max|w| / 127`, `int8 = round_half_even(w / scale)`, into `out`, whose rest stays zero.
fn quantize(w: &[f32], out: &mut [u8]) -> OfRow {
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

#[cfg(test)]
mod tests {
    use super::{super::head::HeadMode, *};
    use crate::files::DenseType;

    const VOCAB: usize = 700;
    const WIDTH: usize = 100;

    fn wave(i: usize) -> f32 {
        ((i.wrapping_mul(i).wrapping_mul(40_503) >> 7) % 2001) as f32 / 1000.0 - 1.0
    }

    fn head(weights: &[f32], mode: HeadMode) -> Head {
        let bytes = bytemuck::cast_slice(weights);
        Head::of(Dense { dtype: DenseType::F32, rows: VOCAB, cols: WIDTH, bytes }, mode, || {})
    }

    /// Logits of all rows, and those the screen leaves when so many of the largest are asked for.
    fn both(isa: Isa, weights: &[f32], xs: &[f32], count: usize) -> (Vec<f32>, Vec<f32>) {
        let n = xs.len() / WIDTH;
        let kernels = FloatKernels::of(isa).expect("asked for those that are there");
        let (head, mut scratch) = (head(weights, HeadMode::Exact), Vec::new());
        let mut whole = vec![0.0; n * VOCAB];
        for (x, logits) in xs.chunks_exact(WIDTH).zip(whole.chunks_exact_mut(VOCAB)) {
            head.logits(kernels, 0, VOCAB, x, &mut scratch, logits);
        }
        let mut screened = vec![7.0; n * VOCAB];
        let rows: Vec<TopRow> = (0..n).map(|output| TopRow { output, count }).collect();
        let job = Job { head: &head, kernels, isa, xs, rows: &rows };
        let screen = head.screen().expect("the vocabulary is large enough");
        let (mut pool, mut screening) = (Pool::new(2), Screening::default());
        screen.largest(&job, &mut pool, &mut screening, &mut screened);
        (whole, screened)
    }

    /// Checks every row; returns how many logits were computed.
    fn check(isa: Isa, weights: &[f32], xs: &[f32], count: usize) -> usize {
        let (whole, screened) = both(isa, weights, xs, count);
        let mut computed = 0;
        for (whole, screened) in whole.chunks_exact(VOCAB).zip(screened.chunks_exact(VOCAB)) {
            let mut sorted = whole.to_vec();
            sorted.sort_by(|a, b| b.total_cmp(a));
            for (token, (exact, found)) in whole.iter().zip(screened).enumerate() {
                if found.to_bits() == exact.to_bits() {
                    computed += 1;
                    continue;
                }
                assert_eq!(*found, f32::NEG_INFINITY, "token {token}");
                assert!(*exact < sorted[count - 1], "token {token} is among the {count} largest");
            }
        }
        computed
    }

    fn isas() -> impl Iterator<Item = Isa> {
        Isa::ALL.into_iter().filter(|isa| isa.is_available())
    }

    #[test]
    fn the_largest_are_there_to_the_bit_and_most_others_are_not_computed() {
        let weights: Vec<f32> = (0..VOCAB * WIDTH).map(wave).collect();
        for (isa, n, count) in
            isas().flat_map(|isa| [(isa, 1, 1), (isa, 3, 20), (isa, 9, 1), (isa, 9, 20)])
        {
            let xs: Vec<f32> = (0..n * WIDTH).map(|i| wave(i + 31) * 3.0).collect();
            let computed = check(isa, &weights, &xs, count);
            assert!(computed < n * (count + VOCAB / 8), "{isa}, {n} rows, {count}: {computed}");
        }
    }

    #[test]
    fn equal_logits_are_all_there() {
        let weights: Vec<f32> = (0..VOCAB * WIDTH).map(|i| wave(i % (50 * WIDTH))).collect();
        for isa in isas() {
            let xs: Vec<f32> = (0..5 * WIDTH).map(|i| wave(i + 7)).collect();
            // Every logit comes fourteen times.
            assert!(check(isa, &weights, &xs, 1) >= 5 * 14);
            check(isa, &weights, &xs, 20);
        }
    }

    #[test]
    fn outliers_zeros_and_what_is_no_number_change_nothing() {
        for isa in isas() {
            let mut weights: Vec<f32> = (0..VOCAB * WIDTH).map(wave).collect();
            weights[3 * WIDTH..4 * WIDTH].fill(0.0);
            weights[5 * WIDTH + 3] = 1e6;
            weights[6 * WIDTH + 3] = f32::NAN;
            weights[7 * WIDTH + 9] = f32::INFINITY;
            let mut xs: Vec<f32> = (0..6 * WIDTH).map(|i| wave(i + 11)).collect();
            xs[WIDTH..2 * WIDTH].fill(0.0);
            xs[2 * WIDTH + 1] = 1e9;
            xs[3 * WIDTH + 1] = f32::NAN;
            xs[4 * WIDTH + 1] = f32::INFINITY;
            let (whole, screened) = both(isa, &weights, &xs, 1);
            for (token, (whole, screened)) in whole.iter().zip(&screened).enumerate() {
                let same =
                    whole.to_bits() == screened.to_bits() || whole.is_nan() && screened.is_nan();
                assert!(same || *screened == f32::NEG_INFINITY, "token {token}");
                assert!(same || !whole.is_nan(), "token {token}");
            }
            for (whole, screened) in whole.chunks_exact(VOCAB).zip(screened.chunks_exact(VOCAB)) {
                let largest = |logits: &[f32]| logits.iter().fold(f32::MIN, |a, b| a.max(*b));
                assert_eq!(largest(whole).to_bits(), largest(screened).to_bits());
            }
        }
    }
}
