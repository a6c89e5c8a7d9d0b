//! Sixteen `f32` lanes: the vector width of every floating-point kernel.
//!
//! A sum over `n` elements is defined as sixteen running sums, lane `j` taking elements `j`,
//! `j + 16`, …, each by fused multiply-add, added at the end in one fixed tree ([`Lanes::sum`]). One
//! 512-bit register, two 256-bit registers or an array hold the lanes: the operations and their order
//! are the same, so the results are equal to the bit.

use half::{bf16, f16};

/// Lanes per vector.
pub const LANES: usize = 16;

/// Largest finite f16. Narrowing saturates, so that the KV cache never holds an infinity.
pub const F16_MAX: f32 = 65504.0;

/// Sixteen `f32` values and the IEEE operations on them.
///
/// # Safety
/// All methods may be called only where the ISA's features are enabled; pointers must be valid
/// for sixteen elements (any alignment).
pub trait Lanes: Copy {
    /// Number of running sums that fit the registers besides the operands.
    const SUMS: usize;

    /// Whether [`f32::mul_add`] is an instruction.
    const FUSED: bool = true;

    /// Prefetches the cache line of an address, valid or not.
    #[inline(always)]
    fn prefetch<T>(_at: *const T) {}
    /// Returns a vector with `value` in all lanes.
    unsafe fn splat(value: f32) -> Self;
    /// Loads sixteen consecutive values.
    unsafe fn load(from: *const f32) -> Self;
    /// Loads sixteen f16 values, widened exactly.
    unsafe fn load_f16(from: *const f16) -> Self;
    /// Loads sixteen bf16 values, widened exactly.
    unsafe fn load_bf16(from: *const bf16) -> Self;
    /// Loads sixteen signed bytes, widened exactly.
    unsafe fn load_i8(from: *const i8) -> Self;
    /// Loads sixteen integers, rounded to nearest even.
    unsafe fn load_i32(from: *const i32) -> Self;
    /// Writes sixteen consecutive values.
    unsafe fn store(self, to: *mut f32);
    /// Writes sixteen f16 values, rounded to nearest even; lanes must be within ±[`F16_MAX`].
    unsafe fn store_f16(self, to: *mut f16);
    /// Rounds to nearest even and writes as signed bytes; lanes must be within −128..=127.
    unsafe fn store_i8(self, to: *mut i8);
    /// `self + other`
    unsafe fn add(self, other: Self) -> Self;
    /// `self − other`
    unsafe fn sub(self, other: Self) -> Self;
    /// `self × other`
    unsafe fn mul(self, other: Self) -> Self;
    /// `self ÷ other`, correctly rounded
    unsafe fn div(self, other: Self) -> Self;
    /// `self × factor + addend`, rounded once
    unsafe fn mul_add(self, factor: Self, addend: Self) -> Self;
    /// `self` where it is greater, else `other` (so a NaN on either side gives `other`)
    unsafe fn max(self, other: Self) -> Self;
    /// `self` where it is less, else `other`
    unsafe fn min(self, other: Self) -> Self;
    /// Absolute value
    unsafe fn abs(self) -> Self;
    /// Nearest integer, ties to even
    unsafe fn round(self) -> Self;
    /// 2^n for lanes that hold integers in −126..=127
    unsafe fn exp2_integer(self) -> Self;
    /// Lanes `0..count` of `self`, the rest of `other`
    unsafe fn first(self, count: usize, other: Self) -> Self;
    /// Lane `i` + lane `i + 8`, then + 4, + 2, + 1: the one order of every horizontal sum.
    unsafe fn sum(self) -> f32;

    /// Loads the first `count` (≤ 16) values, the other lanes zero; reads only these values.
    #[inline(always)]
    unsafe fn load_first(from: *const f32, count: usize) -> Self {
        let mut lanes = [0f32; LANES];
        // SAFETY: the caller guarantees `count` values; `lanes` has room for sixteen.
        unsafe {
            std::ptr::copy_nonoverlapping(from, lanes.as_mut_ptr(), count.min(LANES));
            Self::load(lanes.as_ptr())
        }
    }

    /// Returns the largest lane: [`max`](Self::max) in the order of [`sum`](Self::sum).
    #[inline(always)]
    unsafe fn max_lane(self) -> f32 {
        let mut lanes = [0f32; LANES];
        // SAFETY: `lanes` has room for sixteen.
        unsafe { self.store(lanes.as_mut_ptr()) };
        for width in [8, 4, 2, 1] {
            for i in 0..width {
                lanes[i] = if lanes[i] > lanes[i + width] { lanes[i] } else { lanes[i + width] };
            }
        }
        lanes[0]
    }

    /// Computes e^x by Cephes' `expf` polynomial (degree 5 after range reduction, under 2 ulp), with `x`
    /// clamped to ±87.3, where the result is a normal number.
    #[inline(always)]
    unsafe fn exp(self) -> Self {
        // SAFETY: the caller has the ISA.
        unsafe {
            let x = self.min(Self::splat(87.3)).max(Self::splat(-87.3));
            let n = x.mul(Self::splat(std::f32::consts::LOG2_E)).round();
            let r = n.mul_add(Self::splat(-0.693_359_4), x);
            let r = n.mul_add(Self::splat(2.121_944_4e-4), r);
            let mut p = Self::splat(1.987_569_1e-4);
            for c in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5] {
                p = p.mul_add(r, Self::splat(c));
            }
            let p = p.mul_add(r.mul(r), r.add(Self::splat(1.0)));
            p.mul(n.exp2_integer())
        }
    }
}

/// A stored number that widens exactly to `f32`.
///
/// # Safety
/// As for [`Lanes`].
pub trait Element: Copy + Send + Sync + 'static {
    /// Loads sixteen consecutive elements as `f32`.
    unsafe fn load<L: Lanes>(from: *const Self) -> L;
    /// Returns the value as `f32`.
    fn widen(self) -> f32;
}

impl Element for f32 {
    #[inline(always)]
    unsafe fn load<L: Lanes>(from: *const Self) -> L {
        // SAFETY: guaranteed by the caller.
        unsafe { L::load(from) }
    }
    fn widen(self) -> f32 {
        self
    }
}

impl Element for f16 {
    #[inline(always)]
    unsafe fn load<L: Lanes>(from: *const Self) -> L {
        // SAFETY: guaranteed by the caller.
        unsafe { L::load_f16(from) }
    }
    fn widen(self) -> f32 {
        self.to_f32()
    }
}

impl Element for bf16 {
    #[inline(always)]
    unsafe fn load<L: Lanes>(from: *const Self) -> L {
        // SAFETY: guaranteed by the caller.
        unsafe { L::load_bf16(from) }
    }
    fn widen(self) -> f32 {
        self.to_f32()
    }
}

impl Element for i8 {
    #[inline(always)]
    unsafe fn load<L: Lanes>(from: *const Self) -> L {
        // SAFETY: guaranteed by the caller.
        unsafe { L::load_i8(from) }
    }
    fn widen(self) -> f32 {
        f32::from(self)
    }
}
