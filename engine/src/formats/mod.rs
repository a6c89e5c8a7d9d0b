//! Lossless packings of trits: how a ternary matrix lies in memory for the kernels.
//!
//! [`PackedMatrix`] holds a matrix in one of the [`Format`]s. Each format is one file that says
//! where every bit lies; all instruction sets share that layout.

pub(crate) mod i2_s;
pub(crate) mod layout;
pub(crate) mod memory;
mod packed;
pub(crate) mod tl1;
pub(crate) mod tl2;

pub use layout::TILE_ROWS;
pub use packed::{COLS_MAX, PackError, PackedMatrix};

use crate::names::names;

/// A ternary matrix as read from a model file: trits and one scale.
#[derive(Debug, Clone)]
pub struct TernaryMatrix {
    /// Output features.
    pub rows: usize,
    /// Input features.
    pub cols: usize,
    /// −1, 0 or 1, row-major. // (rows, cols)
    pub trits: Vec<i8>,
    /// How the integer sum becomes the output.
    pub scale: Scale,
}

/// What turns the integer sum `a` and the activation scale `s` into the output of a linear.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Scale {
    /// `y = (a / s) * scale`: `autobitlinear`, online models, GGUF.
    Multiply(f32),
    /// `y = a / (s * scale)`: `bitlinear`.
    Divide(f32),
}

/// How ternary weights are packed for a kernel. All three hold the same trits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Format {
    /// 2 bits a weight.
    I2S,
    /// Pairs of weights in 4-bit indices.
    Tl1,
    /// Triples of weights in a 4-bit magnitude index and a sign: 1.67 bits a weight.
    Tl2,
}

names!(Format, "format", I2S = "i2_s", Tl1 = "tl1", Tl2 = "tl2");
