//! AVX2: 8 output rows a vector.
//!
//! `vpmaddubsw` makes int16 pairs, at most 2 · 2 · 128 = 512 in magnitude: 64 of them reach −2^15
//! or 64 · 508 = 32512, both still int16; then `vpmaddwd` by ones widens to int32. Codes come as
//! in `avx512`, but that signs become byte masks: a lane's four bits are spread by `vpshufb` and a
//! compare.

use std::arch::x86_64::*;

use super::{CODES_MAX, Expand, Tile, Vectors, Work};
use crate::{
    formats::{
        Format,
        i2_s::I2S,
        layout::Layout,
        tl1::{self, Tl1},
        tl2::{self, Tl2},
    },
    kernels::gemm::Product,
};

/// AVX2.
struct Avx2;

/// Runs the product.
///
/// # Safety
/// The machine has AVX2; `product` keeps its shapes.
pub(in crate::kernels) unsafe fn gemm(product: Product<'_>) {
    // SAFETY: passed on from the caller.
    unsafe {
        match product.format {
            Format::I2S => super::gemm::<Avx2, I2S>(product),
            Format::Tl1 => super::gemm::<Avx2, Tl1>(product),
            Format::Tl2 => super::gemm::<Avx2, Tl2>(product),
        }
    }
}

impl Vectors for Avx2 {
    type Vector = __m256i;
    const LANES: usize = 8;
    const ACCUMULATE_MAX: usize = 64;

    #[inline(always)]
    unsafe fn zero() -> __m256i {
        // SAFETY: the trait's caller has AVX2.
        unsafe { _mm256_setzero_si256() }
    }

    #[inline(always)]
    unsafe fn broadcast(from: *const i8) -> __m256i {
        // SAFETY: the trait's caller has AVX2 and 4 bytes at `from`.
        unsafe { _mm256_set1_epi32(from.cast::<i32>().read_unaligned()) }
    }

    #[inline(always)]
    unsafe fn accumulate(sum: __m256i, codes: __m256i, x: __m256i) -> __m256i {
        // SAFETY: the trait's caller has AVX2.
        unsafe { _mm256_add_epi16(sum, _mm256_maddubs_epi16(codes, x)) }
    }

    #[inline(always)]
    unsafe fn widen(sum: __m256i) -> __m256i {
        // SAFETY: the trait's caller has AVX2.
        unsafe { _mm256_madd_epi16(sum, _mm256_set1_epi16(1)) }
    }

    #[inline(always)]
    unsafe fn add(a: __m256i, b: __m256i) -> __m256i {
        // SAFETY: the trait's caller has AVX2.
        unsafe { _mm256_add_epi32(a, b) }
    }

    #[inline(always)]
    unsafe fn store_less(to: *mut i32, lanes: __m256i, minus: i32) {
        // SAFETY: the trait's caller has AVX2 and 8 places at `to`.
        unsafe {
            _mm256_storeu_si256(to.cast(), _mm256_sub_epi32(lanes, _mm256_set1_epi32(minus)));
        }
    }

    #[target_feature(enable = "avx2")]
    unsafe fn run<E: Expand<Self>, const V: usize, const R: usize, const A: usize>(work: Work) {
        // SAFETY: passed on from the caller.
        unsafe { super::block::<Self, E, V, R, A>(work) }
    }
}

/// The vector's 32 of the 64 bytes of indices of a block.
#[inline(always)]
unsafe fn indices(tile: Tile, block: usize) -> __m256i {
    // SAFETY: `block` is one of the tile's blocks, each of which begins with 64 bytes, and a tile
    // has two vectors.
    unsafe { _mm256_loadu_si256(tile.bytes.add(64 * block + 32 * tile.vector).cast()) }
}

/// The low (`part` 0) or high (1) nibbles.
#[inline(always)]
unsafe fn nibbles(indices: __m256i, part: usize) -> __m256i {
    // SAFETY: the trait's caller has AVX2.
    unsafe {
        let shifted = if part == 0 { indices } else { _mm256_srli_epi16::<4>(indices) };
        _mm256_and_si256(shifted, _mm256_set1_epi8(15))
    }
}

/// A table in both 128-bit halves.
#[inline(always)]
unsafe fn table(table: &[u8; 16]) -> __m256i {
    // SAFETY: the trait's caller has AVX2; the table is 16 bytes.
    unsafe { _mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast())) }
}

impl Expand<Avx2> for I2S {
    const BLOCK_COLS: usize = <Self as Layout>::BLOCK_COLS;
    const PARTS: usize = 4;
    const CODES: usize = 1;

    #[inline(always)]
    unsafe fn codes(tile: Tile, block: usize, part: usize) -> [__m256i; CODES_MAX] {
        // SAFETY: passed on from the caller.
        unsafe {
            let bytes = indices(tile, block);
            let shifted = match part {
                0 => bytes,
                1 => _mm256_srli_epi16::<2>(bytes),
                2 => _mm256_srli_epi16::<4>(bytes),
                _ => _mm256_srli_epi16::<6>(bytes),
            };
            let zero = _mm256_setzero_si256();
            [_mm256_and_si256(shifted, _mm256_set1_epi8(3)), zero, zero]
        }
    }
}

impl Expand<Avx2> for Tl1 {
    const BLOCK_COLS: usize = <Self as Layout>::BLOCK_COLS;
    const PARTS: usize = 2;
    const CODES: usize = 2;

    #[inline(always)]
    unsafe fn codes(tile: Tile, block: usize, part: usize) -> [__m256i; CODES_MAX] {
        // SAFETY: passed on from the caller.
        unsafe {
            let nibbles = nibbles(indices(tile, block), part);
            let code = |digit: usize| _mm256_shuffle_epi8(table(&tl1::CODES[digit]), nibbles);
            [code(0), code(1), _mm256_setzero_si256()]
        }
    }
}

impl Expand<Avx2> for Tl2 {
    const BLOCK_COLS: usize = <Self as Layout>::BLOCK_COLS;
    const PARTS: usize = 2;
    const CODES: usize = 3;

    #[inline(always)]
    unsafe fn codes(tile: Tile, block: usize, part: usize) -> [__m256i; CODES_MAX] {
        // SAFETY: passed on from the caller; a tile has 16 bytes of signs a block after its
        // nibbles, and a vector's 32 signs of a part are 4 of them.
        unsafe {
            let nibbles = nibbles(indices(tile, block), part);
            let signs = 64 * tile.blocks + tl2::SIGN_BYTES * block + 8 * part + 4 * tile.vector;
            let negative = byte_mask(tile.bytes.add(signs).cast::<i32>().read_unaligned());
            let code = |digit: usize| {
                // 2 − code = (code ^ −1) + 3: under the mask, flip and add 3.
                let code = _mm256_shuffle_epi8(table(&tl2::CODES[digit]), nibbles);
                let three = _mm256_and_si256(negative, _mm256_set1_epi8(3));
                _mm256_add_epi8(_mm256_xor_si256(code, negative), three)
            };
            [code(0), code(1), code(2)]
        }
    }
}

/// Bit `i` of 32 → byte `i`, all ones or zero.
#[inline(always)]
unsafe fn byte_mask(bits: i32) -> __m256i {
    // SAFETY: the trait's caller has AVX2.
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
