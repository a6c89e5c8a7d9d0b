//! Refuses files with metadata that may change a result and that no code reads.
//!
//! | namespace | keys |
//! | --- | --- |
//! | of the architecture | those that are read, and [`NEUTRAL_KEYS`] with the value that stands for a feature's absence |
//! | [`DESCRIPTIONS`] | all, but for names that speak of a rotated basis |
//! | of other architectures and tools, such as `prism.` | texts that say who made the file, and when |
//!
//! The last row matters: keys of tools have changed the arithmetic before. A file with `prism.hadamard.…` has ordinary types and
//! shapes, and computes nonsense without the transform of its inputs.

use super::{
    architecture::Architecture,
    container::{Gguf, Value},
    keys::Keys,
};
use crate::files::{error::ModelError, needs};

/// Namespaces that describe a file, its text or its making. No key of theirs changes what a matrix computes.
const DESCRIPTIONS: [&str; 8] = [
    "general.",
    "tokenizer.",
    "tritmill.",
    // Of llama.cpp: parts of a file, the matrix by which a file was quantized.
    "split.",
    "quantize.",
    "imatrix.",
    // Of people who publish files.
    "mradermacher.",
    "duynt.",
];

/// Words of keys that say who made a file, how and when.
const PROVENANCE: [&str; 19] = [
    "author",
    "by",
    "at",
    "on",
    "date",
    "time",
    "timestamp",
    "name",
    "url",
    "repo",
    "source",
    "commit",
    "license",
    "description",
    "comment",
    "tool",
    "converter",
    "quantizer",
    "host",
];

/// Keys under the architecture's prefix that are read by [`super::config`].
const READ_KEYS: [&str; 19] = [
    "vocab_size",
    "context_length",
    "embedding_length",
    "block_count",
    "feed_forward_length",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
    "rope.scaling.attn_factor",
    "rope.scaling.yarn_log_multiplier",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.layer_norm_rms_epsilon",
    "attention.key_length",
    "attention.value_length",
    "pooling_type",
];

/// A value that changes nothing.
#[derive(Clone, Copy)]
enum Neutral {
    Number(f64),
    Flag(bool),
    Text(&'static str),
}

/// Keys of features that this build lacks, with the value that stands for their absence: converters write some of them for every
/// model. Those of YaRN are its defaults.
const NEUTRAL_KEYS: [(&str, Neutral); 20] = [
    ("expert_count", Neutral::Number(0.0)),
    ("expert_used_count", Neutral::Number(0.0)),
    ("expert_shared_count", Neutral::Number(0.0)),
    ("leading_dense_block_count", Neutral::Number(0.0)),
    ("nextn_predict_layers", Neutral::Number(0.0)),
    ("attention.causal", Neutral::Flag(true)),
    ("attention.sliding_window", Neutral::Number(0.0)),
    ("attention.clamp_kqv", Neutral::Number(0.0)),
    ("attention.max_alibi_bias", Neutral::Number(0.0)),
    ("attn_logit_softcapping", Neutral::Number(0.0)),
    ("final_logit_softcapping", Neutral::Number(0.0)),
    ("use_parallel_residual", Neutral::Flag(false)),
    ("embedding_scale", Neutral::Number(1.0)),
    ("residual_scale", Neutral::Number(1.0)),
    ("logit_scale", Neutral::Number(1.0)),
    ("rope.scaling.yarn_ext_factor", Neutral::Number(1.0)),
    ("rope.scaling.yarn_attn_factor", Neutral::Number(1.0)),
    ("rope.scaling.yarn_beta_fast", Neutral::Number(32.0)),
    ("rope.scaling.yarn_beta_slow", Neutral::Number(1.0)),
    // The order of rows that all files of these families have.
    ("tensor_data_layout", Neutral::Text("Meta AI original pth")),
];

impl Neutral {
    fn is(self, value: Value<'_>) -> bool {
        match (self, value) {
            (Self::Number(neutral), Value::Unsigned(number)) => number as f64 == neutral,
            (Self::Number(neutral), Value::Signed(number)) => number as f64 == neutral,
            (Self::Number(neutral), Value::Float(number)) => number == neutral,
            (Self::Flag(neutral), Value::Bool(flag)) => flag == neutral,
            (Self::Text(neutral), Value::Text(text)) => text == neutral,
            _ => false,
        }
    }
}

/// Refuses a file with keys that ask for more than is computed; `prefix` is that of the architecture's keys.
///
/// # Errors
/// Names the first such key, and what it would need.
pub(super) fn refuse_keys(
    gguf: &Gguf<'_>,
    architecture: Architecture,
    prefix: &str,
) -> Result<(), ModelError> {
    let global = Keys { gguf, prefix: "" };
    for (&key, &value) in &gguf.metadata {
        let is_understood = match key.strip_prefix(prefix) {
            Some(key) => is_understood_of(architecture, key, value),
            None => {
                let starts = |prefixes: &[&str]| prefixes.iter().any(|p| key.starts_with(p));
                starts(architecture.own_namespaces())
                    || describes(key, value, starts(&DESCRIPTIONS))
            }
        };
        if !is_understood {
            return Err(global.unsupported(key, needs::of(key)));
        }
    }
    if global.text("general.type")?.is_some_and(|kind| kind != "model") {
        return Err(global.unsupported("general.type", "the file does not hold a model"));
    }
    if global.size("split.count", u64::from(u16::MAX)).ok().flatten().is_some_and(|n| n > 1) {
        return Err(global.unsupported("split.count", "split files; merge them first"));
    }
    Ok(())
}

/// Returns whether a key of the architecture, without its prefix, is read or says that a feature is absent.
fn is_understood_of(architecture: Architecture, key: &str, value: Value<'_>) -> bool {
    READ_KEYS.contains(&key)
        || architecture.own_keys().contains(&key)
        || NEUTRAL_KEYS.iter().any(|(name, neutral)| *name == key && neutral.is(value))
}

/// Returns whether a key outside the architecture's prefix only describes the file.
fn describes(key: &str, value: Value<'_>, is_description: bool) -> bool {
    if is_description {
        return !needs::has_any(key, &["hadamard", "rotation", "rotated"]);
    }
    let is_text = matches!(value, Value::Text(_));
    is_text && needs::has_any(key, &PROVENANCE) && needs::by_words(key).is_none()
}
