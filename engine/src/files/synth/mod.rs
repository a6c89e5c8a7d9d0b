//! Random ternary models in the shapes of real ones, for benchmarks and scale tests.
//!
//! They generate meaningless text at the cost of a real model: the same matrices, packing and
//! vocabulary. Weights depend on the seed, the tensor and the position alone; they are generated and
//! written in bounded memory, in parallel.

mod folder;
mod gguf;
mod presets;
mod random;
mod vocabulary;

use std::path::Path;

use super::{error::ModelError, limits::LAYERS_MAX, roles::linears};
use crate::config::ModelConfig;
pub use presets::{shape, shape_names};
pub use vocabulary::VOCAB_MIN;
use vocabulary::{BOS, EOS};

/// The layers that a model may have, in words.
const LAYERS: &str = "1 to 4096 layers";
const _: () = assert!(LAYERS_MAX == 4096);

/// Writes a random model as a folder, or as a GGUF file if it has scales of groups or embeds texts, with a byte-level tokenizer that replaces the token ids of
/// `config`.
///
/// # Errors
/// [`ModelError::BadKey`] if there are no layers or more than a reader takes, the vocabulary is smaller than [`VOCAB_MIN`],
/// an output size is not a multiple of 4 or, with scales of groups, an input size not one of 128; [`ModelError::NotNamedGguf`] if a GGUF file
/// would not be called one; [`ModelError::Io`] if writing fails.
pub fn synth(config: &ModelConfig, out: &Path, seed: u64) -> Result<(), ModelError> {
    let bad = |key: &str, value: usize, expected| {
        Err(ModelError::BadKey { key: key.to_owned(), value: value.to_string(), expected })
    };
    if !(1..=LAYERS_MAX).contains(&(config.layer_count as u64)) {
        return bad("num_hidden_layers", config.layer_count, LAYERS);
    }
    if config.vocab_size < VOCAB_MIN {
        return bad("vocab_size", config.vocab_size, "260 or more: bytes and special tokens");
    }
    for (_, linear) in linears(config) {
        let (rows, _) = config.linear_shape(linear);
        if !rows.is_multiple_of(4) {
            return bad("output size of a linear", rows, "a multiple of 4");
        }
    }
    let config = ModelConfig { bos_token: Some(BOS), eos_tokens: vec![EOS], ..config.clone() };
    if config.group_scales || config.pooling.is_some() {
        return gguf::write(&config, out, seed);
    }
    folder::write(&config, out, seed)
}
