//! Floating-point kernels: generic definitions ([`ops`], [`outputs`], [`attention`]) that [`tables`]
//! instantiates for every ISA. Results are equal to the bit on all ISAs (see [`lanes`]).

mod attention;
mod attention_q8;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod byte_dots;
mod delta;
mod hadamard;
mod kv;
mod lanes;
#[cfg(target_arch = "aarch64")]
mod neon;
mod ops;
mod outputs;
mod scalar;
mod tables;
#[cfg(test)]
mod tests;
mod together;

use half::{bf16, f16};

pub use attention::{AttentionTile, Stored};
pub use delta::DeltaToken;
pub use kv::KvElement;
pub use lanes::LANES;
pub use together::Together;

/// Positions that attention of any type adds up as one part: a block table may begin at any multiple.
pub const POSITIONS_PART: usize = attention_q8::SEGMENT;
pub use outputs::{Columns, Sums, Values};

use super::{
    Digits, Isa,
    screen::{Bounds, Products, RangeNoise},
};
use crate::config::{Activation, DeltaNet, Rotation};

const TAPS: usize = DeltaNet::TAPS;

type AttentionFn<E> = unsafe fn(&AttentionTile<'_, E>, &[f32], &[usize], &mut Vec<f32>, &mut [f32]);
type TogetherFn<E> =
    unsafe fn(&AttentionTile<'_, E>, &Together<'_>, &[f32], &[usize], &mut Vec<f32>, &mut [f32]);
type SelectFn = unsafe fn(&Bounds<'_>, Option<&RangeNoise>, f32, &[f32], &mut Vec<usize>);
type ConvolveFn = unsafe fn([&[f32]; TAPS], [&[f32]; TAPS], &mut [f32]);
type HeadFn<E> = unsafe fn(&[E], usize, &[f32], &mut [f32]);
type HeadSomeFn<E> = unsafe fn(&[&[E]], &[f32], &mut [f32]);

/// The kernels of one ISA. [`FloatKernels::for_isa`] checks that this machine can run them.
#[derive(Clone, Copy)]
pub struct FloatKernels {
    rms_norm: unsafe fn(&[f32], &[f32], f32, &mut [f32]),
    quantize: unsafe fn(&[f32], &mut [i8]) -> f32,
    rescale: unsafe fn(&Sums<'_>, &mut Columns<'_>),
    add_rescaled: unsafe fn(&Sums<'_>, &mut Columns<'_>),
    gate: unsafe fn(Activation, &Sums<'_>, &Sums<'_>, &mut Columns<'_>),
    quantize_groups: unsafe fn(&[f32], Digits, &mut [i8], &mut [f32]),
    set_values: unsafe fn(&Values<'_>, &mut Columns<'_>),
    add_values: unsafe fn(&Values<'_>, &mut Columns<'_>),
    gate_values: unsafe fn(Activation, &Values<'_>, &Values<'_>, &mut Columns<'_>),
    narrow: unsafe fn(&[f32], &mut [f16]),
    int8_scale: unsafe fn(&[f32]) -> f32,
    narrow_int8: unsafe fn(&[f32], f32, &mut [i8]),
    estimate: unsafe fn(&Products<'_>, &mut [f32]),
    select_candidates: SelectFn,
    weigh_below: unsafe fn(&Bounds<'_>, f32, f32, &[f32]) -> f32,
    attention_f16: AttentionFn<f16>,
    attention_f32: AttentionFn<f32>,
    attention_i8: AttentionFn<i8>,
    together_f16: TogetherFn<f16>,
    together_f32: TogetherFn<f32>,
    together_i8: TogetherFn<i8>,
    head_f32: HeadFn<f32>,
    head_f16: HeadFn<f16>,
    head_bf16: HeadFn<bf16>,
    head_some_f32: HeadSomeFn<f32>,
    head_some_f16: HeadSomeFn<f16>,
    head_some_bf16: HeadSomeFn<bf16>,
    head_some_i8: HeadSomeFn<i8>,
    head_i8: HeadFn<i8>,
    delta_rule: unsafe fn(&mut [f32], &DeltaToken<'_>, &mut [f32]),
    convolve: ConvolveFn,
    to_length: unsafe fn(&mut [f32], f32),
    apply_gate: unsafe fn(&mut [f32], &[f32], bool),
    hadamard: unsafe fn(&mut [f32], usize),
}

/// Element types of head rows.
pub trait HeadElement: lanes::Element {
    #[doc(hidden)]
    fn head(kernels: &FloatKernels) -> HeadFn<Self>;

    /// Returns the kernel for rows apart.
    fn head_some(kernels: &FloatKernels) -> HeadSomeFn<Self>;
}

macro_rules! head_element {
    ($type:ty, $field:ident, $some:ident) => {
        impl HeadElement for $type {
            fn head(kernels: &FloatKernels) -> HeadFn<Self> {
                kernels.$field
            }

            fn head_some(kernels: &FloatKernels) -> HeadSomeFn<Self> {
                kernels.$some
            }
        }
    };
}
head_element!(f32, head_f32, head_some_f32);
head_element!(f16, head_f16, head_some_f16);
head_element!(bf16, head_bf16, head_some_bf16);
head_element!(i8, head_i8, head_some_i8);

impl FloatKernels {
    /// Returns the kernels of an ISA, if this machine can run them.
    pub fn for_isa(isa: Isa) -> Option<&'static Self> {
        if !isa.is_available() {
            return None;
        }
        Some(match isa {
            Isa::Scalar => &tables::scalar::TABLE,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => &tables::avx2::TABLE,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 | Isa::Amx => &tables::avx512::TABLE,
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => &tables::neon::TABLE,
            #[cfg(not(target_arch = "aarch64"))]
            Isa::Neon => return None,
            #[cfg(not(target_arch = "x86_64"))]
            Isa::Avx2 | Isa::Avx512 | Isa::Amx => return None,
        })
    }

    /// `out = weight ⊙ (x · 1/√(mean(x²) + eps))`.
    pub fn rms_norm(&self, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
        // SAFETY: `of` checked the ISA, here and in every method below.
        unsafe { (self.rms_norm)(x, weight, eps, out) }
    }

    /// Writes estimates of logits to `out`.
    ///
    /// # Panics
    /// If there are fewer products than elements of `out`.
    pub fn estimate(&self, of: &Products<'_>, out: &mut [f32]) {
        // SAFETY: see `rms_norm`.
        unsafe { (self.estimate)(of, out) }
    }

    /// Adds to `candidates` the indices of the estimates that are not certainly below `threshold`, each with its
    /// noise if there is any.
    ///
    /// # Panics
    /// If there are fewer bounds than estimates.
    pub fn select_candidates(
        &self,
        bounds: &Bounds<'_>,
        noise: Option<&RangeNoise>,
        threshold: f32,
        estimates: &[f32],
        candidates: &mut Vec<usize>,
    ) {
        // SAFETY: see `rms_norm`.
        unsafe { (self.select_candidates)(bounds, noise, threshold, estimates, candidates) }
    }

    /// Returns an upper bound of the sum of weights, relative to that of `threshold`, over the estimates that are certainly
    /// below it. `temperature` is above 0.
    ///
    /// # Panics
    /// If there are fewer bounds than estimates.
    pub fn weigh_below(
        &self,
        bounds: &Bounds<'_>,
        threshold: f32,
        temperature: f32,
        estimates: &[f32],
    ) -> f32 {
        // Rounded down, as differences from the threshold are negative.
        let per_unit = std::f32::consts::LOG2_E / temperature * (1.0 - 1e-6);
        // SAFETY: see `rms_norm`.
        unsafe { (self.weigh_below)(bounds, threshold, per_unit, estimates) }
    }

    /// Returns [`weigh_below`](Self::weigh_below) for estimates without errors.
    pub fn weigh_values(&self, values: &[f32], threshold: f32, temperature: f32) -> f32 {
        // Any finite norms do: the factors are 0.
        let bounds = Bounds { errors: values, norms: values, by_error: 0.0, by_norm: 0.0 };
        self.weigh_below(&bounds, threshold, temperature, values)
    }

    /// Quantizes the row of a token to int8; returns the scale `s = 127 / max(1e-5, max|x|)`.
    pub fn quantize(&self, x: &[f32], q: &mut [i8]) -> f32 {
        // SAFETY: see `rms_norm`.
        unsafe { (self.quantize)(x, q) }
    }

    /// Writes the outputs of a linear: `out = values`.
    ///
    /// # Panics
    /// If the rows or columns of `sums` and `out` do not match, as in the two methods below.
    pub fn rescale(&self, sums: &Sums<'_>, mut out: Columns<'_>) {
        // SAFETY: see `rms_norm`.
        unsafe { (self.rescale)(sums, &mut out) }
    }

    /// Adds the outputs of a linear to the residual stream: `out += values`.
    pub fn add_rescaled(&self, sums: &Sums<'_>, mut out: Columns<'_>) {
        // SAFETY: see `rms_norm`.
        unsafe { (self.add_rescaled)(sums, &mut out) }
    }

    /// Writes the gated outputs of two linears: `out = act(gate) ⊙ up`.
    pub fn gate(
        &self,
        activation: Activation,
        gate: &Sums<'_>,
        up: &Sums<'_>,
        mut out: Columns<'_>,
    ) {
        // SAFETY: see `rms_norm`.
        unsafe { (self.gate)(activation, gate, up, &mut out) }
    }

    /// Quantizes the row of a token to digits, `(digits, cols)`, with a scale for each 128 inputs.
    ///
    /// # Panics
    /// If the row is not a multiple of sixteen, or a length does not fit.
    pub fn quantize_groups(&self, x: &[f32], digits: Digits, q: &mut [i8], scales: &mut [f32]) {
        // SAFETY: see `rms_norm`.
        unsafe { (self.quantize_groups)(x, digits, q, scales) }
    }

    /// Writes values of a linear: `out = values`.
    ///
    /// # Panics
    /// If the rows or columns do not match, as in the two methods below.
    pub fn set_values(&self, values: &Values<'_>, mut out: Columns<'_>) {
        // SAFETY: see `rms_norm`.
        unsafe { (self.set_values)(values, &mut out) }
    }

    /// Adds values of a linear to the residual stream: `out += values`.
    pub fn add_values(&self, values: &Values<'_>, mut out: Columns<'_>) {
        // SAFETY: see `rms_norm`.
        unsafe { (self.add_values)(values, &mut out) }
    }

    /// Writes the gated values of two linears: `out = act(gate) ⊙ up`.
    pub fn gate_values(
        &self,
        activation: Activation,
        gate: &Values<'_>,
        up: &Values<'_>,
        mut out: Columns<'_>,
    ) {
        // SAFETY: see `rms_norm`.
        unsafe { (self.gate_values)(activation, gate, up, &mut out) }
    }

    /// Computes the attention of `positions.len()` queries `(n, head_dim)` into `(n, padded_head_dim)`.
    pub fn attention<E: KvElement>(
        &self,
        tile: &AttentionTile<'_, E>,
        queries: &[f32],
        positions: &[usize],
        scratch: &mut Vec<f32>,
        out: &mut [f32],
    ) {
        // SAFETY: see `rms_norm`.
        unsafe { E::attention(self)(tile, queries, positions, scratch, out) }
    }

    /// Computes the attention of as many queries of each of several sequences, `(n, head_dim)`, into `(n, padded_head_dim)`.
    ///
    /// # Panics
    /// If a query has a position within the shared segments.
    pub fn attention_together<E: KvElement>(
        &self,
        tile: &AttentionTile<'_, E>,
        together: &Together<'_>,
        queries: &[f32],
        positions: &[usize],
        scratch: &mut Vec<f32>,
        out: &mut [f32],
    ) {
        // SAFETY: see `rms_norm`.
        unsafe { E::together(self)(tile, together, queries, positions, scratch, out) }
    }

    /// Changes the state of a value head by a token, and reads it: `state = decay state + key eᵀ` with
    /// `e = beta (value − decay stateᵀ key)`; `out = stateᵀ query`. // state: (d, d), by key and then by value; out: (d,)
    ///
    /// # Panics
    /// If `d` is not a multiple of sixteen, or a length differs.
    pub fn delta_rule(&self, state: &mut [f32], token: &DeltaToken<'_>, out: &mut [f32]) {
        // SAFETY: see `rms_norm`.
        unsafe { (self.delta_rule)(state, token, out) }
    }

    /// `out = silu(Σ weights[i] ⊙ inputs[i])`, by element; the last input is the current one.
    ///
    /// # Panics
    /// As [`delta_rule`](Self::delta_rule).
    pub fn convolve(&self, weights: [&[f32]; TAPS], inputs: [&[f32]; TAPS], out: &mut [f32]) {
        // SAFETY: see `rms_norm`.
        unsafe { (self.convolve)(weights, inputs, out) }
    }

    /// `x = x · factor / √(Σx² + 1e-6)`
    ///
    /// # Panics
    /// As [`delta_rule`](Self::delta_rule).
    pub fn to_length(&self, x: &mut [f32], factor: f32) {
        // SAFETY: see `rms_norm`.
        unsafe { (self.to_length)(x, factor) }
    }

    /// Multiplies each block of a row by the normalised Walsh-Hadamard matrix in natural order, which is its own inverse.
    ///
    /// # Panics
    /// If a block is not a power of two from sixteen on, or does not divide the row.
    pub fn hadamard(&self, x: &mut [f32], block: usize) {
        // SAFETY: see `rms_norm`.
        unsafe { (self.hadamard)(x, block) }
    }

    /// Turns the input of a linear into the basis of its weights: signs, then the transform.
    ///
    /// # Panics
    /// As [`hadamard`](Self::hadamard), or if there are signs of another width.
    pub fn rotate(&self, x: &mut [f32], rotation: &Rotation) {
        multiply(x, rotation.signs(x.len()));
        self.hadamard(x, rotation.block);
    }

    /// Undoes [`rotate`](Self::rotate).
    ///
    /// # Panics
    /// As there.
    pub fn rotate_back(&self, x: &mut [f32], rotation: &Rotation) {
        self.hadamard(x, rotation.block);
        multiply(x, rotation.signs(x.len()));
    }

    /// `x = x ⊙ sigmoid(gate)`
    ///
    /// # Panics
    /// As [`delta_rule`](Self::delta_rule).
    pub fn apply_sigmoid(&self, x: &mut [f32], gate: &[f32]) {
        // SAFETY: see `rms_norm`.
        unsafe { (self.apply_gate)(x, gate, false) }
    }

    /// `x = x ⊙ silu(gate)`
    ///
    /// # Panics
    /// As [`delta_rule`](Self::delta_rule).
    pub fn apply_silu(&self, x: &mut [f32], gate: &[f32]) {
        // SAFETY: see `rms_norm`.
        unsafe { (self.apply_gate)(x, gate, true) }
    }

    /// Computes the logits of head rows `(r, len)` for hidden rows `(n, len)` into `(n, r)`.
    pub fn head<E: HeadElement>(&self, rows: &[E], len: usize, xs: &[f32], out: &mut [f32]) {
        // SAFETY: see `rms_norm`.
        unsafe { E::head(self)(rows, len, xs, out) }
    }

    /// Logits of head rows that need not be neighbours, for one hidden row: as [`head`](Self::head).
    ///
    /// # Panics
    /// If there are more or fewer outputs than rows, or the rows have other lengths than `x`.
    pub fn head_some<E: HeadElement>(&self, rows: &[&[E]], x: &[f32], out: &mut [f32]) {
        // SAFETY: see `rms_norm`.
        unsafe { E::head_some(self)(rows, x, out) }
    }
}

/// `x = x ⊙ signs`; without any, `x` stays.
fn multiply(x: &mut [f32], signs: &[f32]) {
    x.iter_mut().zip(signs).for_each(|(x, sign)| *x *= sign);
}
