//! The products of [`super::dots`] on x86-64: tiles of head rows × digit rows in registers.

use std::{arch::x86_64::*, ops::Range, sync::LazyLock};

use super::tiles::tiles;

pub(super) mod amx;
pub(super) mod six;

/// Returns whether this machine has AVX-512 VNNI.
pub(in crate::kernels) fn has_vnni() -> bool {
    static VNNI: LazyLock<bool> = LazyLock::new(|| is_x86_feature_detected!("avx512vnni"));
    *VNNI
}

/// Returns whether this machine has AVX-VNNI, the instructions of VNNI for vectors of 256 bits.
pub(super) fn has_avx_vnni() -> bool {
    static AVX_VNNI: LazyLock<bool> = LazyLock::new(|| is_x86_feature_detected!("avxvnni"));
    *AVX_VNNI
}

/// Prefetch distance within each row, in bytes.
const PREFETCH_BYTES: usize = 1024;

/// Computes the dot products with the head rows from `first` on.
///
/// # Safety
/// The machine has AVX-512 F, BW, DQ and VL; `out` has a place for each pair of rows of `len`.
pub(super) unsafe fn dots_avx512(
    first: usize,
    rows: &[i8],
    digits: &[u8],
    len: usize,
    out: &mut [i32],
) {
    // SAFETY: the caller guarantees the ISA and the shapes; VNNI is checked.
    unsafe {
        if has_vnni() && first == 0 && rows.len() == len && digits.len() == len {
            out[0] = dot_vnni(rows, digits);
        } else if has_vnni() {
            tiles!(tile_vnni, 6 by 4, first, rows, digits, len, out);
        } else {
            tiles!(tile_bw, 6 by 4, first, rows, digits, len, out);
        }
    }
}

/// Returns the dot product of two rows of the same length, a multiple of [`STRIDE`](super::STRIDE), by several sums: the next
/// instruction need not wait for the last.
///
/// # Safety
/// The machine has the features.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn dot_vnni(row: &[i8], digits: &[u8]) -> i32 {
    const SUMS: usize = 4;
    const { assert!(super::STRIDE.is_multiple_of(64 * SUMS)) };
    let mut sums = [_mm512_setzero_si512(); SUMS];
    for (row, digits) in row.chunks_exact(64 * SUMS).zip(digits.chunks_exact(64 * SUMS)) {
        for (at, sum) in sums.iter_mut().enumerate() {
            // SAFETY: both have SUMS vectors.
            let (row, digits) = unsafe {
                (
                    _mm512_loadu_si512(row.as_ptr().add(64 * at).cast()),
                    _mm512_loadu_si512(digits.as_ptr().add(64 * at).cast()),
                )
            };
            *sum = _mm512_dpbusd_epi32(*sum, digits, row);
        }
    }
    let [a, b, c, d] = sums;
    _mm512_reduce_add_epi32(_mm512_add_epi32(_mm512_add_epi32(a, b), _mm512_add_epi32(c, d)))
}

/// # Safety
/// As for [`dots_avx512`], with AVX2; `vnni` only where [`has_avx_vnni`] holds.
pub(super) unsafe fn dots_avx2(
    vnni: bool,
    rows: &[i8],
    digits: &[u8],
    len: usize,
    out: &mut [i32],
) {
    // SAFETY: the caller guarantees the ISA and the shapes.
    unsafe {
        if vnni {
            tiles!(tile_avx_vnni, 4 by 3, 0, rows, digits, len, out);
        } else {
            tiles!(tile_avx2, 4 by 3, 0, rows, digits, len, out);
        }
    }
}

/// One register tile. The FIRST tile of some head rows prefetches the rest of them, and every tile the rows `next`, counted
/// from its own first, into the second cache, which has room for more requests. A vector has `$width` bytes;
/// `$add(sum, digits, weights)` adds products to int32 lanes, `$reduce` sums all lanes of a vector, `$reduce_four` all lanes
/// of each of four vectors.
macro_rules! tile {
    ($name:ident, $features:literal, $width:literal, $zero:expr, $load:ident, $cast:ty, $add:ident,
     $reduce:ident, $reduce_four:ident) => {
        /// # Safety
        /// The machine has the features; `rows` has H rows and `digits` X rows of `len` bytes, a
        /// multiple of 64, and `out` H elements in each of X rows.
        #[target_feature(enable = $features)]
        unsafe fn $name<const H: usize, const X: usize, const FIRST: bool>(
            rows: *const i8,
            digits: *const u8,
            len: usize,
            out: *mut i32,
            stride: usize,
            next: Range<usize>,
        ) -> usize {
            // SAFETY: all reads and writes are within the rows that the caller guarantees.
            unsafe {
                let mut sums = [[$zero; X]; H];
                for k in (0..len).step_by($width) {
                    if k % 64 == 0 {
                        for row in next.clone() {
                            _mm_prefetch::<_MM_HINT_T1>(rows.wrapping_add(row * len + k).cast());
                        }
                    }
                    let mut weights = [$zero; H];
                    for h in 0..H {
                        let at = rows.add(h * len + k);
                        if FIRST && k % 64 == 0 {
                            _mm_prefetch::<_MM_HINT_T0>(at.wrapping_add(PREFETCH_BYTES).cast());
                        }
                        weights[h] = $load(at.cast::<$cast>());
                    }
                    for x in 0..X {
                        let digits = $load(digits.add(x * len + k).cast::<$cast>());
                        for h in 0..H {
                            sums[h][x] = $add(sums[h][x], digits, weights[h]);
                        }
                    }
                }
                for x in 0..X {
                    let out = out.add(x * stride);
                    let fours = H - H % 4;
                    for h in (0..fours).step_by(4) {
                        let four = [sums[h][x], sums[h + 1][x], sums[h + 2][x], sums[h + 3][x]];
                        _mm_storeu_si128(out.add(h).cast(), $reduce_four(four));
                    }
                    for h in fours..H {
                        *out.add(h) = $reduce(sums[h][x]);
                    }
                }
                X
            }
        }
    };
}

tile!(
    tile_vnni,
    "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni",
    64,
    _mm512_setzero_si512(),
    _mm512_loadu_si512,
    __m512i,
    _mm512_dpbusd_epi32,
    _mm512_reduce_add_epi32,
    sums_of_four_512
);
tile!(
    tile_bw,
    "avx512f,avx512bw,avx512dq,avx512vl",
    64,
    _mm512_setzero_si512(),
    _mm512_loadu_si512,
    __m512i,
    add_bw,
    _mm512_reduce_add_epi32,
    sums_of_four_512
);
tile!(
    tile_avx_vnni,
    "avx2,avxvnni",
    32,
    _mm256_setzero_si256(),
    _mm256_loadu_si256,
    __m256i,
    _mm256_dpbusd_avx_epi32,
    sum_avx2,
    sums_of_four_256
);
tile!(
    tile_avx2,
    "avx2",
    32,
    _mm256_setzero_si256(),
    _mm256_loadu_si256,
    __m256i,
    add_avx2,
    sum_avx2,
    sums_of_four_256
);

/// Returns the sum of all lanes of each of four vectors.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq")]
fn sums_of_four_512(of: [__m512i; 4]) -> __m128i {
    let halves = of.map(|lanes| {
        let (low, high) = (_mm512_castsi512_si256(lanes), _mm512_extracti64x4_epi64::<1>(lanes));
        _mm256_add_epi32(low, high)
    });
    sums_of_four_256(halves)
}

/// Returns the sum of all lanes of each of four vectors.
#[inline]
#[target_feature(enable = "avx2")]
fn sums_of_four_256([a, b, c, d]: [__m256i; 4]) -> __m128i {
    let four = _mm256_hadd_epi32(_mm256_hadd_epi32(a, b), _mm256_hadd_epi32(c, d));
    _mm_add_epi32(_mm256_castsi256_si128(four), _mm256_extracti128_si256::<1>(four))
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn add_bw(sum: __m512i, digits: __m512i, weights: __m512i) -> __m512i {
    let pairs = _mm512_maddubs_epi16(digits, weights);
    _mm512_add_epi32(sum, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)))
}

#[inline]
#[target_feature(enable = "avx2")]
fn add_avx2(sum: __m256i, digits: __m256i, weights: __m256i) -> __m256i {
    let pairs = _mm256_maddubs_epi16(digits, weights);
    _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
}

#[inline]
#[target_feature(enable = "avx2")]
fn sum_avx2(lanes: __m256i) -> i32 {
    let four = _mm_add_epi32(_mm256_castsi256_si128(lanes), _mm256_extracti128_si256::<1>(lanes));
    let two = _mm_add_epi32(four, _mm_shuffle_epi32::<0b1110>(four));
    _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32::<0b01>(two)))
}
