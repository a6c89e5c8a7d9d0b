//! Converting models between containers without touching what they compute.
//!
//! Trits, norms, embedding, tokenizer and chat template come out as they went in. Scales do too,
//! with two exceptions that are counted in the [`Report`]: a scale to divide by (`bitlinear`
//! folders) becomes its f32 reciprocal in GGUF files, which only multiply; and `TQ2_0` holds scales
//! as f16, to which others are rounded. Both change results in the last digits, so such a model
//! has another fingerprint. What a format cannot hold at all is refused by the tensor's name before
//! anything is written.

use std::path::Path;

use super::{
    convert_folder, convert_gguf,
    error::{ModelError, Problem},
    model::Model,
};
use crate::{
    config::{Linear, ModelConfig},
    names::names,
};

/// What to convert to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Target {
    /// A GGUF file with `I2_S` tensors, x86 layout, as bitnet.cpp reads it.
    GgufI2S,
    /// A GGUF file with `TQ2_0` tensors, as llama.cpp reads it.
    GgufTq2_0,
    /// A Hugging Face folder with packed ternary weights.
    Folder,
}

names!(Target, "conversion target", GgufI2S = "i2_s", GgufTq2_0 = "tq2_0", Folder = "folder");

/// What a conversion did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct Report {
    /// Tensors written.
    pub tensor_count: usize,
    /// Ternary tensors whose scale is not exactly the source's; 0 means the fingerprint is kept.
    pub inexact_scale_count: usize,
}

/// Writes `model` in another container: a file for the GGUF targets, else a folder.
///
/// # Errors
/// [`ModelError::Unconvertible`] names the tensor that the target cannot hold; errors of reading
/// the model and writing the file are passed on.
pub fn convert(model: &Model, to: Target, out: &Path) -> Result<Report, ModelError> {
    match to {
        Target::Folder => convert_folder::write(model, out),
        Target::GgufI2S | Target::GgufTq2_0 => convert_gguf::write(model, to, out),
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

/// The one end token that the format has a key for: what templates call `eos_token`, else the
/// first.
pub(super) fn eos_token(model: &Model) -> Option<u32> {
    model
        .chat_template()
        .and_then(|template| template.eos_token())
        .and_then(|text| model.tokenizer().token_id(text))
        .or_else(|| model.config().eos_tokens.first().copied())
}
