//! What keys and values may be stored as.

use half::f16;

use super::{AttentionFn, FloatKernels, lanes};

/// Stored numbers that keys and values may have.
pub trait KvElement: lanes::Element + Default {
    /// Whether a position's keys, and its values, of one head have a scale: elements stand for
    /// themselves times it.
    const SCALED: bool = false;

    #[doc(hidden)]
    fn attention(kernels: &FloatKernels) -> AttentionFn<Self>;
    /// Scale of a position's keys or values of one head; 1 where elements have none.
    fn scale(_: &FloatKernels, _: &[f32]) -> f32 {
        1.0
    }
    /// Narrows keys or values that have this scale.
    fn narrow(kernels: &FloatKernels, x: &[f32], scale: f32, out: &mut [Self]);
}

impl KvElement for f16 {
    fn attention(kernels: &FloatKernels) -> AttentionFn<Self> {
        kernels.attention_f16
    }
    fn narrow(kernels: &FloatKernels, x: &[f32], _: f32, out: &mut [Self]) {
        // SAFETY: `FloatKernels::of` checked the ISA.
        unsafe { (kernels.narrow)(x, out) }
    }
}

impl KvElement for f32 {
    fn attention(kernels: &FloatKernels) -> AttentionFn<Self> {
        kernels.attention_f32
    }
    fn narrow(_: &FloatKernels, x: &[f32], _: f32, out: &mut [Self]) {
        out.copy_from_slice(x);
    }
}

impl KvElement for i8 {
    const SCALED: bool = true;

    fn attention(kernels: &FloatKernels) -> AttentionFn<Self> {
        kernels.attention_i8
    }
    fn scale(kernels: &FloatKernels, x: &[f32]) -> f32 {
        // SAFETY: `FloatKernels::of` checked the ISA.
        unsafe { (kernels.int8_scale)(x) }
    }
    fn narrow(kernels: &FloatKernels, x: &[f32], scale: f32, out: &mut [Self]) {
        // SAFETY: `FloatKernels::of` checked the ISA.
        unsafe { (kernels.narrow_int8)(x, scale, out) }
    }
}
