//! Reorders a row of activations for a format's kernels, and sums it.

use crate::formats::{
    Format,
    layout::{Layout, with_layout},
};

/// The smallest group of inputs that a format reorders, as a byte shuffle.
#[derive(Debug, Clone, Copy)]
pub struct Unit {
    len: usize,
    shuffle: [u8; 16], // input of the unit for each position; 0x80 (zero) past `len`
}

impl Unit {
    /// Returns the unit of a layout: sixteen or twelve inputs.
    pub const fn for_layout<L: Layout>() -> Self {
        const { unit(L::ORDER) }
    }
}

const fn unit(order: &[u8]) -> Unit {
    let len = if order.len().is_multiple_of(16) { 16 } else { 12 };
    assert!(order.len().is_multiple_of(len));
    let mut shuffle = [0x80; 16];
    let mut place = 0;
    while place < order.len() {
        let (unit, input) = (place / len * len, order[place] as usize);
        assert!(input >= unit && input < unit + len, "the order stays within its units");
        if unit == 0 {
            shuffle[place] = order[place];
        }
        assert!(shuffle[place - unit] as usize == input - unit, "all units have one order");
        place += 1;
    }
    Unit { len, shuffle }
}

/// Writes `q` in a format's order to `row`, padded with zeros, and returns its sum; `row` is a whole number of blocks.
pub fn write_in(format: Format, row: &mut [i8], q: &[i8]) -> i32 {
    #[cfg(target_arch = "aarch64")]
    if std::arch::is_aarch64_feature_detected!("neon") {
        // SAFETY: the machine has NEON.
        return unsafe { with_layout!(format, L => write_neon(Unit::for_layout::<L>(), row, q)) };
    }
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        // SAFETY: the machine has AVX2.
        return unsafe { with_layout!(format, L => write_avx2(Unit::for_layout::<L>(), row, q)) };
    }
    with_layout!(format, L => write(Unit::for_layout::<L>(), row, q))
}

/// Writes the reordered `q` to `row`, padded with zeros, and returns its sum; `row` holds whole units.
pub fn write(unit: Unit, row: &mut [i8], q: &[i8]) -> i32 {
    let inputs = q.chunks(unit.len).chain(std::iter::repeat(&[][..]));
    for (out, q) in row.chunks_exact_mut(unit.len).zip(inputs) {
        for (out, &from) in out.iter_mut().zip(&unit.shuffle) {
            *out = q.get(usize::from(from)).copied().unwrap_or(0);
        }
    }
    q.iter().map(|&q| i32::from(q)).sum()
}

/// As [`write`].
///
/// # Safety
/// The machine has AVX2.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
pub unsafe fn write_avx2(unit: Unit, row: &mut [i8], q: &[i8]) -> i32 {
    use std::arch::x86_64::*;

    assert!(row.len() >= q.len());
    // Count of whole vectors. A unit of twelve is followed by zeros, which the next unit overwrites.
    let count = if q.len() < 16 { 0 } else { (q.len() - 16) / unit.len + 1 };
    let mut sums = _mm_setzero_si128(); // of bytes + 128
    // SAFETY: the last vector ends within `q`, and so within `row`.
    unsafe {
        let shuffle = _mm_loadu_si128(unit.shuffle.as_ptr().cast());
        let sign = _mm_set1_epi8(i8::MIN);
        for vector in 0..count {
            let at = vector * unit.len;
            let bytes = _mm_loadu_si128(q.as_ptr().add(at).cast());
            let ordered = _mm_shuffle_epi8(bytes, shuffle);
            _mm_storeu_si128(row.as_mut_ptr().add(at).cast(), ordered);
            let positive = _mm_xor_si128(ordered, sign);
            sums = _mm_add_epi64(sums, _mm_sad_epu8(positive, _mm_setzero_si128()));
        }
    }
    let sum = _mm_cvtsi128_si64(_mm_add_epi64(sums, _mm_unpackhi_epi64(sums, sums)));
    let done = count * unit.len;
    sum as i32 - 128 * 16 * count as i32 + write(unit, &mut row[done..], &q[done..])
}

/// As [`write`].
///
/// # Safety
/// The machine has NEON.
#[cfg(target_arch = "aarch64")]
#[target_feature(enable = "neon")]
pub unsafe fn write_neon(unit: Unit, row: &mut [i8], q: &[i8]) -> i32 {
    use std::arch::aarch64::*;

    assert!(row.len() >= q.len());
    // As in `write_avx2`.
    let count = if q.len() < 16 { 0 } else { (q.len() - 16) / unit.len + 1 };
    let mut sums = vdupq_n_s32(0);
    // SAFETY: the last vector ends within `q`, and so within `row`; the shuffle has 16 bytes.
    unsafe {
        // Indices past 15 select zero.
        let shuffle = vld1q_u8(unit.shuffle.as_ptr());
        for vector in 0..count {
            let at = vector * unit.len;
            let ordered = vqtbl1q_s8(vld1q_s8(q.as_ptr().add(at)), shuffle);
            vst1q_s8(row.as_mut_ptr().add(at), ordered);
            // A lane grows by at most 4 * 128 a vector.
            sums = vpadalq_s16(sums, vpaddlq_s8(ordered));
        }
    }
    let done = count * unit.len;
    vaddvq_s32(sums) + write(unit, &mut row[done..], &q[done..])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the expected row, input by input.
    fn ordered<L: Layout>(q: &[i8]) -> Vec<i8> {
        let blocks = q.len().div_ceil(L::BLOCK_COLS);
        let input = |place: usize| {
            let block = place / L::BLOCK_COLS * L::BLOCK_COLS;
            q.get(block + usize::from(L::ORDER[place % L::BLOCK_COLS])).copied().unwrap_or(0)
        };
        (0..blocks * L::BLOCK_COLS).map(input).collect()
    }

    #[test]
    fn rows_have_the_order_of_their_format() {
        for format in Format::ALL {
            for len in (0..70).chain([255, 256, 300, 1000]) {
                let q: Vec<i8> = (0..len).map(|i| (i * i * 31 + i * 7 - 128) as u8 as i8).collect();
                let (want, unit) =
                    with_layout!(format, L => (ordered::<L>(&q), Unit::for_layout::<L>()));
                let sum: i32 = q.iter().map(|&q| i32::from(q)).sum();
                let mut row = vec![99; want.len()];
                assert_eq!((write(unit, &mut row, &q), &row), (sum, &want), "{format} {len}");
                #[cfg(target_arch = "x86_64")]
                if is_x86_feature_detected!("avx2") {
                    row.fill(99);
                    // SAFETY: the machine has AVX2.
                    let got = unsafe { write_avx2(unit, &mut row, &q) };
                    assert_eq!((got, &row), (sum, &want), "{format} {len}, AVX2");
                }
                #[cfg(target_arch = "aarch64")]
                {
                    row.fill(99);
                    // SAFETY: every target of this architecture with an operating system has NEON.
                    let got = unsafe { write_neon(unit, &mut row, &q) };
                    assert_eq!((got, &row), (sum, &want), "{format} {len}, NEON");
                }
            }
        }
    }
}
