//! AVX-512 with VNNI and GFNI, for processors with two ports for vectors, which both multiply and compute bits: Intel's
//! since Ice Lake.
//!
//! Each instruction that expands codes takes the place of a multiplication there. So `vgf2p8affineqb`, which multiplies
//! every byte by a matrix of 8 x 8 bits, takes a code out of its byte in one instruction instead of two, and codes are
//! expanded once for all rows from fewer rows on than in [`Vnni`](super::Vnni). Measured in benches/RESULTS.md.

use super::*;

/// AVX-512 with VNNI and GFNI.
pub(in super::super) struct Gfni;

enabled!(
    Gfni,
    "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,gfni",
    block_gfni,
    expand_gfni,
    peak_gfni,
    many_gfni
);

impl Vectors for Gfni {
    vectors_512!(block_gfni, expand_gfni, peak_gfni);
    many_in_vectors!(many_gfni);
    const MANY_ROWS_MIN: usize = 12;
    const CHUNKS: [usize; 2] = [48, 96];
    accumulate_by_vnni!();
}

impl TwoBits for Gfni {
    const I2S_MANY_ROWS_MIN: usize = 24;

    #[inline(always)]
    unsafe fn two_bits(bytes: __m512i, part: usize) -> __m512i {
        // SAFETY: the caller has AVX-512 and GFNI.
        unsafe {
            match part {
                0 => _mm512_and_si512(bytes, _mm512_set1_epi8(3)),
                1 => _mm512_gf2p8affine_epi64_epi8::<0>(bytes, low_bits(2)),
                2 => _mm512_gf2p8affine_epi64_epi8::<0>(bytes, low_bits(4)),
                _ => _mm512_gf2p8affine_epi64_epi8::<0>(bytes, low_bits(6)),
            }
        }
    }
}

/// Returns the matrix whose product with a byte is the byte's bits `from` and `from + 1`. Bit `i` of a result is the parity
/// of the byte under byte `7 - i` of the matrix (Intel's manual, "GF2P8AFFINEQB").
#[inline(always)]
unsafe fn low_bits(from: u32) -> __m512i {
    let rows = [0, 0, 0, 0, 0, 0, 1 << (from + 1), 1 << from];
    // SAFETY: the caller has AVX-512.
    unsafe { _mm512_set1_epi64(i64::from_le_bytes(rows)) }
}
