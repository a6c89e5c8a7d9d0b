//! Estimates logits from dot products of digits, and selects the rows that may matter. Plain loops that
//! the float kernels instantiate for each ISA.

use super::Digits;
use crate::sampling::GumbelNoise;

/// Elements that are checked together.
const TOGETHER: usize = 16;
/// Smallest exponent of a weight: smaller weights count as much.
const EXPONENT_MIN: f32 = -125.0;
/// Factor greater than the roundings of exponents, which change a weight by 2e-5 at most, and of the sum.
const WEIGHT_ROUND_UP: f32 = 1.0 + 1e-3;
/// Factor greater than the roundings of a token's noise in f32.
const NOISE_ROUND_UP: f32 = 1.0 + 1e-5;

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
        self.bound(self.errors[j], self.norms[j])
    }

    #[inline(always)]
    fn bound(&self, error: f32, norm: f32) -> f32 {
        self.by_error * error + self.by_norm * norm
    }
}

/// Returns a number that is at least `2ˣ`, without its rounding, for `x ≤ 0`.
///
/// The value of an f32 with the bits `2²³ · (x + 127)` is at least `2ˣ`, as `1 + m ≥ 2ᵐ` for a mantissa `m`.
#[inline(always)]
fn weight(x: f32) -> f32 {
    let bits = ((x.max(EXPONENT_MIN) + 127.0) * (1 << 23) as f32) as i32;
    f32::from_bits(bits as u32)
}

/// Returns an upper bound of `Σ exp((upper − threshold) / temperature)` over the estimates with an upper bound below the
/// threshold. `per_unit` is at most `1 / (ln 2 · temperature)`.
#[inline(always)]
pub fn weigh_below(bounds: &Bounds<'_>, threshold: f32, per_unit: f32, estimates: &[f32]) -> f32 {
    let count = estimates.len();
    let (errors, norms) = (&bounds.errors[..count], &bounds.norms[..count]);
    let weight = |estimate: f32, error: f32, norm: f32| {
        let upper = estimate + bounds.bound(error, norm);
        let weight = weight((upper - threshold) * per_unit);
        if upper < threshold { weight } else { 0.0 }
    };
    let mut sums = [0f32; TOGETHER];
    let (parts, rest) = estimates.as_chunks::<TOGETHER>();
    let of_rows = errors.as_chunks::<TOGETHER>().0.iter().zip(norms.as_chunks::<TOGETHER>().0);
    for (estimates, (errors, norms)) in parts.iter().zip(of_rows) {
        for i in 0..TOGETHER {
            sums[i] += weight(estimates[i], errors[i], norms[i]);
        }
    }
    let first = count - rest.len();
    let of_rest = (first..count).map(|j| weight(estimates[j], errors[j], norms[j]));
    (sums.iter().sum::<f32>() + of_rest.sum::<f32>()) * WEIGHT_ROUND_UP
}

/// Upper bounds of the scaled noise of a range of tokens.
#[derive(Debug, Clone, Copy)]
pub struct RangeNoise {
    noise: GumbelNoise,
    /// The temperature, rounded up by more than the roundings of the product and of the sum with a logit.
    temperature: f32,
    first: u32,
}

impl RangeNoise {
    /// Returns the noise of the tokens from `first` on.
    pub fn new(noise: GumbelNoise, first: usize) -> Self {
        let temperature = noise.temperature * NOISE_ROUND_UP;
        Self { noise, temperature, first: first as u32 }
    }

    /// Returns the bound of the range's `j`-th token; at least 0.
    #[inline(always)]
    fn upper(&self, j: usize) -> f32 {
        self.temperature * self.noise.upper_of_token(self.first.wrapping_add(j as u32))
    }
}

/// Returns an estimate of the logit of one head row, from that with the first digit and the product with the second.
pub fn with_second(
    digits: &Digits,
    row: usize,
    first: f32,
    second: i32,
    (scale, sum): (f32, i32),
) -> f32 {
    first + left(digits.half(), second, sum) * (scale * digits.rows()[row].step)
}

/// Returns the product with digits, from that with unsigned ones. The difference is below 2^31, so wrapping in between is
/// harmless.
#[inline(always)]
fn left(half: i32, dot: i32, sum: i32) -> f32 {
    dot.wrapping_sub(half.wrapping_mul(sum)) as f32
}

/// Writes estimates of the logits to `out`.
#[inline(always)]
pub fn estimate(of: &Products<'_>, out: &mut [f32]) {
    let count = out.len();
    let (half, step) = (of.digits.half(), of.digits.rows()[of.row].step);
    let first_step = step * (1 << of.digits.bits()) as f32;
    let (scales, sums, first) = (&of.scales[..count], &of.sums[..count], &of.first[..count]);
    for j in 0..count {
        out[j] = left(half, first[j], sums[j]) * (scales[j] * first_step);
    }
    if let Some(second) = of.second.map(|second| &second[..count]) {
        for j in 0..count {
            out[j] += left(half, second[j], sums[j]) * (scales[j] * step);
        }
    }
}

/// Adds to `candidates` the indices of the estimates with an upper bound that is not below the threshold,
/// NaN included. With noise, its upper bound is added to each.
#[inline(always)]
pub fn select_candidates(
    bounds: &Bounds<'_>,
    noise: Option<&RangeNoise>,
    threshold: f32,
    estimates: &[f32],
    candidates: &mut Vec<usize>,
) {
    match noise {
        None => select(bounds, estimates, candidates, |_, upper| upper < threshold),
        Some(noise) => {
            select(bounds, estimates, candidates, |j, upper| upper + noise.upper(j) < threshold);
        }
    }
}

#[inline(always)]
fn select(
    bounds: &Bounds<'_>,
    estimates: &[f32],
    candidates: &mut Vec<usize>,
    is_below: impl Fn(usize, f32) -> bool,
) {
    let count = estimates.len();
    let (errors, norms) = (&bounds.errors[..count], &bounds.norms[..count]);
    let is_below = |j: usize, estimate: f32, error: f32, norm: f32| {
        is_below(j, estimate + bounds.bound(error, norm))
    };
    let (parts, _) = estimates.as_chunks::<TOGETHER>();
    let of_rows = errors.as_chunks::<TOGETHER>().0.iter().zip(norms.as_chunks::<TOGETHER>().0);
    for (part, (estimates, (errors, norms))) in parts.iter().zip(of_rows).enumerate() {
        let start = part * TOGETHER;
        // Nearly always all are below, so one check covers the group.
        let mut all = true;
        for i in 0..TOGETHER {
            all &= is_below(start + i, estimates[i], errors[i], norms[i]);
        }
        if all {
            continue;
        }
        for i in 0..TOGETHER {
            if !is_below(start + i, estimates[i], errors[i], norms[i]) {
                candidates.push(start + i);
            }
        }
    }
    for j in parts.len() * TOGETHER..count {
        if !is_below(j, estimates[j], errors[j], norms[j]) {
            candidates.push(j);
        }
    }
}
