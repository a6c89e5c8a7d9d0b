//! Dense matrices (the embedding and the head), read in place row by row.

use half::{bf16, f16};

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
