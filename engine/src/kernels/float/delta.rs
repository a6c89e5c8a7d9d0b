//! The gated delta rule (Yang, Kautz and Hatamizadeh 2025, "Gated Delta Networks"), a token at a time.
//!
//! The recurrent form in the order of the tokens: a sum over keys is one chain of fused multiply-adds for each value element,
//! whatever the lanes, the chunk of the prompt and the other rows of a step are. The parallel form of the paper sums in an order
//! that depends on where a chunk begins, so that it would break the engine's promise of equal bits.

use super::{
    TAPS,
    lanes::{LANES, Lanes},
};

/// What a token brings to a value head.
pub struct DeltaToken<'a> {
    /// Query and key, each of length 1 but for the factor of the query. // (d,)
    pub query: &'a [f32],
    pub key: &'a [f32],
    pub value: &'a [f32], // (d,)
    /// Factor of the state, e^g, at most 1.
    pub decay: f32,
    /// Part of the difference that is learned, from 0 to 1.
    pub beta: f32,
}

/// `S = decay S; e = beta (value − Sᵀ key); S = S + key eᵀ; out = Sᵀ query`. // state: (d, d), by key and then by value
///
/// # Safety
/// The lanes' ISA must be available (as for every function here).
#[inline(always)]
pub unsafe fn delta_rule<L: Lanes>(state: &mut [f32], token: &DeltaToken<'_>, out: &mut [f32]) {
    let d = out.len();
    assert!(d.is_multiple_of(LANES) && state.len() == d * d);
    assert!(token.query.len() == d && token.key.len() == d && token.value.len() == d);
    let mut at = 0;
    // SAFETY: `at` and the vectors that are taken together end at `d`.
    unsafe {
        while at + 4 * LANES <= d {
            columns::<L, 4>(state, token, out, at);
            at += 4 * LANES;
        }
        while at < d {
            columns::<L, 1>(state, token, out, at);
            at += LANES;
        }
    }
}

/// The elements of the state from column `at` on, `N` vectors of them.
///
/// # Safety
/// As [`delta_rule`], which checks the lengths; `at + N * LANES` is at most `d`.
#[inline(always)]
unsafe fn columns<L: Lanes, const N: usize>(
    state: &mut [f32],
    token: &DeltaToken<'_>,
    out: &mut [f32],
    at: usize,
) {
    let d = out.len();
    // SAFETY: guaranteed by the caller.
    unsafe {
        let decay = L::splat(token.decay);
        let state = state.as_mut_ptr().add(at);
        let mut found = [L::splat(0.0); N];
        for (row, key) in token.key.iter().enumerate() {
            let key = L::splat(*key);
            for (n, found) in found.iter_mut().enumerate() {
                let s = L::load(state.add(row * d + n * LANES)).mul(decay);
                *found = s.mul_add(key, *found);
            }
        }
        let beta = L::splat(token.beta);
        let value = token.value.as_ptr().add(at);
        let mut difference = found;
        for (n, difference) in difference.iter_mut().enumerate() {
            *difference = L::load(value.add(n * LANES)).sub(*difference).mul(beta);
        }
        let mut read = [L::splat(0.0); N];
        for (row, (key, query)) in token.key.iter().zip(token.query).enumerate() {
            let (key, query) = (L::splat(*key), L::splat(*query));
            for n in 0..N {
                let place = state.add(row * d + n * LANES);
                let s = difference[n].mul_add(key, L::load(place).mul(decay));
                s.store(place);
                read[n] = s.mul_add(query, read[n]);
            }
        }
        for (n, read) in read.iter().enumerate() {
            read.store(out.as_mut_ptr().add(at + n * LANES));
        }
    }
}

/// `out = silu(Σ weights[i] ⊙ inputs[i])`, by element; the last input is the current one. // each: (channels,)
///
/// # Safety
/// As for [`delta_rule`].
#[inline(always)]
pub unsafe fn convolve<L: Lanes>(weights: [&[f32]; TAPS], inputs: [&[f32]; TAPS], out: &mut [f32]) {
    assert!(out.len().is_multiple_of(LANES));
    assert!(weights.iter().chain(&inputs).all(|of| of.len() == out.len()));
    for at in (0..out.len()).step_by(LANES) {
        // SAFETY: every pointer is within its slice, in steps of LANES.
        unsafe {
            let mut sum = L::splat(0.0);
            for (weight, input) in weights.iter().zip(&inputs) {
                let input = L::load(input.as_ptr().add(at));
                sum = input.mul_add(L::load(weight.as_ptr().add(at)), sum);
            }
            sum.mul(sigmoid(sum)).store(out.as_mut_ptr().add(at));
        }
    }
}

/// `x = x · factor / √(Σx² + 1e-6)`
///
/// # Safety
/// As for [`delta_rule`].
#[inline(always)]
pub unsafe fn to_length<L: Lanes>(x: &mut [f32], factor: f32) {
    assert!(x.len().is_multiple_of(LANES));
    // SAFETY: every pointer is within the slice, in steps of LANES.
    unsafe {
        let mut squares = L::splat(0.0);
        for at in (0..x.len()).step_by(LANES) {
            let v = L::load(x.as_ptr().add(at));
            squares = v.mul_add(v, squares);
        }
        let factor = L::splat(factor / (squares.sum() + 1e-6).sqrt());
        for at in (0..x.len()).step_by(LANES) {
            L::load(x.as_ptr().add(at)).mul(factor).store(x.as_mut_ptr().add(at));
        }
    }
}

/// `x = x ⊙ sigmoid(gate)`, or with `silu` `x ⊙ gate ⊙ sigmoid(gate)`.
///
/// # Safety
/// As for [`delta_rule`].
#[inline(always)]
pub unsafe fn apply_gate<L: Lanes>(x: &mut [f32], gate: &[f32], silu: bool) {
    assert!(x.len().is_multiple_of(LANES) && x.len() == gate.len());
    for at in (0..x.len()).step_by(LANES) {
        // SAFETY: every pointer is within its slice, in steps of LANES.
        unsafe {
            let gate = L::load(gate.as_ptr().add(at));
            let mut factor = sigmoid(gate);
            if silu {
                factor = gate.mul(factor);
            }
            L::load(x.as_ptr().add(at)).mul(factor).store(x.as_mut_ptr().add(at));
        }
    }
}

/// # Safety
/// As for [`delta_rule`].
#[inline(always)]
unsafe fn sigmoid<L: Lanes>(x: L) -> L {
    // SAFETY: the caller has the ISA.
    unsafe {
        let one = L::splat(1.0);
        one.div(one.add(L::splat(0.0).sub(x).exp()))
    }
}
