//! Lossless packings of trits: how a ternary matrix lies in memory for the kernels.
//!
//! [`PackedMatrix`] holds a matrix in one of the [`Format`]s. Each format is one file that says
//! where every bit lies; all instruction sets share that layout.

use std::{fmt, str::FromStr};

pub(crate) mod i2_s;
pub(crate) mod layout;
pub(crate) mod memory;
mod packed;
pub(crate) mod tl1;
pub(crate) mod tl2;

pub use layout::TILE_ROWS;
pub use packed::{COLS_MAX, PackError, PackedMatrix};

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

impl Format {
    /// Every format.
    pub const ALL: [Self; 3] = [Self::I2S, Self::Tl1, Self::Tl2];
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::I2S => "i2_s",
            Self::Tl1 => "tl1",
            Self::Tl2 => "tl2",
        })
    }
}

/// A format name that is none of `i2_s`, `tl1`, `tl2`.
#[derive(Debug, thiserror::Error)]
#[error("unknown format '{0}' (expected i2_s, tl1 or tl2)")]
pub struct UnknownFormat(pub String);

impl FromStr for Format {
    type Err = UnknownFormat;

    fn from_str(name: &str) -> Result<Self, UnknownFormat> {
        match name {
            "i2_s" => Ok(Self::I2S),
            "tl1" => Ok(Self::Tl1),
            "tl2" => Ok(Self::Tl2),
            other => Err(UnknownFormat(other.to_owned())),
        }
    }
}
