//! The products of [`super::dots`] on x86-64: tiles of head rows × digit rows in registers.

use std::{arch::x86_64::*, sync::LazyLock};

pub(super) mod amx;

/// Whether AVX-512 comes with VNNI here.
pub(super) fn has_vnni() -> bool {
    static VNNI: LazyLock<bool> = LazyLock::new(|| is_x86_feature_detected!("avx512vnni"));
    *VNNI
}

/// How far ahead of the bytes in hand the next ones of each row are fetched.
const PREFETCH_BYTES: usize = 1024;

/// Calls `$tile::<H, X>` for all tiles of at most 4 head rows, from the first given on, and 6 digit
/// rows.
macro_rules! tiles {
    ($tile:ident, $first:expr, $rows:ident, $digits:ident, $len:ident, $out:ident) => {{
        let (r, n) = ($rows.len() / $len, $digits.len() / $len);
        let mut row = $first;
        while row < r {
            let height = if r - row >= 4 { 4 } else { 1 };
            let mut x = 0;
            while x < n {
                let from = $rows.as_ptr().add(row * $len);
                let digits = $digits.as_ptr().add(x * $len);
                let to = $out.as_mut_ptr().add(x * r + row);
                x += match (height, n - x) {
                    (4, 6..) => $tile::<4, 6>(from, digits, $len, to, r),
                    (4, 4..) => $tile::<4, 4>(from, digits, $len, to, r),
                    (4, 2..) => $tile::<4, 2>(from, digits, $len, to, r),
                    (4, _) => $tile::<4, 1>(from, digits, $len, to, r),
                    (_, 4..) => $tile::<1, 4>(from, digits, $len, to, r),
                    _ => $tile::<1, 1>(from, digits, $len, to, r),
                };
            }
            row += height;
        }
    }};
}

/// Products with the head rows from `first` on.
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
    // SAFETY: the caller vouches for the ISA and the shapes; VNNI is looked for.
    unsafe {
        if has_vnni() {
            tiles!(tile_vnni, first, rows, digits, len, out);
        } else {
            tiles!(tile_bw, first, rows, digits, len, out);
        }
    }
}

/// # Safety
/// As for [`dots_avx512`], with AVX2.
pub(super) unsafe fn dots_avx2(rows: &[i8], digits: &[u8], len: usize, out: &mut [i32]) {
    // SAFETY: the caller vouches for the ISA and the shapes.
    unsafe { tiles!(tile_avx2, 0, rows, digits, len, out) }
}

/// One register tile. `$vector` is as wide as `$width` bytes; `$add(sum, digits, weights)` adds
/// products to int32 lanes.
macro_rules! tile {
    ($name:ident, $features:literal, $width:literal, $zero:expr, $load:ident, $cast:ty, $add:ident,
     $reduce:ident) => {
        /// # Safety
        /// The machine has the features; H rows and X rows of digits of `len` bytes, a multiple of
        /// 64, and H places in each of X rows of `out` are there.
        #[target_feature(enable = $features)]
        unsafe fn $name<const H: usize, const X: usize>(
            rows: *const i8,
            digits: *const u8,
            len: usize,
            out: *mut i32,
            stride: usize,
        ) -> usize {
            // SAFETY: all reads and writes are within what the caller vouches for.
            unsafe {
                let mut sums = [[$zero; X]; H];
                for k in (0..len).step_by($width) {
                    let mut weights = [$zero; H];
                    for h in 0..H {
                        let at = rows.add(h * len + k);
                        if k % 64 == 0 {
                            _mm_prefetch::<_MM_HINT_T0>(at.wrapping_add(PREFETCH_BYTES).cast());
                            // The next rows, into the cache that has room for more requests.
                            _mm_prefetch::<_MM_HINT_T1>(at.wrapping_add(H * len).cast());
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
                    for h in 0..H {
                        *out.add(x * stride + h) = $reduce(sums[h][x]);
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
    _mm512_reduce_add_epi32
);
tile!(
    tile_bw,
    "avx512f,avx512bw,avx512dq,avx512vl",
    64,
    _mm512_setzero_si512(),
    _mm512_loadu_si512,
    __m512i,
    add_bw,
    _mm512_reduce_add_epi32
);
tile!(
    tile_avx2,
    "avx2",
    32,
    _mm256_setzero_si256(),
    _mm256_loadu_si256,
    __m256i,
    add_avx2,
    sum_avx2
);

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
