//! The lanes as an array: the reference for the vector ISAs.

use half::{bf16, f16};

use super::lanes::{LANES, Lanes};

/// Sixteen `f32` values in plain Rust.
#[derive(Clone, Copy)]
pub struct ScalarLanes([f32; LANES]);

/// Loads of sixteen elements, widened to `f32`.
macro_rules! loads {
    ($($name:ident = $type:ty, $widen:expr);+) => {$(
        #[inline(always)]
        unsafe fn $name(from: *const $type) -> Self {
            // SAFETY: the caller guarantees sixteen elements, at any alignment.
            Self(unsafe { from.cast::<[$type; LANES]>().read_unaligned() }.map($widen))
        }
    )+};
}

/// The lane-wise operations of two vectors.
macro_rules! lane_wise {
    ($($name:ident = |$a:ident, $b:ident| $result:expr);+) => {$(
        #[inline(always)]
        unsafe fn $name(self, other: Self) -> Self {
            Self(std::array::from_fn(|i| {
                let ($a, $b) = (self.0[i], other.0[i]);
                $result
            }))
        }
    )+};
}

impl Lanes for ScalarLanes {
    const SUMS: usize = 4;
    const FUSED: bool = false;

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        Self([value; LANES])
    }
    loads!(
        load = f32, |v| v;
        load_f16 = f16, f16::to_f32;
        load_bf16 = bf16, bf16::to_f32;
        load_i8 = i8, f32::from;
        load_i32 = i32, |v| v as f32
    );
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: as for the loads.
        unsafe { to.cast::<[f32; LANES]>().write_unaligned(self.0) }
    }
    #[inline(always)]
    unsafe fn store_f16(self, to: *mut f16) {
        // SAFETY: as for the loads.
        unsafe { to.cast::<[f16; LANES]>().write_unaligned(self.0.map(f16::from_f32)) }
    }
    #[inline(always)]
    unsafe fn store_i8(self, to: *mut i8) {
        let bytes = self.0.map(|v| v.round_ties_even() as i8);
        // SAFETY: as for the loads.
        unsafe { to.cast::<[i8; LANES]>().write_unaligned(bytes) }
    }
    lane_wise!(
        add = |a, b| a + b;
        sub = |a, b| a - b;
        mul = |a, b| a * b;
        div = |a, b| a / b;
        max = |a, b| if a > b { a } else { b };
        min = |a, b| if a < b { a } else { b }
    );
    #[inline(always)]
    unsafe fn mul_add(self, factor: Self, addend: Self) -> Self {
        Self(std::array::from_fn(|i| self.0[i].mul_add(factor.0[i], addend.0[i])))
    }
    #[inline(always)]
    unsafe fn abs(self) -> Self {
        Self(self.0.map(f32::abs))
    }
    #[inline(always)]
    unsafe fn round(self) -> Self {
        Self(self.0.map(f32::round_ties_even))
    }
    #[inline(always)]
    unsafe fn exp2_integer(self) -> Self {
        Self(self.0.map(|n| f32::from_bits(((n as i32 + 127) as u32) << 23)))
    }
    #[inline(always)]
    unsafe fn first(self, count: usize, other: Self) -> Self {
        Self(std::array::from_fn(|i| if i < count { self.0[i] } else { other.0[i] }))
    }
    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        let mut lanes = self.0;
        for width in [8, 4, 2, 1] {
            for i in 0..width {
                lanes[i] += lanes[i + width];
            }
        }
        lanes[0]
    }
}
