//! AVX-512: 16 output rows per vector, with and without VNNI.
//!
//! With VNNI, `vpdpbusd` adds four products to an int32 lane, exactly: each product is at most
//! 2 · 128, and `COLS_MAX` bounds the sum. Without it, `vpmaddubsw` makes int16 pairs, at most
//! 2 · 2 · 128 = 512 in magnitude: sums of 64 pairs are between −2^15 and 64 · 508 = 32512, which fits
//! int16, and then `vpmaddwd` by ones widens.
//!
//! `i2_s`: shift and mask (one instruction with GFNI). `tl1`: two `vpshufb` per nibble vector. `tl2`: three `vpshufb` per nibble
//! vector, and `2 − code` under the mask of signs.

use std::{arch::x86_64::*, ops::Range};

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

/// AVX-512 with F, BW, DQ and VL.
pub(super) struct Bw;

/// AVX-512 with VNNI as well.
pub(super) struct Vnni;

/// `$many::<rows, $tiles>`.
macro_rules! by_rows {
    ($many:ident, $work:expr, $rows:expr, $tiles:literal) => {
        match $rows {
            1 => $many::<1, $tiles>($work),
            2 => $many::<2, $tiles>($work),
            3 => $many::<3, $tiles>($work),
            4 => $many::<4, $tiles>($work),
            5 => $many::<5, $tiles>($work),
            6 => $many::<6, $tiles>($work),
            rows => unreachable!("{rows} rows in a group of at most {}", Self::MANY_ROWS),
        }
    };
}

/// The constants and the function of [`many`] for vectors; `$many` is [`many::rows_by_tiles`] with the
/// features enabled.
macro_rules! many_in_vectors {
    ($many:ident) => {
        const MANY_ROWS: usize = 6;
        const MANY_TILES: usize = 4;

        unsafe fn run_many(many: Many<Self>, rows: usize, tiles: usize) {
            // SAFETY: guaranteed by the caller.
            unsafe {
                match tiles {
                    4 => by_rows!($many, many, rows, 4),
                    3 => by_rows!($many, many, rows, 3),
                    2 => by_rows!($many, many, rows, 2),
                    1 => by_rows!($many, many, rows, 1),
                    _ => unreachable!("{tiles} tiles in a group of at most {}", Self::MANY_TILES),
                }
            }
        }
    };
}

/// The common part of all implementations; `$block` and `$expand` are [`block_rows`] and
/// [`many::expand`] with the features enabled.
macro_rules! vectors_512 {
    ($block:ident, $expand:ident, $peak:ident) => {
        type Lanes = __m512i;
        type Broadcast = __m512i;
        const ROWS_MAX: usize = 8;
        const PAIR_ROWS_MIN: usize = 6;
        const FOUR_ROWS: Range<usize> = 3..5;

        #[inline(always)]
        unsafe fn zero() -> __m512i {
            // SAFETY: the caller has AVX-512.
            unsafe { _mm512_setzero_si512() }
        }

        #[inline(always)]
        unsafe fn broadcast(from: *const i8) -> __m512i {
            // SAFETY: the caller has AVX-512 and 4 bytes at `from`.
            unsafe { _mm512_set1_epi32(from.cast::<i32>().read_unaligned()) }
        }

        #[inline(always)]
        unsafe fn splat(value: i32) -> __m512i {
            // SAFETY: the caller has AVX-512.
            unsafe { _mm512_set1_epi32(value) }
        }

        #[inline(always)]
        unsafe fn add(a: __m512i, b: __m512i) -> __m512i {
            // SAFETY: the caller has AVX-512.
            unsafe { _mm512_add_epi32(a, b) }
        }

        #[inline(always)]
        unsafe fn load(from: *const i32) -> __m512i {
            // SAFETY: the caller has AVX-512 and 16 places at `from`.
            unsafe { _mm512_loadu_si512(from.cast()) }
        }

        #[inline(always)]
        unsafe fn store(to: *mut i32, lanes: __m512i) {
            // SAFETY: the caller has AVX-512 and 16 places at `to`.
            unsafe { _mm512_storeu_si512(to.cast(), lanes) }
        }

        unsafe fn expand<E: Expand<Self>>(
            tile: Tile,
            blocks: Range<usize>,
            ahead: usize,
            codes: &mut Codes<Self>,
        ) {
            // SAFETY: guaranteed by the caller.
            unsafe { $expand::<E>(tile, blocks, ahead, codes) }
        }

        unsafe fn run_peak(rounds: usize) {
            // SAFETY: guaranteed by the caller.
            unsafe { $peak(rounds) }
        }

        unsafe fn run<E: Expand<Self>>(work: Work, rows: usize, tiles: usize) {
            // SAFETY: guaranteed by the caller.
            unsafe {
                match (rows, tiles) {
                    (1, 1) => $block::<E, 1, 6, 1>(work),
                    (2, 1) => $block::<E, 2, 6, 1>(work),
                    (3, 1) => $block::<E, 3, 4, 1>(work),
                    (4, 1) => $block::<E, 4, 2, 1>(work),
                    (5, 1) => $block::<E, 5, 2, 1>(work),
                    (6, 1) => $block::<E, 6, 2, 1>(work),
                    (7, 1) => $block::<E, 7, 2, 1>(work),
                    (8, 1) => $block::<E, 8, 2, 1>(work),
                    (3, 4) => $block::<E, 3, 1, 4>(work),
                    (4, 4) => $block::<E, 4, 1, 4>(work),
                    (4, 2) => $block::<E, 4, 2, 2>(work),
                    (5, 2) => $block::<E, 5, 1, 2>(work),
                    (6, 2) => $block::<E, 6, 1, 2>(work),
                    (7, 2) => $block::<E, 7, 1, 2>(work),
                    (8, 2) => $block::<E, 8, 1, 2>(work),
                    _ => unreachable!("{rows} rows and {tiles} tiles in a group"),
                }
            }
        }
    };
}

/// Accumulation by VNNI: sums are 32-bit from the start.
macro_rules! accumulate_by_vnni {
    () => {
        const ACCUMULATE_MAX: usize = usize::MAX;

        #[inline(always)]
        unsafe fn accumulate(sum: __m512i, codes: __m512i, x: __m512i) -> __m512i {
            // SAFETY: the caller has AVX-512 VNNI.
            unsafe { _mm512_dpbusd_epi32(sum, codes, x) }
        }

        #[inline(always)]
        unsafe fn add_widened(total: __m512i, sum: __m512i) -> __m512i {
            // SAFETY: the caller has AVX-512.
            unsafe { _mm512_add_epi32(total, sum) }
        }
    };
}

enabled!(Bw, "avx512f,avx512bw,avx512dq,avx512vl", block_bw, expand_bw, peak_bw, many_bw);
enabled!(
    Vnni,
    "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni",
    block_vnni,
    expand_vnni,
    peak_vnni,
    many_vnni
);

impl Vectors for Bw {
    vectors_512!(block_bw, expand_bw, peak_bw);
    many_in_vectors!(many_bw);
    const MANY_ROWS_MIN: usize = 65;
    const ACCUMULATE_MAX: usize = 64;

    #[inline(always)]
    unsafe fn accumulate(sum: __m512i, codes: __m512i, x: __m512i) -> __m512i {
        // SAFETY: the caller has AVX-512 BW.
        unsafe { _mm512_add_epi16(sum, _mm512_maddubs_epi16(codes, x)) }
    }

    #[inline(always)]
    unsafe fn add_widened(total: __m512i, sum: __m512i) -> __m512i {
        // SAFETY: the caller has AVX-512 BW.
        unsafe { _mm512_add_epi32(total, _mm512_madd_epi16(sum, _mm512_set1_epi16(1))) }
    }
}

impl Vectors for Vnni {
    vectors_512!(block_vnni, expand_vnni, peak_vnni);
    many_in_vectors!(many_vnni);
    const MANY_ROWS_MIN: usize = 65;
    accumulate_by_vnni!();
}

// Declared after the macros that they use.
pub(super) mod amx;
pub(super) mod amx_groups;
pub(super) mod gfni;
mod joins;

/// Returns the 64 bytes of indices of the block at `place`.
#[inline(always)]
unsafe fn indices(tile: Tile, place: usize) -> __m512i {
    // SAFETY: the tile has a block at `place`, with 64 bytes of indices.
    unsafe { _mm512_loadu_si512(tile.bytes.add(place).cast()) }
}

/// Returns the low (`part` 0) or high (1) nibbles.
#[inline(always)]
unsafe fn nibbles(indices: __m512i, part: usize) -> __m512i {
    // SAFETY: the caller has AVX-512.
    unsafe {
        let shifted = if part == 0 { indices } else { _mm512_srli_epi16::<4>(indices) };
        _mm512_and_si512(shifted, _mm512_set1_epi8(15))
    }
}

/// Returns a table in every 128-bit part.
#[inline(always)]
unsafe fn table(table: &[u8; 16]) -> __m512i {
    // SAFETY: the caller has AVX-512; the table is 16 bytes.
    unsafe { _mm512_broadcast_i32x4(_mm_loadu_si128(table.as_ptr().cast())) }
}

/// Takes a part of four 2-bit codes out of every byte.
///
/// # Safety
/// As for [`Vectors`].
pub(super) trait TwoBits: Vectors<Lanes = __m512i> {
    /// See [`Expand::MANY_ROWS_MIN`], for `i2_s`.
    const I2S_MANY_ROWS_MIN: usize = Self::MANY_ROWS_MIN;

    /// Returns bits `2 · part` and `2 · part + 1` of every byte.
    #[inline(always)]
    unsafe fn two_bits(bytes: __m512i, part: usize) -> __m512i {
        // SAFETY: the caller has AVX-512.
        unsafe {
            let shifted = match part {
                0 => bytes,
                1 => _mm512_srli_epi16::<2>(bytes),
                2 => _mm512_srli_epi16::<4>(bytes),
                _ => _mm512_srli_epi16::<6>(bytes),
            };
            _mm512_and_si512(shifted, _mm512_set1_epi8(3))
        }
    }
}

impl TwoBits for Bw {}
impl TwoBits for Vnni {}

impl<T: TwoBits> Expand<T> for I2S {
    const MANY_ROWS_MIN: usize = T::I2S_MANY_ROWS_MIN;

    #[inline(always)]
    unsafe fn codes(tile: Tile, block: usize, part: usize) -> [__m512i; CODES_MAX] {
        // SAFETY: guaranteed by the caller.
        unsafe {
            let zero = _mm512_setzero_si512();
            [T::two_bits(indices(tile, 64 * block), part), zero, zero]
        }
    }
}

impl<T: Vectors<Lanes = __m512i>> Expand<T> for Tl1 {
    #[inline(always)]
    unsafe fn codes(tile: Tile, block: usize, part: usize) -> [__m512i; CODES_MAX] {
        // SAFETY: guaranteed by the caller.
        unsafe {
            let nibbles = nibbles(indices(tile, 64 * block), part);
            let first = _mm512_shuffle_epi8(table(&tl1::CODES[0]), nibbles);
            let second = _mm512_shuffle_epi8(table(&tl1::CODES[1]), nibbles);
            [first, second, _mm512_setzero_si512()]
        }
    }
}

impl<T: Vectors<Lanes = __m512i>> Expand<T> for Tl2 {
    #[inline(always)]
    unsafe fn codes(tile: Tile, block: usize, part: usize) -> [__m512i; CODES_MAX] {
        // SAFETY: guaranteed by the caller; each block has 16 bytes of signs.
        unsafe {
            let nibbles = nibbles(indices(tile, tl2::nibbles_at(block)), part);
            let signs = tile.bytes.add(tl2::signs_at(block) + 8 * part);
            let negative = signs.cast::<u64>().read_unaligned();
            let two = _mm512_set1_epi8(2);
            let mut codes = [_mm512_setzero_si512(); CODES_MAX];
            for (code, digits) in codes.iter_mut().zip(&tl2::CODES) {
                let positive = _mm512_shuffle_epi8(table(digits), nibbles);
                *code = _mm512_mask_sub_epi8(positive, negative, two, positive);
            }
            codes
        }
    }
}
