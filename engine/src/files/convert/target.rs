//! What a model can be converted to, and the result of a conversion.

use crate::{
    files::{
        encodings::dense::DenseType,
        error::{ModelError, Problem},
    },
    names::names,
};

/// The container and packing to convert to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Target {
    /// A GGUF file with `I2_S` tensors, x86 layout, as bitnet.cpp reads it.
    GgufI2S,
    /// A GGUF file with `TQ2_0` tensors, as llama.cpp reads it.
    GgufTq2_0,
    /// A GGUF file with `Q2_0` tensors: a scale for each group of 64 inputs.
    GgufQ2_0,
    /// A GGUF file with `PQ2_0` tensors: a scale for each group of 128 inputs.
    GgufPq2_0,
    /// A GGUF file with `PTQ1_0` tensors: as `PQ2_0`, with base-3 digits.
    GgufPtq1_0,
    /// A Hugging Face folder with packed ternary weights.
    Folder,
}

impl Target {
    /// Returns the block type of targets that have a scale for each group of inputs.
    pub(crate) fn group_type(self) -> Option<DenseType> {
        match self {
            Self::GgufQ2_0 => Some(DenseType::Q2_0),
            Self::GgufPq2_0 => Some(DenseType::Pq2_0),
            Self::GgufPtq1_0 => Some(DenseType::Ptq1_0),
            Self::GgufI2S | Self::GgufTq2_0 | Self::Folder => None,
        }
    }
}

names!(
    Target,
    "conversion target",
    GgufI2S = "i2_s",
    GgufTq2_0 = "tq2_0",
    GgufQ2_0 = "q2_0",
    GgufPq2_0 = "pq2_0",
    GgufPtq1_0 = "ptq1_0",
    Folder = "folder"
);

/// The result of a conversion.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct Report {
    /// Tensors written.
    pub tensor_count: usize,
    /// Ternary tensors with a scale that differs from the source's; 0 means that the fingerprint stays
    /// the same.
    pub inexact_scale_count: usize,
}

/// Returns the error of a tensor that the target cannot hold.
pub(crate) fn refuse(tensor: String, to: Target, problem: Problem) -> ModelError {
    ModelError::Unconvertible { tensor, target: to.name(), problem }
}
