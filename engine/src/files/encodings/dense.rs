//! Dense matrices (the embedding and the head), read in place row by row.

use half::{bf16, f16};
use rayon::prelude::*;

use super::{
    blocks::{self, TQ_BLOCK, TQ1_0_BYTES, TQ2_0_BYTES},
    quants,
};

/// Element type of a dense tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DenseType {
    /// IEEE single precision, little-endian.
    F32,
    /// IEEE half precision, little-endian.
    F16,
    /// bfloat16, little-endian.
    Bf16,
    /// Blocks of 32: an f16 scale and 32 signed bytes.
    Q8_0,
    /// Super-blocks of 256: 6-bit values, 16 signed 8-bit scales, an f16 scale.
    Q6K,
    /// Super-blocks of 256: 4-bit values, 8 scales and minima of 6 bits, two f16 scales.
    Q4K,
    /// Ternary, blocks of 64: an f16 scale and 2-bit codes.
    Q2_0,
    /// Ternary, blocks of 128: an f16 scale and 2-bit codes.
    Pq2_0,
    /// Ternary, blocks of 128: base-3 digits and an f16 scale.
    Ptq1_0,
    /// Ternary, blocks of 256: base-3 digits and an f16 scale.
    Tq1_0,
    /// Ternary, blocks of 256: 2-bit codes and an f16 scale.
    Tq2_0,
}

impl DenseType {
    /// Returns the number of elements and of bytes of one block, the smallest unit of a row.
    pub const fn block(self) -> (usize, usize) {
        match self {
            Self::F32 => (1, 4),
            Self::F16 | Self::Bf16 => (1, 2),
            Self::Q8_0 => (quants::Q8_0_BLOCK, quants::Q8_0_BYTES),
            Self::Q6K => (quants::Q6K_BLOCK, quants::Q6K_BYTES),
            Self::Q4K => (quants::Q4K_BLOCK, quants::Q4K_BYTES),
            Self::Q2_0 => (blocks::Q2_0_BLOCK, blocks::Q2_0_BYTES),
            Self::Pq2_0 => (blocks::PQ2_0_BLOCK, blocks::PQ2_0_BYTES),
            Self::Ptq1_0 => (blocks::PTQ1_0_BLOCK, blocks::PTQ1_0_BYTES),
            Self::Tq1_0 => (TQ_BLOCK, TQ1_0_BYTES),
            Self::Tq2_0 => (TQ_BLOCK, TQ2_0_BYTES),
        }
    }

    /// Returns the number of bytes of a row of `cols` elements; `None` if `cols` is not a whole
    /// number of blocks or the product overflows.
    pub fn row_bytes(self, cols: usize) -> Option<usize> {
        let (elements, bytes) = self.block();
        if !cols.is_multiple_of(elements) {
            return None;
        }
        (cols / elements).checked_mul(bytes)
    }

    /// Returns the inputs of the smallest groups with scales in a matrix of this type.
    pub(crate) fn group_min(self) -> usize {
        self.block().0.clamp(blocks::GROUP_MIN, blocks::GROUP_MAX)
    }

    /// Returns the name used in listings.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::Bf16 => "BF16",
            Self::Q8_0 => "Q8_0",
            Self::Q6K => "Q6_K",
            Self::Q4K => "Q4_K",
            Self::Q2_0 => "Q2_0",
            Self::Pq2_0 => "PQ2_0",
            Self::Ptq1_0 => "PTQ1_0",
            Self::Tq1_0 => "TQ1_0",
            Self::Tq2_0 => "TQ2_0",
        }
    }
}

/// A dense matrix inside a model file, row-major.
///
/// `bytes` is the tensor as stored: little-endian, **with any alignment** (safetensors guarantees
/// none), exactly `rows` times [`DenseType::row_bytes`].
#[derive(Debug, Clone, Copy)]
pub struct Dense<'a> {
    /// Element type.
    pub dtype: DenseType,
    /// Rows: tokens of the vocabulary.
    pub rows: usize,
    /// Columns: the hidden size.
    pub cols: usize,
    /// The stored bytes. // (rows, row_bytes)
    pub bytes: &'a [u8],
}

impl<'a> Dense<'a> {
    /// Returns the stored bytes of one row.
    ///
    /// # Panics
    /// If `row` is outside the matrix.
    pub fn row_bytes(&self, row: usize) -> &'a [u8] {
        assert!(row < self.rows, "row {row} of a matrix of {} rows", self.rows);
        let len = self.bytes.len() / self.rows;
        &self.bytes[row * len..(row + 1) * len]
    }

    /// One row as f32: widened exactly, or dequantized with the format's own formula.
    ///
    /// # Panics
    /// If `row` is outside the matrix or `out` is not `cols` long.
    pub fn row(&self, row: usize, out: &mut [f32]) {
        assert_eq!(out.len(), self.cols, "row buffer");
        widen(self.dtype, self.row_bytes(row), out);
    }

    /// Returns where the first element lies that is infinite or not a number, or the first block with such a scale; in bytes.
    pub(crate) fn first_not_finite(&self) -> Option<usize> {
        const PART_BLOCKS: usize = 1 << 18;
        let (_, block) = self.dtype.block();
        let part = PART_BLOCKS * block;
        let is_wrong = |bytes: &[u8]| has_not_finite(self.dtype, bytes);
        let start = self.bytes.par_chunks(part).position_first(is_wrong)? * part;
        let within = self.bytes[start..].chunks_exact(block).position(is_wrong)?;
        Some(start + within * block)
    }
}

/// Returns whether whole blocks have a value that is infinite or not a number: by the exponents of elements, or of scales.
fn has_not_finite(dtype: DenseType, bytes: &[u8]) -> bool {
    const EXPONENT_OF_F16: u16 = 0x7c00;
    // Without an early exit, the loops over elements are vectorized.
    let halves = |exponent: u16| {
        let halves = bytes.as_chunks::<2>().0.iter().map(|half| u16::from_le_bytes(*half));
        halves.fold(false, |found, half| found | (half & exponent == exponent))
    };
    let singles = |exponent: u32| {
        let singles = bytes.as_chunks::<4>().0.iter().map(|single| u32::from_le_bytes(*single));
        singles.fold(false, |found, single| found | (single & exponent == exponent))
    };
    let scale = |block: &[u8], at: usize| {
        u16::from_le_bytes([block[at], block[at + 1]]) & EXPONENT_OF_F16 == EXPONENT_OF_F16
    };
    let scales = |places: &[usize]| {
        let mut blocks = bytes.chunks_exact(dtype.block().1);
        blocks.any(|block| places.iter().any(|&at| scale(block, at)))
    };
    match dtype {
        DenseType::F32 => singles(0x7f80_0000),
        DenseType::F16 => halves(EXPONENT_OF_F16),
        DenseType::Bf16 => halves(0x7f80),
        DenseType::Q8_0 => scales(&[0]),
        DenseType::Q6K => scales(&[208]),
        DenseType::Q4K => scales(&[0, 2]),
        DenseType::Q2_0 => scales(&[blocks::Q2_0.scale_at()]),
        DenseType::Pq2_0 => scales(&[blocks::PQ2_0.scale_at()]),
        DenseType::Ptq1_0 => scales(&[blocks::PTQ1_0.scale_at()]),
        DenseType::Tq1_0 => scales(&[blocks::TQ1_0.scale_at()]),
        DenseType::Tq2_0 => scales(&[blocks::TQ2_0.scale_at()]),
    }
}

/// Decodes whole blocks of `bytes` into `out`; the caller checks the lengths.
pub(crate) fn widen(dtype: DenseType, bytes: &[u8], out: &mut [f32]) {
    match dtype {
        DenseType::F32 => {
            for (value, chunk) in out.iter_mut().zip(bytes.as_chunks::<4>().0) {
                *value = f32::from_le_bytes(*chunk);
            }
        }
        DenseType::F16 => {
            for (value, chunk) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                *value = f16::from_le_bytes(*chunk).to_f32();
            }
        }
        DenseType::Bf16 => {
            for (value, chunk) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                *value = bf16::from_le_bytes(*chunk).to_f32();
            }
        }
        DenseType::Q8_0 => quants::dequantize_q8_0(bytes, out),
        DenseType::Q6K => quants::dequantize_q6_k(bytes, out),
        DenseType::Q4K => quants::dequantize_q4_k(bytes, out),
        DenseType::Q2_0 => blocks::dequantize(blocks::Q2_0, bytes, out),
        DenseType::Pq2_0 => blocks::dequantize(blocks::PQ2_0, bytes, out),
        DenseType::Ptq1_0 => blocks::dequantize(blocks::PTQ1_0, bytes, out),
        DenseType::Tq1_0 => blocks::dequantize(blocks::TQ1_0, bytes, out),
        DenseType::Tq2_0 => blocks::dequantize(blocks::TQ2_0, bytes, out),
    }
}

/// Returns the little-endian bytes of values.
pub(crate) fn f32_bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const TYPES: [DenseType; 11] = [
        DenseType::F32,
        DenseType::F16,
        DenseType::Bf16,
        DenseType::Q8_0,
        DenseType::Q6K,
        DenseType::Q4K,
        DenseType::Q2_0,
        DenseType::Pq2_0,
        DenseType::Ptq1_0,
        DenseType::Tq1_0,
        DenseType::Tq2_0,
    ];

    /// Returns the first byte that the search names in these bytes.
    fn found(dtype: DenseType, bytes: &[u8]) -> Option<usize> {
        let cols = dtype.block().0;
        let dense = Dense { dtype, rows: bytes.len() / dtype.block().1, cols, bytes };
        dense.first_not_finite()
    }

    #[test]
    fn every_value_that_is_not_finite_is_found_with_its_block() {
        for dtype in TYPES {
            let (elements, len) = dtype.block();
            let blocks = 5;
            assert_eq!(found(dtype, &vec![0; blocks * len]), None, "{}", dtype.name());
            // Sets every bit of one byte, or of two, and compares with the decoded values.
            for (at, wide) in (0..blocks * len - 1).flat_map(|at| [(at, 1), (at, 2)]) {
                let mut bytes = vec![0; blocks * len];
                bytes[at..at + wide].fill(0xff);
                let mut values = vec![0f32; blocks * elements];
                widen(dtype, &bytes, &mut values);
                let first = values.iter().position(|value| !value.is_finite());
                let expected = first.map(|element| element / elements * len);
                assert_eq!(found(dtype, &bytes), expected, "{} at {at}", dtype.name());
            }
        }
    }

    #[test]
    fn largest_finite_values_are_accepted_in_any_part() {
        let largest = [f16::MAX, f16::MIN].map(|value| value.to_le_bytes());
        let mut bytes = largest.concat().repeat(1 << 18);
        assert_eq!(found(DenseType::F16, &bytes), None);
        for at in [0, (1 << 19) + 6, (1 << 20) - 2] {
            let kept = [bytes[at], bytes[at + 1]];
            bytes[at..at + 2].copy_from_slice(&f16::NEG_INFINITY.to_le_bytes());
            assert_eq!(found(DenseType::F16, &bytes), Some(at));
            bytes[at..at + 2].copy_from_slice(&kept);
        }
    }
}
