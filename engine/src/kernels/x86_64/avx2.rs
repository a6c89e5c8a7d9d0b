//! AVX2: a tile's 16 output rows in two vectors, with and without VNNI.
//!
//! Without VNNI, `vpmaddubsw` makes int16 pairs, at most 2 · 2 · 128 = 512 in magnitude: sums of 64 pairs are
//! between −2^15 and 64 · 508 = 32512, which fits int16; then `vpmaddwd` by ones widens to int32.
//! Codes are expanded as in `avx512`, except that signs become byte masks: `vpshufb` and a compare
//! spread a lane's four bits.

use std::{arch::x86_64::*, ops::Range};

use half::f16;

use super::{
    groups::{self, GroupWork, Join, enabled_groups},
    many_groups::{self, ManyGroups, ManyJoin, enabled_many_groups},
};
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

/// AVX2.
pub(super) struct Avx2;

/// A tile's 16 lanes.
type Lanes = [__m256i; 2];

enabled!(Avx2, "avx2", block_avx2, expand_avx2, peak_avx2, many_avx2);

/// The common part of both implementations; `$expand` and `$peak` are [`many::expand`] and [`peak::accumulate_all`] with
/// the features enabled.
macro_rules! vectors_256 {
    ($expand:ident, $peak:ident) => {
        type Lanes = Lanes;
        type Broadcast = __m256i;
        const PAIR_ROWS_MIN: usize = usize::MAX;
        const FOUR_ROWS: Range<usize> = 0..0;
        const MANY_TILES: usize = 1;
        // Two vectors for each sum, of sixteen registers.
        const PEAK_SUMS: usize = 6;

        #[inline(always)]
        unsafe fn zero() -> Lanes {
            // SAFETY: the caller has AVX2.
            unsafe { [_mm256_setzero_si256(); 2] }
        }

        #[inline(always)]
        unsafe fn broadcast(from: *const i8) -> __m256i {
            // SAFETY: the caller has AVX2 and 4 bytes at `from`.
            unsafe { _mm256_set1_epi32(from.cast::<i32>().read_unaligned()) }
        }

        #[inline(always)]
        unsafe fn splat(value: i32) -> Lanes {
            // SAFETY: the caller has AVX2.
            unsafe { [_mm256_set1_epi32(value); 2] }
        }

        #[inline(always)]
        unsafe fn add(a: Lanes, b: Lanes) -> Lanes {
            // SAFETY: the caller has AVX2.
            unsafe { [_mm256_add_epi32(a[0], b[0]), _mm256_add_epi32(a[1], b[1])] }
        }

        #[inline(always)]
        unsafe fn load(from: *const i32) -> Lanes {
            // SAFETY: the caller has AVX2 and 16 places at `from`.
            unsafe { [_mm256_loadu_si256(from.cast()), _mm256_loadu_si256(from.add(8).cast())] }
        }

        #[inline(always)]
        unsafe fn store(to: *mut i32, lanes: Lanes) {
            // SAFETY: the caller has AVX2 and 16 places at `to`.
            unsafe {
                _mm256_storeu_si256(to.cast(), lanes[0]);
                _mm256_storeu_si256(to.add(8).cast(), lanes[1]);
            }
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
    };
}

impl Vectors for Avx2 {
    vectors_256!(expand_avx2, peak_avx2);
    const ROWS_MAX: usize = 3;
    const MANY_ROWS_MIN: usize = 8;
    const MANY_ROWS: usize = 4;
    const ACCUMULATE_MAX: usize = 64;

    #[inline(always)]
    unsafe fn accumulate(sum: Lanes, codes: Lanes, x: __m256i) -> Lanes {
        // SAFETY: the caller has AVX2.
        unsafe {
            [
                _mm256_add_epi16(sum[0], _mm256_maddubs_epi16(codes[0], x)),
                _mm256_add_epi16(sum[1], _mm256_maddubs_epi16(codes[1], x)),
            ]
        }
    }

    #[inline(always)]
    unsafe fn add_widened(total: Lanes, sum: Lanes) -> Lanes {
        // SAFETY: the caller has AVX2.
        unsafe {
            let ones = _mm256_set1_epi16(1);
            [
                _mm256_add_epi32(total[0], _mm256_madd_epi16(sum[0], ones)),
                _mm256_add_epi32(total[1], _mm256_madd_epi16(sum[1], ones)),
            ]
        }
    }

    unsafe fn run_many(many: Many<Self>, rows: usize, tiles: usize) {
        // SAFETY: guaranteed by the caller.
        unsafe {
            match (rows, tiles) {
                (1, 1) => many_avx2::<1, 1>(many),
                (2, 1) => many_avx2::<2, 1>(many),
                (3, 1) => many_avx2::<3, 1>(many),
                (4, 1) => many_avx2::<4, 1>(many),
                _ => unreachable!("{rows} rows and {tiles} tiles in a group"),
            }
        }
    }

    unsafe fn run<E: Expand<Self>>(work: Work, rows: usize, tiles: usize) {
        // SAFETY: guaranteed by the caller.
        unsafe {
            match (rows, tiles) {
                (1, 1) => block_avx2::<E, 1, 2, 1>(work),
                (2, 1) => block_avx2::<E, 2, 1, 1>(work),
                (3, 1) => block_avx2::<E, 3, 1, 1>(work),
                _ => unreachable!("{rows} rows and {tiles} tiles in a group"),
            }
        }
    }
}

enabled_groups!(Avx2, "avx2,fma,f16c", groups_avx2);
enabled_many_groups!(Avx2, "avx2,fma,f16c", many_groups_avx2);

/// Implements [`Join`]; `$groups` is [`groups::rows_by_groups`] with the features enabled.
macro_rules! join_256 {
    ($vectors:ty, $groups:ident) => {
        impl Join for $vectors {
            type Floats = [__m256; 2];
            const GROUP_ROWS: usize = 3;

            #[inline(always)]
            unsafe fn no_floats() -> [__m256; 2] {
                // SAFETY: the caller has AVX2.
                unsafe { [_mm256_setzero_ps(); 2] }
            }

            #[inline(always)]
            unsafe fn load_floats(from: *const f32) -> [__m256; 2] {
                // SAFETY: the caller has AVX2 and 16 values at `from`.
                unsafe { [_mm256_loadu_ps(from), _mm256_loadu_ps(from.add(8))] }
            }

            #[inline(always)]
            unsafe fn store_floats(to: *mut f32, floats: [__m256; 2]) {
                // SAFETY: the caller has AVX2 and 16 places at `to`.
                unsafe {
                    _mm256_storeu_ps(to, floats[0]);
                    _mm256_storeu_ps(to.add(8), floats[1]);
                }
            }

            #[inline(always)]
            unsafe fn load_scales(from: *const f16) -> [__m256; 2] {
                // SAFETY: the caller has F16C and 16 values at `from`.
                unsafe {
                    let half = |half: usize| _mm_loadu_si128(from.add(8 * half).cast());
                    [_mm256_cvtph_ps(half(0)), _mm256_cvtph_ps(half(1))]
                }
            }

            #[inline(always)]
            unsafe fn shifted(lanes: Lanes) -> Lanes {
                // SAFETY: the caller has AVX2.
                unsafe { [_mm256_slli_epi32::<8>(lanes[0]), _mm256_slli_epi32::<8>(lanes[1])] }
            }

            #[inline(always)]
            unsafe fn join(
                y: [__m256; 2],
                sum: Lanes,
                scales: [__m256; 2],
                scale: f32,
            ) -> [__m256; 2] {
                // SAFETY: the caller has AVX2 and FMA.
                unsafe {
                    let scale = _mm256_set1_ps(scale);
                    let low = _mm256_mul_ps(scales[0], scale);
                    let high = _mm256_mul_ps(scales[1], scale);
                    [
                        _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum[0]), low, y[0]),
                        _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum[1]), high, y[1]),
                    ]
                }
            }

            unsafe fn run_groups<E: Expand<Self>>(work: GroupWork, rows: usize, digits: usize) {
                // SAFETY: guaranteed by the caller.
                unsafe {
                    match (rows, digits) {
                        (1, 1) => $groups::<E, 1, 1, 2>(work),
                        (2, 1) => $groups::<E, 2, 1, 2>(work),
                        (3, 1) => $groups::<E, 3, 1, 1>(work),
                        (1, 2) => $groups::<E, 1, 2, 2>(work),
                        (2, 2) => $groups::<E, 2, 2, 1>(work),
                        (3, 2) => $groups::<E, 3, 2, 1>(work),
                        _ => unreachable!("{rows} rows of {digits} digits in a set"),
                    }
                }
            }
        }
    };
}

join_256!(Avx2, groups_avx2);

/// Implements [`ManyJoin`], with codes expanded once for `$from` rows or more; `$many` is [`many_groups::rows_by_tiles`] with
/// the features enabled.
macro_rules! many_join_256 {
    ($vectors:ty, $many:ident, $from:expr) => {
        impl ManyJoin for $vectors {
            const MANY: [(usize, usize); 2] = [(6, 1), (3, 1)];
            const MANY_GROUP_ROWS_MIN: [usize; 2] = $from;

            unsafe fn run_many_groups(
                many: ManyGroups<Self>,
                rows: usize,
                digits: usize,
                tiles: usize,
            ) {
                // SAFETY: guaranteed by the caller.
                unsafe {
                    match (rows, digits, tiles) {
                        (1, 1, 1) => $many::<1, 1, 1>(many),
                        (2, 1, 1) => $many::<2, 1, 1>(many),
                        (3, 1, 1) => $many::<3, 1, 1>(many),
                        (4, 1, 1) => $many::<4, 1, 1>(many),
                        (5, 1, 1) => $many::<5, 1, 1>(many),
                        (6, 1, 1) => $many::<6, 1, 1>(many),
                        (1, 2, 1) => $many::<1, 2, 1>(many),
                        (2, 2, 1) => $many::<2, 2, 1>(many),
                        (3, 2, 1) => $many::<3, 2, 1>(many),
                        _ => unreachable!(
                            "{rows} rows of {digits} digits and {tiles} tiles in a set"
                        ),
                    }
                }
            }
        }
    };
}

many_join_256!(Avx2, many_groups_avx2, [16, 8]);

/// Half `half` of the 64 bytes of indices of the block at `place`.
#[inline(always)]
unsafe fn indices(tile: Tile, place: usize, half: usize) -> __m256i {
    // SAFETY: the tile has a block at `place`, with 64 bytes of indices.
    unsafe { _mm256_loadu_si256(tile.bytes.add(place + 32 * half).cast()) }
}

/// Returns the low (`part` 0) or high (1) nibbles.
#[inline(always)]
unsafe fn nibbles(indices: __m256i, part: usize) -> __m256i {
    // SAFETY: the caller has AVX2.
    unsafe {
        let shifted = if part == 0 { indices } else { _mm256_srli_epi16::<4>(indices) };
        _mm256_and_si256(shifted, _mm256_set1_epi8(15))
    }
}

/// Returns a table in both 128-bit halves.
#[inline(always)]
unsafe fn table(table: &[u8; 16]) -> __m256i {
    // SAFETY: the caller has AVX2; the table is 16 bytes.
    unsafe { _mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast())) }
}

/// Implements [`Expand`] for all formats.
macro_rules! expand_256 {
    ($vectors:ty) => {
        impl Expand<$vectors> for I2S {
            #[inline(always)]
            unsafe fn codes(tile: Tile, block: usize, part: usize) -> [Lanes; CODES_MAX] {
                // SAFETY: guaranteed by the caller.
                unsafe {
                    let mut codes = [[_mm256_setzero_si256(); 2]; CODES_MAX];
                    for (half, codes) in codes[0].iter_mut().enumerate() {
                        let bytes = indices(tile, 64 * block, half);
                        let shifted = match part {
                            0 => bytes,
                            1 => _mm256_srli_epi16::<2>(bytes),
                            2 => _mm256_srli_epi16::<4>(bytes),
                            _ => _mm256_srli_epi16::<6>(bytes),
                        };
                        *codes = _mm256_and_si256(shifted, _mm256_set1_epi8(3));
                    }
                    codes
                }
            }
        }

        impl Expand<$vectors> for Tl1 {
            #[inline(always)]
            unsafe fn codes(tile: Tile, block: usize, part: usize) -> [Lanes; CODES_MAX] {
                // SAFETY: guaranteed by the caller.
                unsafe {
                    let mut codes = [[_mm256_setzero_si256(); 2]; CODES_MAX];
                    for half in 0..2 {
                        let nibbles = nibbles(indices(tile, 64 * block, half), part);
                        for (codes, digits) in codes.iter_mut().zip(&tl1::CODES) {
                            codes[half] = _mm256_shuffle_epi8(table(digits), nibbles);
                        }
                    }
                    codes
                }
            }
        }

        impl Expand<$vectors> for Tl2 {
            #[inline(always)]
            unsafe fn codes(tile: Tile, block: usize, part: usize) -> [Lanes; CODES_MAX] {
                // SAFETY: guaranteed by the caller; each block has 16 bytes of signs, and half a part's lanes
                // use 4 bytes.
                unsafe {
                    let signs = tile.bytes.add(tl2::signs_at(block) + 8 * part);
                    let mut codes = [[_mm256_setzero_si256(); 2]; CODES_MAX];
                    for half in 0..2 {
                        let nibbles = nibbles(indices(tile, tl2::nibbles_at(block), half), part);
                        let negative =
                            byte_mask(signs.add(4 * half).cast::<i32>().read_unaligned());
                        // 2 − code = (code ^ −1) + 3: under the mask, flip and add 3.
                        let three = _mm256_and_si256(negative, _mm256_set1_epi8(3));
                        for (codes, digits) in codes.iter_mut().zip(&tl2::CODES) {
                            let positive = _mm256_shuffle_epi8(table(digits), nibbles);
                            codes[half] =
                                _mm256_add_epi8(_mm256_xor_si256(positive, negative), three);
                        }
                    }
                    codes
                }
            }
        }
    };
}

expand_256!(Avx2);

/// Spreads bit `i` of 32 to byte `i`, all ones or zero.
#[inline(always)]
unsafe fn byte_mask(bits: i32) -> __m256i {
    // SAFETY: the caller has AVX2.
    unsafe {
        let spread = _mm256_setr_epi64x(
            0,
            0x0101_0101_0101_0101,
            0x0202_0202_0202_0202,
            0x0303_0303_0303_0303,
        );
        let bytes = _mm256_shuffle_epi8(_mm256_set1_epi32(bits), spread);
        let bit = _mm256_set1_epi64x(0x8040_2010_0804_0201_u64.cast_signed());
        _mm256_cmpeq_epi8(_mm256_and_si256(bytes, bit), bit)
    }
}

// Declared after the macros that it uses.
pub(super) mod vnni;
