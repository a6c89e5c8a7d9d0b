//! The sums in the registers of aarch64.

use std::arch::aarch64::*;

use super::{
    super::{lanes::LANES, neon::NeonLanes},
    ByteDots, DEPTH,
};
use crate::kernels::aarch64::dot::{sdot, udot_half, udot_lane};

/// Registers of sixteen sums.
const PARTS: usize = 4;

/// Sixteen sums in four 128-bit registers. Needs NEON with dot products, which multiply bytes of one kind: queries and
/// keys are signed; weights and values are unsigned, with values plus 128.
#[derive(Clone, Copy)]
pub struct NeonDots([int32x4_t; PARTS]);

/// Sums of products with weights `256 · high + low`. With values that are 128 too large, a sum over 128 positions is at
/// most 32767 · 255 · 128, below 2^31.
#[derive(Clone, Copy)]
pub struct Weighted {
    high: [uint32x4_t; PARTS],
    low: [uint32x4_t; PARTS],
    /// The sum of the high bytes of all weights, and of the low bytes.
    weights: uint32x2_t,
}

/// High and low bytes of eight weights, four at a time.
const BYTES: [u8; LANES] = [1, 3, 5, 7, 0, 2, 4, 6, 9, 11, 13, 15, 8, 10, 12, 14];

impl ByteDots for NeonDots {
    type Floats = NeonLanes;
    type Bytes = [int8x16_t; PARTS];
    type Weighted = Weighted;

    const SUMS: usize = 4;
    const WEIGHTED: usize = 2;

    #[inline(always)]
    fn pack(elements: [i8; DEPTH]) -> u64 {
        u64::from(u32::from_le_bytes(elements.map(|element| element as u8)))
    }
    #[inline(always)]
    unsafe fn zero() -> Self {
        // SAFETY: the trait's contract.
        unsafe { Self([vdupq_n_s32(0); PARTS]) }
    }
    #[inline(always)]
    unsafe fn zero_weighted() -> Weighted {
        // SAFETY: the trait's contract.
        let (zero, weights) = unsafe { (vdupq_n_u32(0), vdup_n_u32(0)) };
        Weighted { high: [zero; PARTS], low: [zero; PARTS], weights }
    }
    #[inline(always)]
    unsafe fn load(from: *const i8) -> Self::Bytes {
        // SAFETY: the trait's contract.
        unsafe {
            [vld1q_s8(from), vld1q_s8(from.add(16)), vld1q_s8(from.add(32)), vld1q_s8(from.add(48))]
        }
    }
    #[inline(always)]
    unsafe fn add(mut self, packed: u64, bytes: Self::Bytes) -> Self {
        // SAFETY: the trait's contract.
        unsafe {
            let packed = vreinterpretq_s8_s32(vdupq_n_s32(packed as i32));
            for (sum, bytes) in self.0.iter_mut().zip(bytes) {
                *sum = sdot(*sum, bytes, packed);
            }
        }
        self
    }
    #[inline(always)]
    unsafe fn to_floats(self) -> NeonLanes {
        // SAFETY: the trait's contract.
        unsafe { NeonLanes::from_integers(self.0) }
    }
    #[inline(always)]
    unsafe fn store_weights(weights: NeonLanes, to: *mut u8) {
        // SAFETY: the trait's contract.
        unsafe {
            let bytes = vld1q_u8(BYTES.as_ptr());
            let [first, second] = weights.to_u16();
            vst1q_u8(to, vqtbl1q_u8(vreinterpretq_u8_u16(first), bytes));
            vst1q_u8(to.add(LANES), vqtbl1q_u8(vreinterpretq_u8_u16(second), bytes));
        }
    }
    #[inline(always)]
    unsafe fn weigh(
        mut sums: Weighted,
        weights: *const u8,
        group: usize,
        bytes: Self::Bytes,
    ) -> Weighted {
        // SAFETY: the trait's contract.
        unsafe {
            let both = vld1_u8(weights.add(2 * DEPTH * group));
            sums.weights = udot_half(sums.weights, both, vdup_n_u8(1));
            for (part, bytes) in bytes.into_iter().enumerate() {
                let bytes = veorq_u8(vreinterpretq_u8_s8(bytes), vdupq_n_u8(0x80));
                sums.high[part] = udot_lane::<0>(sums.high[part], bytes, both);
                sums.low[part] = udot_lane::<1>(sums.low[part], bytes, both);
            }
        }
        sums
    }
    #[inline(always)]
    unsafe fn weighted_floats(sums: Weighted) -> NeonLanes {
        // SAFETY: the trait's contract.
        unsafe {
            let [high, low] = [vget_lane_u32::<0>(sums.weights), vget_lane_u32::<1>(sums.weights)];
            let excess = vdupq_n_u32(128 * (256 * high + low));
            let mut integers = [vdupq_n_s32(0); PARTS];
            for (part, integers) in integers.iter_mut().enumerate() {
                let sum = vaddq_u32(vshlq_n_u32::<8>(sums.high[part]), sums.low[part]);
                *integers = vreinterpretq_s32_u32(vsubq_u32(sum, excess));
            }
            NeonLanes::from_integers(integers)
        }
    }
}
