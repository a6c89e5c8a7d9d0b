//! Converts models between containers without changing what they compute.
//!
//! Trits, norms, biases, factors, divisors of RoPE frequencies, embedding, tokenizer and chat template stay exactly the
//! same, and so do scales of groups. One scale per matrix stays, too, with two exceptions that the [`Report`] counts: GGUF
//! readers only multiply, so a scale to divide by (`bitlinear` folders) becomes its f32 reciprocal; and `TQ2_0` holds
//! scales as f16, so other scales are rounded. Both change results in the last digits and therefore the fingerprint. What
//! the target format cannot hold is an error that names it, before anything is written.

use std::path::Path;

use super::{
    convert_folder, convert_gguf,
    dense::DenseType,
    error::{ModelError, Problem},
    model::Model,
};
use crate::{
    config::{Linear, ModelConfig},
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
    pub(super) fn group_type(self) -> Option<DenseType> {
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

/// Writes `model` to `out`: a file for the GGUF targets, else a folder.
///
/// # Errors
/// [`ModelError::Unconvertible`] names the tensor that the target cannot hold. Errors while reading
/// the model or writing the file are returned as they are.
pub fn convert(model: &Model, to: Target, out: &Path) -> Result<Report, ModelError> {
    match to {
        Target::Folder => convert_folder::write(model, out),
        Target::GgufI2S
        | Target::GgufTq2_0
        | Target::GgufQ2_0
        | Target::GgufPq2_0
        | Target::GgufPtq1_0 => convert_gguf::write(model, to, out),
    }
}

pub(super) fn refuse(tensor: String, to: Target, problem: Problem) -> ModelError {
    ModelError::Unconvertible { tensor, target: to.name(), problem }
}

/// `(layer, linear)` of every ternary tensor, in the order of the forward pass.
pub(super) fn linears(config: &ModelConfig) -> impl Iterator<Item = (usize, Linear)> + use<> {
    (0..config.layer_count).flat_map(|layer| Linear::ALL.map(|linear| (layer, linear)))
}

pub(super) fn f32_bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// Returns the end token for formats with a single key for it: the template's `eos_token`, else the
/// first one of the configuration.
pub(super) fn eos_token(model: &Model) -> Option<u32> {
    model
        .chat_template()
        .and_then(|template| template.eos_token())
        .and_then(|text| model.tokenizer().token_id(text))
        .or_else(|| model.config().eos_tokens.first().copied())
}
