//! The dot product instructions of ARMv8.2. Each adds four products of bytes to a 32-bit lane, wrapping.
//!
//! By `asm!`, because the intrinsics (`vdotq_s32` and others) are not stable up to Rust 1.96
//! (<https://github.com/rust-lang/rust/issues/117224>).

use std::arch::{aarch64::*, asm};

/// Adds `a[4 l + i] * b[4 l + i]`, signed, for `i` in 0..4 to each lane `l`.
#[inline]
#[target_feature(enable = "neon,dotprod")]
pub fn sdot(mut sum: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t {
    // SAFETY: the instruction reads and writes registers only; this function has its feature.
    unsafe {
        asm!(
            "sdot {0:v}.4s, {1:v}.16b, {2:v}.16b",
            inout(vreg) sum,
            in(vreg) a,
            in(vreg) b,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    sum
}

/// Adds `a[4 l + i] * b[4 LANE + i]`, unsigned, for `i` in 0..4 to each lane `l`.
#[inline]
#[target_feature(enable = "neon,dotprod")]
pub fn udot_lane<const LANE: i32>(mut sum: uint32x4_t, a: uint8x16_t, b: uint8x8_t) -> uint32x4_t {
    const { assert!(0 <= LANE && LANE < 2) };
    // SAFETY: as in `sdot`.
    unsafe {
        asm!(
            "udot {0:v}.4s, {1:v}.16b, {2:v}.4b[{lane}]",
            inout(vreg) sum,
            in(vreg) a,
            in(vreg) b,
            lane = const LANE,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    sum
}

/// Adds `a[4 l + i] * b[4 l + i]`, unsigned, for `i` in 0..4 to both lanes `l`.
#[inline]
#[target_feature(enable = "neon,dotprod")]
pub fn udot_half(mut sum: uint32x2_t, a: uint8x8_t, b: uint8x8_t) -> uint32x2_t {
    // SAFETY: as in `sdot`.
    unsafe {
        asm!(
            "udot {0:v}.2s, {1:v}.8b, {2:v}.8b",
            inout(vreg) sum,
            in(vreg) a,
            in(vreg) b,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    sum
}
