//! The lanes in four 128-bit registers.

use std::arch::aarch64::*;

use half::{bf16, f16};

use super::lanes::Lanes;
use crate::kernels::prefetch;

/// Registers of sixteen lanes.
const PARTS: usize = 4;

/// Sixteen `f32` values in four 128-bit registers. Needs NEON. Rounding is to nearest even and denormals are kept: the
/// default modes, which Rust code does not change.
#[derive(Clone, Copy)]
pub struct NeonLanes([float32x4_t; PARTS]);

/// Applies an expression to each register of `self`, in which `$index` is its index.
macro_rules! each {
    ($of:expr, |$index:ident, $part:ident| $result:expr) => {{
        let mut parts = $of.0;
        for ($index, part) in parts.iter_mut().enumerate() {
            let $part = *part;
            *part = $result;
        }
        Self(parts)
    }};
}

/// The lane-wise operations of two vectors.
macro_rules! lane_wise {
    ($($name:ident = |$a:ident, $b:ident| $result:expr);+) => {$(
        #[inline(always)]
        unsafe fn $name(self, other: Self) -> Self {
            // SAFETY: the trait's contract.
            unsafe {
                each!(self, |i, $a| {
                    let $b = other.0[i];
                    $result
                })
            }
        }
    )+};
}

/// Conversions to and from integers.
///
/// # Safety
/// As for [`Lanes`].
impl NeonLanes {
    /// Converts sixteen integers, rounded to nearest even.
    #[inline(always)]
    pub unsafe fn from_integers(integers: [int32x4_t; PARTS]) -> Self {
        // SAFETY: guaranteed by the caller.
        unsafe {
            let mut parts = [vdupq_n_f32(0.0); PARTS];
            for (part, integers) in parts.iter_mut().zip(integers) {
                *part = vcvtq_f32_s32(integers);
            }
            Self(parts)
        }
    }
    /// Converts lanes that hold integers within 0..=65535; returns lanes 0 to 7, and 8 to 15.
    #[inline(always)]
    pub unsafe fn to_u16(self) -> [uint16x8_t; 2] {
        // SAFETY: guaranteed by the caller.
        unsafe {
            let [a, b, c, d] = self.0;
            [
                vmovn_high_u32(vmovn_u32(vcvtq_u32_f32(a)), vcvtq_u32_f32(b)),
                vmovn_high_u32(vmovn_u32(vcvtq_u32_f32(c)), vcvtq_u32_f32(d)),
            ]
        }
    }
}

impl Lanes for NeonLanes {
    const SUMS: usize = 4;

    #[inline(always)]
    fn prefetch<T>(at: *const T) {
        prefetch::first(at);
    }
    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        // SAFETY: the trait's contract.
        unsafe { Self([vdupq_n_f32(value); PARTS]) }
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: the trait's contract.
        unsafe {
            Self([
                vld1q_f32(from),
                vld1q_f32(from.add(4)),
                vld1q_f32(from.add(8)),
                vld1q_f32(from.add(12)),
            ])
        }
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const f16) -> Self {
        // SAFETY: the trait's contract.
        unsafe {
            let from = from.cast::<u16>();
            each!(Self::splat(0.0), |i, _zero| {
                vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from.add(4 * i))))
            })
        }
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const bf16) -> Self {
        // SAFETY: the trait's contract.
        unsafe {
            let from = from.cast::<u16>();
            each!(Self::splat(0.0), |i, _zero| {
                let wide = vmovl_u16(vld1_u16(from.add(4 * i)));
                vreinterpretq_f32_u32(vshlq_n_u32::<16>(wide))
            })
        }
    }
    #[inline(always)]
    unsafe fn load_i8(from: *const i8) -> Self {
        // SAFETY: the trait's contract.
        unsafe {
            let bytes = vld1q_s8(from);
            let (low, high) = (vmovl_s8(vget_low_s8(bytes)), vmovl_high_s8(bytes));
            Self::from_integers([
                vmovl_s16(vget_low_s16(low)),
                vmovl_high_s16(low),
                vmovl_s16(vget_low_s16(high)),
                vmovl_high_s16(high),
            ])
        }
    }
    #[inline(always)]
    unsafe fn load_i32(from: *const i32) -> Self {
        // SAFETY: the trait's contract.
        unsafe {
            Self::from_integers([
                vld1q_s32(from),
                vld1q_s32(from.add(4)),
                vld1q_s32(from.add(8)),
                vld1q_s32(from.add(12)),
            ])
        }
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        for (i, part) in self.0.into_iter().enumerate() {
            // SAFETY: the trait's contract.
            unsafe { vst1q_f32(to.add(4 * i), part) };
        }
    }
    #[inline(always)]
    unsafe fn store_f16(self, to: *mut f16) {
        for (i, part) in self.0.into_iter().enumerate() {
            // SAFETY: the trait's contract.
            unsafe {
                let narrow = vreinterpret_u16_f16(vcvt_f16_f32(part));
                vst1_u16(to.cast::<u16>().add(4 * i), narrow);
            }
        }
    }
    #[inline(always)]
    unsafe fn store_i8(self, to: *mut i8) {
        // SAFETY: the trait's contract.
        unsafe {
            let [a, b, c, d] = self.0;
            let low = vmovn_high_s32(vmovn_s32(vcvtnq_s32_f32(a)), vcvtnq_s32_f32(b));
            let high = vmovn_high_s32(vmovn_s32(vcvtnq_s32_f32(c)), vcvtnq_s32_f32(d));
            vst1q_s8(to, vmovn_high_s16(vmovn_s16(low), high));
        }
    }
    lane_wise!(
        add = |a, b| vaddq_f32(a, b);
        sub = |a, b| vsubq_f32(a, b);
        mul = |a, b| vmulq_f32(a, b);
        div = |a, b| vdivq_f32(a, b);
        // Not `vmaxq_f32`: of a NaN it makes a NaN, and of two zeros the positive one.
        max = |a, b| vbslq_f32(vcgtq_f32(a, b), a, b);
        min = |a, b| vbslq_f32(vcltq_f32(a, b), a, b)
    );
    #[inline(always)]
    unsafe fn mul_add(self, factor: Self, addend: Self) -> Self {
        // SAFETY: the trait's contract.
        unsafe { each!(self, |i, part| vfmaq_f32(addend.0[i], part, factor.0[i])) }
    }
    #[inline(always)]
    unsafe fn abs(self) -> Self {
        // SAFETY: the trait's contract.
        unsafe { each!(self, |_i, part| vabsq_f32(part)) }
    }
    #[inline(always)]
    unsafe fn round(self) -> Self {
        // SAFETY: the trait's contract.
        unsafe { each!(self, |_i, part| vrndnq_f32(part)) }
    }
    #[inline(always)]
    unsafe fn exp2_integer(self) -> Self {
        // SAFETY: the trait's contract.
        unsafe {
            each!(self, |_i, part| {
                let biased = vaddq_s32(vcvtnq_s32_f32(part), vdupq_n_s32(127));
                vreinterpretq_f32_s32(vshlq_n_s32::<23>(biased))
            })
        }
    }
    #[inline(always)]
    unsafe fn first(self, count: usize, other: Self) -> Self {
        const INDICES: [u32; 4] = [0, 1, 2, 3];
        // SAFETY: the trait's contract; there are four indices.
        unsafe {
            let (limit, indices) = (vdupq_n_u32(count.min(16) as u32), vld1q_u32(INDICES.as_ptr()));
            each!(self, |i, part| {
                let indices = vaddq_u32(indices, vdupq_n_u32(4 * i as u32));
                vbslq_f32(vcltq_u32(indices, limit), part, other.0[i])
            })
        }
    }
    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        // SAFETY: the trait's contract.
        unsafe {
            let [a, b, c, d] = self.0;
            let four = vaddq_f32(vaddq_f32(a, c), vaddq_f32(b, d));
            let two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
            vget_lane_f32::<0>(two) + vget_lane_f32::<1>(two)
        }
    }
}
