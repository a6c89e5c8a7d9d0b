//! The dot products of [`super::super::six_dots`] with VNNI: bits are expanded to bytes in registers.

use std::arch::x86_64::*;

use super::super::six::{BLOCK, BLOCK_BYTES, KEPT, MIDDLE, TOP};

/// Prefetch distances into the first and the second cache, in bytes.
const PREFETCH_BYTES: [usize; 2] = [1536, 12288];

/// Computes the dot products of `rows` with two rows of digits, each with its own output.
///
/// # Safety
/// The machine has AVX-512 with VNNI; both rows of digits have the same length, a multiple of
/// [`BLOCK`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
pub unsafe fn dots(rows: &[u8], digits: [&[u8]; 2], out: [&mut [i32]; 2]) {
    let len = digits[0].len();
    let (top, kept) = (_mm512_set1_epi8(TOP as i8), _mm512_set1_epi8(KEPT as i8));
    let middle = _mm512_set1_epi8(MIDDLE as i8);
    let [first, second] = out;
    let outs = first.iter_mut().zip(second);
    for (row, outs) in rows.chunks_exact(len / BLOCK * BLOCK_BYTES).zip(outs) {
        let mut sums = [[_mm512_setzero_si512(); 2]; 2];
        for (b, block) in row.as_chunks::<BLOCK_BYTES>().0.iter().enumerate() {
            let at = block.as_ptr();
            // SAFETY: a block has three lines, and a row of digits four lines per block; a prefetch
            // cannot fault.
            unsafe {
                for line in (0..BLOCK_BYTES).step_by(64) {
                    let [near, far] = PREFETCH_BYTES.map(|ahead| at.wrapping_add(ahead + line));
                    _mm_prefetch::<_MM_HINT_T0>(near.cast());
                    _mm_prefetch::<_MM_HINT_T1>(far.cast());
                }
                let lines = [0, 64, 128].map(|line| _mm512_loadu_si512(at.add(line).cast()));
                let tops = [_mm512_slli_epi16::<4>(lines[0]), lines[0]];
                let more_tops = [_mm512_slli_epi16::<4>(lines[1]), lines[1]];
                let middles = [
                    _mm512_slli_epi16::<2>(lines[2]),
                    lines[2],
                    _mm512_srli_epi16::<2>(lines[2]),
                    _mm512_srli_epi16::<4>(lines[2]),
                ];
                for (s, rest) in middles.into_iter().enumerate() {
                    let four = if s < 2 { tops[s] } else { more_tops[s - 2] };
                    // top ? four : rest; the lowest two bits become their middle.
                    let six = _mm512_ternarylogic_epi32::<0xca>(top, four, rest);
                    let weights = _mm512_or_si512(_mm512_and_si512(six, kept), middle);
                    for (digits, sums) in digits.iter().zip(&mut sums) {
                        let digits = digits.as_ptr().add(b * BLOCK + s * 64);
                        let digits = _mm512_loadu_si512(digits.cast());
                        sums[s % 2] = _mm512_dpbusd_epi32(sums[s % 2], digits, weights);
                    }
                }
            }
        }
        let [first, second] = sums.map(|[a, b]| _mm512_reduce_add_epi32(_mm512_add_epi32(a, b)));
        (*outs.0, *outs.1) = (first, second);
    }
}
