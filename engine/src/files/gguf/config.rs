//! Reads a [`ModelConfig`] from GGUF metadata, with the conventions of each architecture.
//!
//! | `general.architecture` | Q/K rows in the file | gate | sub-norms | head |
//! | --- | --- | --- | --- | --- |
//! | `bitnet-b1.58`, `bitnet-25` | as in Hugging Face | relu² | yes | the embedding |
//! | `bitnet` | as in Hugging Face | SiLU | yes | the embedding |
//! | `llama` | permuted for adjacent-pair RoPE | SiLU | no | `output.weight`, or the embedding |
//! | `minicpm` | as `llama` | SiLU | no | `output.weight`, or the embedding |
//! | `qwen3` | as in Hugging Face | SiLU | no | `output.weight`, or the embedding |
//!
//! `minicpm` has constant factors, and a scale per group of inputs in its linears ([`crate::files::encodings`]). `qwen3` has norms
//! of query and key heads, and such scales in every matrix.
//!
//! An unknown key under the architecture's prefix may change the computation, so it is an error that
//! names the key.

use super::{container::Gguf, keys::Keys};
use crate::{
    config::{Activation, ModelConfig, Multipliers, RopeScaling, Yarn},
    files::{
        error::ModelError,
        limits::{LAYERS_MAX, VOCAB_MAX, WIDTH_MAX},
    },
};

/// A family of GGUF models.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Architecture {
    /// BitNet b1.58 2B4T: `bitnet-b1.58` or `bitnet-25`.
    BitnetB158,
    /// 1bitLLM: `bitnet`.
    Bitnet,
    /// Llama 3 8B 1.58, Falcon3: `llama`.
    Llama,
    /// BitCPM: `minicpm`.
    MiniCpm,
    /// Ternary Bonsai: `qwen3`.
    Qwen3,
}

impl Architecture {
    pub fn is_bitnet(self) -> bool {
        matches!(self, Self::BitnetB158 | Self::Bitnet)
    }

    /// Returns whether rows of Q and K are in the order for adjacent-pair RoPE.
    pub fn permutes_heads(self) -> bool {
        matches!(self, Self::Llama | Self::MiniCpm)
    }
}

/// Supported keys under the architecture's prefix.
const KNOWN_KEYS: [&str; 18] = [
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
];

/// Constant factors of `minicpm`: of embedding rows, of what blocks add, and the divisor of the logits.
pub(crate) const MULTIPLIER_KEYS: [&str; 3] = ["embedding_scale", "residual_scale", "logit_scale"];

/// Reads everything except the tokens. `vocab_size` comes from the embedding's shape; the tokenizer
/// sets `eos_tokens`.
pub(crate) fn parse(
    gguf: &Gguf<'_>,
    vocab_size: u64,
    has_output: bool,
) -> Result<(ModelConfig, Architecture), ModelError> {
    let global = Keys { gguf, prefix: "" };
    let name = global.required_text("general.architecture")?;
    let architecture = match name {
        "bitnet-b1.58" | "bitnet-25" => Architecture::BitnetB158,
        "bitnet" => Architecture::Bitnet,
        "llama" => Architecture::Llama,
        "minicpm" => Architecture::MiniCpm,
        "qwen3" => Architecture::Qwen3,
        _ => return Err(global.unsupported("general.architecture", "unknown model family")),
    };
    let prefix = format!("{name}.");
    let keys = Keys { gguf, prefix: &prefix };
    refuse_unknown_keys(&global, &keys, architecture)?;

    let hidden_size = keys.required_size("embedding_length", WIDTH_MAX)?;
    let head_count = keys.required_size("attention.head_count", WIDTH_MAX)?;
    let kv_head_count = keys.size("attention.head_count_kv", WIDTH_MAX)?.unwrap_or(head_count);
    if !head_count.is_multiple_of(kv_head_count) {
        return Err(keys.bad("attention.head_count_kv", "a divisor of the head count"));
    }
    let head_dim = head_dim(&keys, hidden_size, head_count)?;
    if !(1..=VOCAB_MAX).contains(&vocab_size)
        || keys.size("vocab_size", VOCAB_MAX)?.is_some_and(|size| size as u64 != vocab_size)
    {
        return Err(keys.bad("vocab_size", "the number of rows of token_embd.weight"));
    }
    let config = ModelConfig {
        architecture: name.to_owned(),
        hidden_size,
        layer_count: keys.required_size("block_count", LAYERS_MAX)?,
        head_count,
        kv_head_count,
        head_dim,
        intermediate_size: keys.required_size("feed_forward_length", WIDTH_MAX)?,
        vocab_size: vocab_size as usize,
        context_length: keys.required_size("context_length", u64::from(u32::MAX))?,
        rms_norm_eps: keys.positive("attention.layer_norm_rms_epsilon", 0.1)?.ok_or_else(|| {
            ModelError::MissingKey { key: keys.name("attention.layer_norm_rms_epsilon") }
        })?,
        rope_theta: keys.positive("rope.freq_base", f32::MAX)?.unwrap_or(10_000.0),
        rope_scaling: rope_scaling(&keys, architecture)?,
        activation: match architecture {
            Architecture::BitnetB158 => Activation::SquaredRelu,
            _ => Activation::Silu,
        },
        sub_norms: architecture.is_bitnet(),
        linear_norm_eps: None,
        qk_norm: architecture == Architecture::Qwen3,
        group_scales: matches!(architecture, Architecture::MiniCpm | Architecture::Qwen3),
        ternary_tables: architecture == Architecture::Qwen3,
        // Those of the tensors are found with them.
        linear_biases: Vec::new(),
        multipliers: match architecture {
            Architecture::MiniCpm => multipliers(&keys)?,
            _ => Multipliers::NONE,
        },
        tied_head: architecture.is_bitnet() || !has_output,
        bos_token: global.token("tokenizer.ggml.bos_token_id", vocab_size)?,
        eos_tokens: Vec::new(),
    };
    Ok((config, architecture))
}

/// Reads the number of elements of a head, of queries, keys and values alike.
fn head_dim(keys: &Keys<'_>, hidden_size: usize, head_count: usize) -> Result<usize, ModelError> {
    let head_dim = match keys.size("attention.key_length", WIDTH_MAX)? {
        Some(length) => length,
        None if hidden_size.is_multiple_of(head_count) => hidden_size / head_count,
        None => return Err(keys.bad("attention.head_count", "a divisor of embedding_length")),
    };
    if !head_dim.is_multiple_of(2) || (head_count * head_dim) as u64 > WIDTH_MAX {
        return Err(keys.bad("attention.head_count", "heads of an even width, 2^20 in all"));
    }
    for key in ["attention.value_length", "rope.dimension_count"] {
        if keys.size(key, WIDTH_MAX)?.is_some_and(|length| length != head_dim) {
            return Err(keys.unsupported(key, "widths other than the head's"));
        }
    }
    Ok(head_dim)
}

fn multipliers(keys: &Keys<'_>) -> Result<Multipliers, ModelError> {
    let [embedding, residual, logits] = MULTIPLIER_KEYS;
    let required = |key: &str| {
        let missing = || ModelError::MissingKey { key: keys.name(key) };
        keys.positive(key, f32::MAX)?.ok_or_else(missing)
    };
    let multipliers = Multipliers {
        embedding: required(embedding)?,
        residual: required(residual)?,
        logit_divisor: required(logits)?,
    };
    match multipliers.are_sound() {
        true => Ok(multipliers),
        false => Err(keys.bad(residual, "with the other scales, factors within bounds")),
    }
}

fn refuse_unknown_keys(
    global: &Keys<'_>,
    keys: &Keys<'_>,
    architecture: Architecture,
) -> Result<(), ModelError> {
    let has_multipliers = architecture == Architecture::MiniCpm;
    for key in global.gguf.metadata.keys() {
        if let Some(key) = key.strip_prefix(keys.prefix)
            && !KNOWN_KEYS.contains(&key)
            && !(has_multipliers && MULTIPLIER_KEYS.contains(&key))
        {
            return Err(keys.unsupported(key, "unknown key"));
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

/// Reads the scaling of the RoPE frequencies; that of a tensor is read with the tensors. As in llama.cpp, a
/// factor without a kind is linear. Converters of `bitnet` models write a linear scaling by 1, which changes nothing.
fn rope_scaling(keys: &Keys<'_>, architecture: Architecture) -> Result<RopeScaling, ModelError> {
    for (key, harmless) in
        [("rope.scaling.attn_factor", 1.0), ("rope.scaling.yarn_log_multiplier", 0.1)]
    {
        if keys.number(key)?.is_some_and(|value| value as f32 != harmless) {
            return Err(keys.unsupported(key, "a different scale of attention"));
        }
    }
    let factor = keys.positive("rope.scaling.factor", f32::MAX)?;
    let original = keys.size("rope.scaling.original_context_length", u64::from(u32::MAX))?;
    let kind = keys.text("rope.scaling.type")?;
    if kind == Some("yarn") && architecture == Architecture::Qwen3 {
        let missing = |key: &str| ModelError::MissingKey { key: keys.name(key) };
        let factor = factor.ok_or_else(|| missing("rope.scaling.factor"))?;
        let original_context =
            original.ok_or_else(|| missing("rope.scaling.original_context_length"))?;
        if !(1.0..=Yarn::FACTOR_MAX).contains(&factor) {
            return Err(keys.bad("rope.scaling.factor", "a factor from 1 to 65536"));
        }
        return Ok(RopeScaling::Yarn(Yarn { factor, original_context }));
    }
    if kind == Some("longrope") && architecture == Architecture::MiniCpm {
        let context = keys.size("context_length", u64::from(u32::MAX))?;
        if original.is_some_and(|original| context.is_some_and(|context| context > original)) {
            let why = "a context beyond the original one";
            return Err(keys.unsupported("rope.scaling.original_context_length", why));
        }
        // The divisors are in a tensor.
        return Ok(RopeScaling::None);
    }
    if original.is_some() && architecture != Architecture::Qwen3 {
        return Err(keys.unsupported("rope.scaling.original_context_length", "RoPE scaling"));
    }
    match (kind, factor.filter(|&factor| factor != 1.0)) {
        (None | Some("none" | "linear"), None) => Ok(RopeScaling::None),
        (None | Some("linear"), Some(factor)) => Ok(RopeScaling::Linear { factor }),
        (Some("none"), Some(_)) => Err(keys.unsupported("rope.scaling.factor", "RoPE scaling")),
        (Some(_), _) => Err(keys.unsupported("rope.scaling.type", "this kind of RoPE scaling")),
    }
}
