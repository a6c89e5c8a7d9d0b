//! The products of [`super::dots`] on aarch64: tiles of head rows × digit rows in registers. Digits have seven bits, so
//! they are signed bytes, too, and `sdot` multiplies them.

use std::{arch::aarch64::*, ops::Range};

use super::tiles::tiles;
use crate::kernels::{aarch64::dot::sdot, prefetch};

/// Prefetch distance within each row, in bytes. Not measured on a processor.
const PREFETCH_BYTES: usize = 1024;
/// Bytes of a register.
const WIDTH: usize = 16;

/// Computes the dot products.
///
/// # Safety
/// The machine has NEON with dot products; digits are below 128; `out` has a place for each pair of rows of `len`.
pub(super) unsafe fn dots_neon(rows: &[i8], digits: &[u8], len: usize, out: &mut [i32]) {
    // SAFETY: the caller guarantees the ISA and the shapes.
    unsafe { tiles!(tile_neon, 4 by 4, 0, rows, digits, len, out) }
}

/// Multiplies one register tile; returns X. The FIRST tile of some head rows prefetches the rest of them, and every tile
/// the rows `next`, counted from its own first.
///
/// # Safety
/// The machine has NEON with dot products; `rows` has H rows and `digits` X rows of `len` bytes, a multiple of 64, and
/// `out` H elements in each of X rows.
#[target_feature(enable = "neon,dotprod")]
#[expect(clippy::needless_range_loop, reason = "constant bounds, so that sums stay in registers")]
unsafe fn tile_neon<const H: usize, const X: usize, const FIRST: bool>(
    rows: *const i8,
    digits: *const u8,
    len: usize,
    out: *mut i32,
    stride: usize,
    next: Range<usize>,
) -> usize {
    // SAFETY: all reads and writes are within the rows that the caller guarantees.
    unsafe {
        let mut sums = [[vdupq_n_s32(0); X]; H];
        for k in (0..len).step_by(WIDTH) {
            if k % 64 == 0 {
                for row in next.clone() {
                    prefetch::second(rows.wrapping_add(row * len + k));
                }
            }
            let mut weights = [vdupq_n_s8(0); H];
            for h in 0..H {
                let at = rows.add(h * len + k);
                if FIRST && k % 64 == 0 {
                    prefetch::first(at.wrapping_add(PREFETCH_BYTES));
                }
                weights[h] = vld1q_s8(at);
            }
            for x in 0..X {
                let digits = vld1q_s8(digits.add(x * len + k).cast());
                for h in 0..H {
                    sums[h][x] = sdot(sums[h][x], digits, weights[h]);
                }
            }
        }
        for x in 0..X {
            for h in 0..H {
                *out.add(x * stride + h) = vaddvq_s32(sums[h][x]);
            }
        }
        X
    }
}
