//! Element types of stored keys and values.

use half::f16;

use super::{AttentionFn, FloatKernels, lanes};

/// Element types of stored keys and values.
pub trait KvElement: lanes::Element + Default {
    /// Whether the keys and the values of one position and head each have a scale, which multiplies the
    /// stored elements.
    const SCALED: bool = false;

    #[doc(hidden)]
    fn attention(kernels: &FloatKernels) -> AttentionFn<Self>;
    /// Returns the scale of the keys or values of one position and head; 1 for unscaled types.
    fn scale(_: &FloatKernels, _: &[f32]) -> f32 {
        1.0
    }
    /// Narrows keys or values with this scale.
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
