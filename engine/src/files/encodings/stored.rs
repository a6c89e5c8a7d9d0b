//! A ternary tensor as a file stores it.

use super::dense::DenseType;
use crate::{
    files::error::{ModelError, Problem},
    formats::Scale,
};

/// Storage of a ternary tensor.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Packing {
    /// Hugging Face packed; the scale comes from a separate tensor.
    Planar(Scale),
    /// Dense master weights, quantized at load.
    Online(DenseType),
    /// bitnet.cpp, blocks of 128 weights, one f32 scale after the codes.
    I2S(f32),
    /// llama.cpp, base-3 digits.
    Tq1_0,
    /// llama.cpp, 2-bit codes.
    Tq2_0,
    /// A scale for each group of inputs: in blocks, or as dense weights that are exactly ternary.
    Grouped(DenseType),
}

/// A stored ternary tensor, with everything needed to decode it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Stored<'a> {
    pub name: &'a str,
    pub rows: usize,
    pub cols: usize,
    pub packing: Packing,
    pub bytes: &'a [u8],
    /// Offset of `bytes` in the file, for error messages.
    pub offset: u64,
}

impl Stored<'_> {
    /// Returns the error of a defect in one of the tensor's bytes.
    pub fn error(&self, byte: usize, problem: Problem) -> ModelError {
        ModelError::bad_tensor(self.name, self.offset + byte as u64, problem)
    }

    /// Returns the error for the first 2-bit code that is 3.
    pub fn first_code_three(&self) -> ModelError {
        let byte = self.bytes.iter().position(|b| b & (b >> 1) & 0x55 != 0).unwrap_or(0);
        self.error(byte, Problem::BadCode { code: 3 })
    }
}
