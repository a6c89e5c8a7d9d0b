//! The floating-point steps of a forward pass, generic over the lanes. Every function fixes its order
//! of operations, so that all ISAs give equal bits.

use super::lanes::{Element, F16_MAX, LANES, Lanes};
use crate::kernels::{Digits, SCALED_INPUTS};
use half::f16;

/// `out = weight ⊙ (x · 1/√(mean(x²) + eps))`; all slices have the same length.
///
/// # Safety
/// The lanes' ISA must be available (as for every function here).
#[inline(always)]
pub unsafe fn rms_norm<L: Lanes>(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    assert!(x.len() == weight.len() && x.len() == out.len());
    let whole = x.len() / LANES * LANES;
    let rest = x.len() - whole;
    // SAFETY: every pointer is within its slice: steps of LANES up to `whole`, then `rest` more.
    unsafe {
        let mut squares = L::splat(0.0);
        for i in (0..whole).step_by(LANES) {
            let v = L::load(x.as_ptr().add(i));
            squares = v.mul_add(v, squares);
        }
        if rest > 0 {
            let v = L::load_first(x.as_ptr().add(whole), rest);
            squares = v.mul_add(v, squares);
        }
        let mean = squares.sum() / x.len() as f32;
        let inverse = 1.0 / (mean + eps).sqrt();
        let factor = L::splat(inverse);
        for i in (0..whole).step_by(LANES) {
            let v = L::load(x.as_ptr().add(i)).mul(factor);
            L::load(weight.as_ptr().add(i)).mul(v).store(out.as_mut_ptr().add(i));
        }
        for i in whole..x.len() {
            out[i] = weight[i] * (x[i] * inverse);
        }
    }
}

/// Per-token int8 quantization (BitNet b1.58): `s = 127 / max(1e-5, max|x|)`,
/// `q = clamp(round_half_even(x · s), −128, 127)`. Returns `s`.
///
/// # Safety
/// As for [`rms_norm`].
#[inline(always)]
pub unsafe fn quantize<L: Lanes>(x: &[f32], q: &mut [i8]) -> f32 {
    assert!(x.len() == q.len());
    let whole = x.len() / LANES * LANES;
    // SAFETY: every pointer is within its slice, in steps of LANES up to `whole`.
    unsafe {
        let mut largest = [L::splat(0.0); 4];
        let fours = whole / (4 * LANES) * 4 * LANES;
        for i in (0..fours).step_by(4 * LANES) {
            for (n, largest) in largest.iter_mut().enumerate() {
                *largest = L::load(x.as_ptr().add(i + n * LANES)).abs().max(*largest);
            }
        }
        for i in (fours..whole).step_by(LANES) {
            largest[0] = L::load(x.as_ptr().add(i)).abs().max(largest[0]);
        }
        let [a, b, c, d] = largest;
        let mut largest = a.max(b).max(c.max(d)).max_lane();
        for &v in &x[whole..] {
            let v = v.abs();
            largest = if v > largest { v } else { largest };
        }
        let s = 127.0 / if largest > 1e-5 { largest } else { 1e-5 };
        let factor = L::splat(s);
        let (low, high) = (L::splat(-128.0), L::splat(127.0));
        for i in (0..whole).step_by(LANES) {
            let v = L::load(x.as_ptr().add(i)).mul(factor).min(high).max(low);
            v.store_i8(q.as_mut_ptr().add(i));
        }
        for i in whole..x.len() {
            let v = x[i] * s;
            let v = if v < 127.0 { v } else { 127.0 };
            let v = if v > -128.0 { v } else { -128.0 };
            q[i] = v.round_ties_even() as i8;
        }
        s
    }
}

/// Quantizes a row to digits with a scale for each [`SCALED_INPUTS`] inputs: see `kernels::group_activations`.
/// // x: (cols), q: (digits, cols), scales: (cols / SCALED_INPUTS, rounded up)
///
/// # Safety
/// As for [`rms_norm`].
#[inline(always)]
pub unsafe fn quantize_groups<L: Lanes>(
    x: &[f32],
    digits: Digits,
    q: &mut [i8],
    scales: &mut [f32],
) {
    assert!(x.len().is_multiple_of(LANES) && q.len() == digits.count() * x.len());
    assert!(scales.len() == x.len().div_ceil(SCALED_INPUTS));
    let (high, low) = q.split_at_mut((digits.count() - 1) * x.len());
    let limit = digits.limit();
    // As the reference, one digit may be −128, which no quotient rounds to but for NaN and infinity.
    let least = if digits == Digits::One { -128.0 } else { -limit };
    // SAFETY: every pointer is within its slice, in steps of LANES.
    unsafe {
        for (group, scale) in scales.iter_mut().enumerate() {
            let start = group * SCALED_INPUTS;
            let end = (start + SCALED_INPUTS).min(x.len());
            let mut largest = L::splat(1e-5);
            for i in (start..end).step_by(LANES) {
                largest = L::load(x.as_ptr().add(i)).abs().max(largest);
            }
            *scale = largest.max_lane() / limit;
            let divisor = L::splat(*scale);
            for i in (start..end).step_by(LANES) {
                let v = L::load(x.as_ptr().add(i)).div(divisor);
                let v = v.min(L::splat(limit)).max(L::splat(least)).round();
                if digits == Digits::One {
                    v.store_i8(low.as_mut_ptr().add(i));
                    continue;
                }
                // ⌊(v + 128) / 256⌋: with a quarter more, no quotient is a tie.
                let h = v.add(L::splat(0.25)).mul(L::splat(1.0 / 256.0)).round();
                h.store_i8(high.as_mut_ptr().add(i));
                h.mul_add(L::splat(-256.0), v).store_i8(low.as_mut_ptr().add(i));
            }
        }
    }
}

/// Clamps to the range of f16; NaN becomes the upper end.
///
/// # Safety
/// As for [`rms_norm`].
#[inline(always)]
unsafe fn saturated<L: Lanes>(v: L) -> L {
    // SAFETY: the caller has the ISA.
    unsafe { v.min(L::splat(F16_MAX)).max(L::splat(-F16_MAX)) }
}

/// [`saturated`] for one number.
#[inline(always)]
fn saturated_one(v: f32) -> f32 {
    let v = if v < F16_MAX { v } else { F16_MAX };
    if v > -F16_MAX { v } else { -F16_MAX }
}

/// Narrows to f16, rounding to nearest even and saturating at ±65504.
///
/// # Safety
/// As for [`rms_norm`].
#[inline(always)]
pub unsafe fn narrow<L: Lanes>(x: &[f32], out: &mut [f16]) {
    assert!(x.len() == out.len());
    let whole = x.len() / LANES * LANES;
    // SAFETY: every pointer is within its slice, in steps of LANES up to `whole`.
    unsafe {
        for i in (0..whole).step_by(LANES) {
            saturated(L::load(x.as_ptr().add(i))).store_f16(out.as_mut_ptr().add(i));
        }
    }
    for i in whole..x.len() {
        out[i] = f16::from_f32(saturated_one(x[i]));
    }
}

/// The int8 scale of the keys or values of a head: `max(1e-5, max|v|) / 127`, with values clamped to the
/// range of f16 (NaN becomes 65504). Below 1e-5, f16 is not finer either.
///
/// # Safety
/// As for [`rms_norm`].
#[inline(always)]
pub unsafe fn int8_scale<L: Lanes>(x: &[f32]) -> f32 {
    let whole = x.len() / LANES * LANES;
    // SAFETY: every pointer is within its slice, in steps of LANES up to `whole`.
    let mut largest = unsafe {
        let mut largest = L::splat(1e-5);
        for i in (0..whole).step_by(LANES) {
            largest = saturated(L::load(x.as_ptr().add(i))).abs().max(largest);
        }
        largest.max_lane()
    };
    for &v in &x[whole..] {
        let v = saturated_one(v).abs();
        largest = if v > largest { v } else { largest };
    }
    largest / 127.0
}

/// Narrows to int8 by the scale of [`int8_scale`]: `round_half_even(v / scale)` of the clamped values,
/// which is within ±127.
///
/// # Safety
/// As for [`rms_norm`].
#[inline(always)]
pub unsafe fn narrow_int8<L: Lanes>(x: &[f32], scale: f32, out: &mut [i8]) {
    assert!(x.len() == out.len());
    let whole = x.len() / LANES * LANES;
    // SAFETY: every pointer is within its slice, in steps of LANES up to `whole`.
    unsafe {
        let divisor = L::splat(scale);
        for i in (0..whole).step_by(LANES) {
            let v = saturated(L::load(x.as_ptr().add(i))).div(divisor);
            v.store_i8(out.as_mut_ptr().add(i));
        }
    }
    for i in whole..x.len() {
        out[i] = (saturated_one(x[i]) / scale).round_ties_even() as i8;
    }
}

/// Logits of `H` head rows for `X` hidden rows: `out[x][h] = Σ_k row_h[k] · x[k]` in lane order.
/// `rows` are `H` pointers to `len` stored elements, `xs` `X` pointers to `len` floats.
///
/// # Safety
/// As for [`rms_norm`]; every pointer must be valid for `len` elements.
#[inline(always)]
pub unsafe fn dot_tile<L: Lanes, E: Element, const H: usize, const X: usize>(
    rows: [*const E; H],
    xs: [*const f32; X],
    len: usize,
) -> [[f32; H]; X] {
    let whole = len / LANES * LANES;
    // SAFETY: the caller guarantees `len` elements behind every pointer.
    unsafe {
        let mut sums = [[L::splat(0.0); H]; X];
        for k in (0..whole).step_by(LANES) {
            let mut w = [L::splat(0.0); H];
            for h in 0..H {
                w[h] = E::load::<L>(rows[h].add(k));
            }
            for x in 0..X {
                let v = L::load(xs[x].add(k));
                for h in 0..H {
                    sums[x][h] = w[h].mul_add(v, sums[x][h]);
                }
            }
        }
        if whole < len {
            for h in 0..H {
                let mut tail = [0f32; LANES];
                for (t, k) in tail.iter_mut().zip(whole..len) {
                    *t = (*rows[h].add(k)).widen();
                }
                let w = L::load(tail.as_ptr());
                for x in 0..X {
                    let v = L::load_first(xs[x].add(whole), len - whole);
                    sums[x][h] = w.mul_add(v, sums[x][h]);
                }
            }
        }
        let mut out = [[0f32; H]; X];
        for x in 0..X {
            for h in 0..H {
                out[x][h] = sums[x][h].sum();
            }
        }
        out
    }
}
