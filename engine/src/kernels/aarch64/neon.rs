//! NEON with dot products: a tile's 16 output rows in four vectors.
//!
//! - Weights: `i2_s`, `tl1` or `tl2` tiles; a code vector is 64 bytes, four unsigned codes (0, 1 or 2) for each row.
//! - Activations: int8, four of a row in every lane. They are padded with zeros, so every block is whole.
//! - Accumulators: int32. `sdot` adds four products, each at most 2 · 128 in magnitude, and `COLS_MAX` bounds the sum, so
//!   it is exact and never widened.
//! - Bytes of weights per multiply-add: 1/4 (`i2_s`, `tl1`) or 5/24 (`tl2`), divided by the rows of a group.
//!
//! `i2_s`: shift and mask. `tl1`: two `tbl` per nibble vector. `tl2`: three `tbl` per nibble vector, and `2 − code` where
//! the sign bit is set: `tbl` and `cmtst` spread the bits of sixteen bytes.
//!
//! The sizes of groups follow from the 32 registers: four for each sum of a tile, and four for a code vector. They were
//! not measured on a processor.

use std::{arch::aarch64::*, ops::Range};

use super::dot::sdot;
use crate::{
    formats::{
        i2_s::I2S,
        tl1::{self, Tl1},
        tl2::{self, Tl2},
    },
    kernels::generic::{
        blocks::block_rows,
        enabled, many, peak,
        vectors::{CODES_MAX, Codes, Expand, Many, Tile, Vectors, Work},
    },
};

/// NEON with dot products.
pub(super) struct Neon;

/// Registers of a tile's 16 lanes.
const PARTS: usize = 4;

/// A tile's 16 lanes.
type Lanes = [int32x4_t; PARTS];

enabled!(Neon, "neon,dotprod", block_neon, expand_neon, peak_neon, many_neon);

impl Vectors for Neon {
    type Lanes = Lanes;
    type Broadcast = int8x16_t;
    const ROWS_MAX: usize = 4;
    const PAIR_ROWS_MIN: usize = usize::MAX;
    const FOUR_ROWS: Range<usize> = 0..0;
    const MANY_ROWS_MIN: usize = 9;
    const MANY_ROWS: usize = 6;
    const MANY_TILES: usize = 1;
    const ACCUMULATE_MAX: usize = usize::MAX;
    const PEAK_SUMS: usize = 6;

    #[inline(always)]
    unsafe fn zero() -> Lanes {
        // SAFETY: the caller has NEON.
        unsafe { [vdupq_n_s32(0); PARTS] }
    }

    #[inline(always)]
    unsafe fn broadcast(from: *const i8) -> int8x16_t {
        // SAFETY: the caller has NEON and 4 bytes at `from`.
        unsafe { vreinterpretq_s8_s32(vdupq_n_s32(from.cast::<i32>().read_unaligned())) }
    }

    #[inline(always)]
    unsafe fn accumulate(mut sum: Lanes, codes: Lanes, x: int8x16_t) -> Lanes {
        for (sum, codes) in sum.iter_mut().zip(codes) {
            // SAFETY: the caller has NEON with dot products.
            *sum = unsafe { sdot(*sum, vreinterpretq_s8_s32(codes), x) };
        }
        sum
    }

    #[inline(always)]
    unsafe fn add_widened(total: Lanes, sum: Lanes) -> Lanes {
        // SAFETY: guaranteed by the caller.
        unsafe { Self::add(total, sum) }
    }

    #[inline(always)]
    unsafe fn splat(value: i32) -> Lanes {
        // SAFETY: the caller has NEON.
        unsafe { [vdupq_n_s32(value); PARTS] }
    }

    #[inline(always)]
    unsafe fn add(mut a: Lanes, b: Lanes) -> Lanes {
        for (a, b) in a.iter_mut().zip(b) {
            // SAFETY: the caller has NEON.
            *a = unsafe { vaddq_s32(*a, b) };
        }
        a
    }

    #[inline(always)]
    unsafe fn load(from: *const i32) -> Lanes {
        // SAFETY: the caller has NEON and 16 places at `from`.
        unsafe {
            [
                vld1q_s32(from),
                vld1q_s32(from.add(4)),
                vld1q_s32(from.add(8)),
                vld1q_s32(from.add(12)),
            ]
        }
    }

    #[inline(always)]
    unsafe fn store(to: *mut i32, lanes: Lanes) {
        for (part, lanes) in lanes.into_iter().enumerate() {
            // SAFETY: the caller has NEON and 16 places at `to`.
            unsafe { vst1q_s32(to.add(4 * part), lanes) };
        }
    }

    unsafe fn expand<E: Expand<Self>>(
        tile: Tile,
        blocks: Range<usize>,
        ahead: usize,
        codes: &mut Codes<Self>,
    ) {
        // SAFETY: guaranteed by the caller.
        unsafe { expand_neon::<E>(tile, blocks, ahead, codes) }
    }

    unsafe fn run_peak(rounds: usize) {
        // SAFETY: guaranteed by the caller.
        unsafe { peak_neon(rounds) }
    }

    unsafe fn run_many(many: Many<Self>, rows: usize, tiles: usize) {
        // SAFETY: guaranteed by the caller.
        unsafe {
            match (rows, tiles) {
                (1, 1) => many_neon::<1, 1>(many),
                (2, 1) => many_neon::<2, 1>(many),
                (3, 1) => many_neon::<3, 1>(many),
                (4, 1) => many_neon::<4, 1>(many),
                (5, 1) => many_neon::<5, 1>(many),
                (6, 1) => many_neon::<6, 1>(many),
                _ => unreachable!("{rows} rows and {tiles} tiles in a group"),
            }
        }
    }

    unsafe fn run<E: Expand<Self>>(work: Work, rows: usize, tiles: usize) {
        // SAFETY: guaranteed by the caller.
        unsafe {
            match (rows, tiles) {
                (1, 1) => block_neon::<E, 1, 4, 1>(work),
                (2, 1) => block_neon::<E, 2, 2, 1>(work),
                (3, 1) => block_neon::<E, 3, 1, 1>(work),
                (4, 1) => block_neon::<E, 4, 1, 1>(work),
                _ => unreachable!("{rows} rows and {tiles} tiles in a group"),
            }
        }
    }
}

/// Part `part` of the 64 bytes of indices of the block at `place`.
#[inline(always)]
unsafe fn indices(tile: Tile, place: usize, part: usize) -> uint8x16_t {
    // SAFETY: the tile has a block at `place`, with 64 bytes of indices.
    unsafe { vld1q_u8(tile.bytes.add(place + 16 * part)) }
}

/// Returns the low (`half` 0) or high (1) nibbles.
#[inline(always)]
unsafe fn nibbles(indices: uint8x16_t, half: usize) -> uint8x16_t {
    // SAFETY: the caller has NEON.
    unsafe {
        match half {
            0 => vandq_u8(indices, vdupq_n_u8(15)),
            _ => vshrq_n_u8::<4>(indices),
        }
    }
}

/// Returns the entries of a table at indices below 16.
#[inline(always)]
unsafe fn look_up(table: &[u8; 16], indices: uint8x16_t) -> uint8x16_t {
    // SAFETY: the caller has NEON; the table is 16 bytes.
    unsafe { vqtbl1q_u8(vld1q_u8(table.as_ptr()), indices) }
}

impl Expand<Neon> for I2S {
    #[inline(always)]
    unsafe fn codes(tile: Tile, block: usize, part: usize) -> [Lanes; CODES_MAX] {
        // SAFETY: guaranteed by the caller.
        unsafe {
            let mut codes = [Neon::zero(); CODES_MAX];
            // To the left by a negative number. A shift by a constant would need a branch where the compiler keeps the
            // loop over parts.
            let shift = vdupq_n_s8(-2 * (part as i8));
            for (quarter, codes) in codes[0].iter_mut().enumerate() {
                let shifted = vshlq_u8(indices(tile, 64 * block, quarter), shift);
                *codes = vreinterpretq_s32_u8(vandq_u8(shifted, vdupq_n_u8(3)));
            }
            codes
        }
    }
}

impl Expand<Neon> for Tl1 {
    #[inline(always)]
    unsafe fn codes(tile: Tile, block: usize, part: usize) -> [Lanes; CODES_MAX] {
        // SAFETY: guaranteed by the caller.
        unsafe {
            let mut codes = [Neon::zero(); CODES_MAX];
            for quarter in 0..PARTS {
                let nibbles = nibbles(indices(tile, 64 * block, quarter), part);
                for (codes, digits) in codes.iter_mut().zip(&tl1::CODES) {
                    codes[quarter] = vreinterpretq_s32_u8(look_up(digits, nibbles));
                }
            }
            codes
        }
    }
}

impl Expand<Neon> for Tl2 {
    #[inline(always)]
    unsafe fn codes(tile: Tile, block: usize, part: usize) -> [Lanes; CODES_MAX] {
        // SAFETY: guaranteed by the caller; each block has 16 bytes of signs, 8 for each part.
        unsafe {
            let signs = vld1_u8(tile.bytes.add(tl2::signs_at(block) + 8 * part));
            let mut codes = [Neon::zero(); CODES_MAX];
            for quarter in 0..PARTS {
                let nibbles = nibbles(indices(tile, tl2::nibbles_at(block), quarter), part);
                let negative = byte_mask(signs, quarter);
                // 2 − code = (code ^ −1) + 3: under the mask, flip and add 3.
                let three = vandq_u8(negative, vdupq_n_u8(3));
                for (codes, digits) in codes.iter_mut().zip(&tl2::CODES) {
                    let flipped = veorq_u8(look_up(digits, nibbles), negative);
                    codes[quarter] = vreinterpretq_s32_u8(vaddq_u8(flipped, three));
                }
            }
            codes
        }
    }
}

/// Spreads bit `16 quarter + i` of 64 to byte `i`, all ones or zero.
#[inline(always)]
unsafe fn byte_mask(bits: uint8x8_t, quarter: usize) -> uint8x16_t {
    const BITS: [u8; 8] = [1, 2, 4, 8, 16, 32, 64, 128];
    // SAFETY: the caller has NEON; there are eight bits in a byte.
    unsafe {
        let first = 2 * quarter as u8;
        let places = vcombine_u8(vdup_n_u8(first), vdup_n_u8(first + 1));
        let bytes = vqtbl1q_u8(vcombine_u8(bits, bits), places);
        let bit = vld1_u8(BITS.as_ptr());
        vtstq_u8(bytes, vcombine_u8(bit, bit))
    }
}
