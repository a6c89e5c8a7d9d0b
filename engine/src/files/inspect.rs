//! A description of a model, as text and JSON.

use serde::Serialize;

use super::{
    error::ModelError,
    fingerprint::Fingerprint,
    model::Model,
    parts::{SkippedPart, TensorInfo},
    roles::{biases, layer_tensor_shape, layer_tensors, linears, norm_len},
};
use crate::config::ModelConfig;

/// A description of a model file.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Inspection {
    /// Name of the folder or file.
    pub name: String,
    /// `safetensors` or `gguf`.
    pub container: &'static str,
    /// Architecture as the file names it.
    pub architecture: String,
    /// Shape and conventions.
    pub config: ModelConfig,
    /// Weights of the ternary matrices.
    pub ternary_parameter_count: u64,
    /// Weights of norms, biases and, unless they are ternary, of embedding and head.
    pub dense_parameter_count: u64,
    /// Bytes of all tensors in the file.
    pub size_bytes: u64,
    /// Whether the model has a chat template.
    pub has_chat_template: bool,
    /// Number of ids with a token.
    pub token_count: usize,
    /// Identity of what the model computes.
    pub fingerprint: Fingerprint,
    /// Parts that are not read.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub skipped: Vec<SkippedPart>,
    /// Every tensor, in the order of the file.
    pub tensors: Vec<TensorInfo>,
}

/// Describes a model. The fingerprint reads every tensor, so this also checks that all can be decoded.
///
/// # Errors
/// As [`Model::fingerprint`].
pub fn inspect(model: &Model) -> Result<Inspection, ModelError> {
    let config = model.config();
    let weights = |(_, linear)| {
        let (rows, cols) = config.linear_shape(linear);
        rows * cols
    };
    let in_layers: usize = linears(config).map(weights).sum();
    let elements = |(_, tensor)| {
        let (rows, cols) = layer_tensor_shape(config, tensor);
        rows * cols
    };
    let of_layers: usize = layer_tensors(config).map(elements).sum();
    let matrices = if config.tied_head { 1 } else { 2 };
    let norms: usize = model.norms().iter().map(|&norm| norm_len(config, norm)).sum();
    let biases: usize = biases(config).map(|(_, linear)| config.linear_shape(linear).0).sum();
    let tables = matrices * config.vocab_size * config.hidden_size;
    let (ternary_tables, dense_tables) =
        if config.ternary_tables { (tables, 0) } else { (0, tables) };
    let tokenizer = model.tokenizer();
    Ok(Inspection {
        name: model.name().to_owned(),
        container: model.container(),
        architecture: config.architecture.clone(),
        config: config.clone(),
        ternary_parameter_count: (in_layers + ternary_tables) as u64,
        dense_parameter_count: (dense_tables + norms + biases + of_layers) as u64,
        size_bytes: model.tensors().iter().map(|tensor| tensor.size_bytes).sum(),
        has_chat_template: model.chat_template().is_some(),
        token_count: (0..tokenizer.id_limit())
            .filter(|&id| tokenizer.token_bytes(id).is_some())
            .count(),
        fingerprint: model.fingerprint()?,
        skipped: model.skipped().to_vec(),
        tensors: model.tensors().to_vec(),
    })
}
