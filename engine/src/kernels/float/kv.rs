//! Element types of stored keys and values.

use half::f16;

use super::{AttentionFn, FloatKernels, TogetherFn, byte_dots, lanes, lanes::LANES};

/// Element types of stored keys and values.
pub trait KvElement: lanes::Element + Default {
    /// Whether the keys and the values of one position and head each have a scale, which multiplies the
    /// stored elements.
    const SCALED: bool = false;
    /// Elements of a key that are adjacent in a block, and positions of the values.
    const ADJACENT: usize = 1;

    /// Returns the index of an element of the key of a position, within a block's keys of one head.
    /// // (head_dim / ADJACENT, 16, ADJACENT)
    fn key_at(slot: usize, d: usize) -> usize {
        (d / Self::ADJACENT * LANES + slot) * Self::ADJACENT + d % Self::ADJACENT
    }
    /// Returns the index of an element of the values of a position, within a block's values of one head.
    /// // (16 / ADJACENT, padded_head_dim, ADJACENT)
    fn value_at(padded_head_dim: usize, slot: usize, d: usize) -> usize {
        (slot / Self::ADJACENT * padded_head_dim + d) * Self::ADJACENT + slot % Self::ADJACENT
    }

    #[doc(hidden)]
    fn attention(kernels: &FloatKernels) -> AttentionFn<Self>;
    #[doc(hidden)]
    fn together(kernels: &FloatKernels) -> TogetherFn<Self>;
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
    fn together(kernels: &FloatKernels) -> TogetherFn<Self> {
        kernels.together_f16
    }
    fn narrow(kernels: &FloatKernels, x: &[f32], _: f32, out: &mut [Self]) {
        // SAFETY: `FloatKernels::for_isa` checked the ISA.
        unsafe { (kernels.narrow)(x, out) }
    }
}

impl KvElement for f32 {
    fn attention(kernels: &FloatKernels) -> AttentionFn<Self> {
        kernels.attention_f32
    }
    fn together(kernels: &FloatKernels) -> TogetherFn<Self> {
        kernels.together_f32
    }
    fn narrow(_: &FloatKernels, x: &[f32], _: f32, out: &mut [Self]) {
        out.copy_from_slice(x);
    }
}

impl KvElement for i8 {
    const SCALED: bool = true;
    const ADJACENT: usize = byte_dots::DEPTH;

    fn attention(kernels: &FloatKernels) -> AttentionFn<Self> {
        kernels.attention_i8
    }
    fn together(kernels: &FloatKernels) -> TogetherFn<Self> {
        kernels.together_i8
    }
    fn scale(kernels: &FloatKernels, x: &[f32]) -> f32 {
        // SAFETY: `FloatKernels::for_isa` checked the ISA.
        unsafe { (kernels.int8_scale)(x) }
    }
    fn narrow(kernels: &FloatKernels, x: &[f32], scale: f32, out: &mut [Self]) {
        // SAFETY: `FloatKernels::for_isa` checked the ISA.
        unsafe { (kernels.narrow_int8)(x, scale, out) }
    }
}
