//! Estimates logits from dot products of digits, and selects the rows that may matter. Plain loops that
//! the float kernels instantiate for each ISA.

use super::Digits;

/// Elements that are checked together.
const TOGETHER: usize = 16;

/// Dot products of a row's digits with some head rows.
pub struct Products<'a> {
    /// Products of the first digits. // (head row,)
    pub first: &'a [i32],
    /// Products of the second digits, if they were multiplied. // (head row,)
    pub second: Option<&'a [i32]>,
    /// The digits.
    pub digits: &'a Digits,
    /// Row of the digits.
    pub row: usize,
    /// `w ≈ scale · int8` of each head row.
    pub scales: &'a [f32],
    /// `Σ int8` of each head row.
    pub sums: &'a [i32],
}

/// Bounds on the errors of estimates: `by_error · error + by_norm · norm`.
pub struct Bounds<'a> {
    /// Norm of the quantization error of each head row.
    pub errors: &'a [f32],
    /// Norm of each quantized head row.
    pub norms: &'a [f32],
    /// Factor for errors, from the hidden row.
    pub by_error: f32,
    /// Factor for norms, from the hidden row.
    pub by_norm: f32,
}

impl Bounds<'_> {
    /// Returns the bound of head row `j`.
    pub fn at(&self, j: usize) -> f32 {
        self.of(self.errors[j], self.norms[j])
    }

    #[inline(always)]
    fn of(&self, error: f32, norm: f32) -> f32 {
        self.by_error * error + self.by_norm * norm
    }

    /// Returns the errors and norms of the first `count` head rows, in groups.
    #[inline(always)]
    fn together(&self, count: usize) -> impl Iterator<Item = (&[f32], &[f32])> {
        self.errors[..count].chunks(TOGETHER).zip(self.norms[..count].chunks(TOGETHER))
    }
}

/// Writes estimates of the logits to `out`.
#[inline(always)]
pub fn estimate(of: &Products<'_>, out: &mut [f32]) {
    let count = out.len();
    let (half, step) = (of.digits.half(), of.digits.rows()[of.row].step);
    let first_step = step * (1 << of.digits.bits()) as f32;
    let (scales, sums, first) = (&of.scales[..count], &of.sums[..count], &of.first[..count]);
    // The difference is below 2^31, so wrapping in between is harmless.
    let left = |dot: i32, sum: i32| dot.wrapping_sub(half.wrapping_mul(sum)) as f32;
    for j in 0..count {
        out[j] = left(first[j], sums[j]) * (scales[j] * first_step);
    }
    if let Some(second) = of.second.map(|second| &second[..count]) {
        for j in 0..count {
            out[j] += left(second[j], sums[j]) * (scales[j] * step);
        }
    }
}

/// Adds to `candidates` the indices of the estimates with an upper bound that is not below the threshold,
/// NaN included.
#[inline(always)]
pub fn select_candidates(
    bounds: &Bounds<'_>,
    threshold: f32,
    estimates: &[f32],
    candidates: &mut Vec<usize>,
) {
    let count = estimates.len();
    let parts = estimates.chunks(TOGETHER).zip(bounds.together(count));
    for (part, (estimates, (errors, norms))) in parts.enumerate() {
        let is_below = |estimate: f32, (error, norm): (&f32, &f32)| {
            estimate + bounds.of(*error, *norm) < threshold
        };
        let of_rows = || errors.iter().zip(norms);
        // Nearly always all are below, so one check covers the group.
        let all =
            estimates.iter().zip(of_rows()).fold(true, |all, (e, row)| all & is_below(*e, row));
        if all {
            continue;
        }
        for (j, (estimate, row)) in estimates.iter().zip(of_rows()).enumerate() {
            if !is_below(*estimate, row) {
                candidates.push(part * TOGETHER + j);
            }
        }
    }
}
