//! Reads a [`ModelConfig`] from GGUF metadata, with the conventions of each architecture.
//!
//! | `general.architecture` | Q/K rows in the file | gate | sub-norms | head |
//! | --- | --- | --- | --- | --- |
//! | `bitnet-b1.58`, `bitnet-25` | as in Hugging Face | relu² | yes | the embedding |
//! | `bitnet` | as in Hugging Face | SiLU | yes | the embedding |
//! | `llama` | permuted for adjacent-pair RoPE | SiLU | no | `output.weight`, or the embedding |
//! | `minicpm` | as `llama` | SiLU | no | `output.weight`, or the embedding |
//! | `qwen3` | as in Hugging Face | SiLU | no | `output.weight`, or the embedding |
//! | `qwen35` | as in Hugging Face | SiLU | no | `output.weight`, or the embedding |
//! | `maple` | as in Hugging Face | SiLU, of bounded values | no | `output.weight` |
//!
//! `minicpm` has constant factors, and a scale per group of inputs in its linears ([`crate::files::encodings`]). `qwen3` has norms
//! of query and key heads, and such scales in every matrix; with `pooling_type`, it is a BitNet embedding model, with one scale
//! for each matrix and a norm in front of each linear. `maple` has norms of heads and scales of groups, too, and dense tables; [`maple`]
//! reads its experts and windows.
//!
//! A key that is not understood may change the computation, so it is an error that names the key ([`understood`]).

use std::ops::Range;

use super::{
    architecture::{Architecture, DRAFT_BLOCKS_KEY, MULTIPLIER_KEYS},
    container::{Gguf, Value},
    keys::Keys,
    maple,
    names::HEAD,
    understood,
};
use crate::{
    config::{Activation, DeltaNet, ModelConfig, Multipliers, Pooling, RopeScaling, Yarn},
    files::{
        error::ModelError,
        limits::{LAYERS_MAX, VOCAB_MAX, WIDTH_MAX},
    },
};

/// Reads everything except the tokens. `vocab_size` comes from the embedding's shape; the tokenizer
/// sets `eos_tokens`.
///
/// # Errors
/// Names the key that is missing, out of range or not supported.
pub(crate) fn parse(
    file: &str,
    gguf: &Gguf<'_>,
    (architecture, name): (Architecture, &str),
    vocab_size: u64,
    has_output: bool,
) -> Result<ModelConfig, ModelError> {
    let global = Keys { gguf, prefix: "" };
    let prefix = format!("{name}.");
    let keys = Keys { gguf, prefix: &prefix };
    understood::refuse_keys(gguf, architecture, &prefix)?;

    let hidden_size = keys.required_size("embedding_length", WIDTH_MAX)?;
    let head_count = keys.required_size("attention.head_count", WIDTH_MAX)?;
    let kv_head_count = keys.size("attention.head_count_kv", WIDTH_MAX)?.unwrap_or(head_count);
    if !head_count.is_multiple_of(kv_head_count) {
        return Err(keys.bad("attention.head_count_kv", "a divisor of the head count"));
    }
    let is_hybrid = architecture == Architecture::Qwen35;
    let is_maple = architecture == Architecture::Maple;
    let turns_part = is_hybrid || is_maple;
    let head_dim = head_dim(&keys, (hidden_size, head_count), turns_part)?;
    if !(1..=VOCAB_MAX).contains(&vocab_size)
        || keys.size("vocab_size", VOCAB_MAX)?.is_some_and(|size| size as u64 != vocab_size)
    {
        return Err(keys.bad("vocab_size", "the number of rows of token_embd.weight"));
    }
    let rms_norm_eps =
        keys.positive("attention.layer_norm_rms_epsilon", 0.1)?.ok_or_else(|| {
            ModelError::MissingKey { key: keys.name("attention.layer_norm_rms_epsilon") }
        })?;
    let pooling = pooling(&keys, architecture)?;
    let layer_count = draft_blocks(gguf, (architecture, name))?.start;
    let delta_net = is_hybrid.then(|| delta_net(file, &keys)).transpose()?;
    if delta_net.is_some_and(|delta| layer_count < delta.attention_interval) {
        return Err(keys.bad("full_attention_interval", "at most block_count"));
    }
    if is_maple && !has_output {
        return Err(ModelError::MissingTensor { tensor: HEAD.to_owned() });
    }
    Ok(ModelConfig {
        architecture: name.to_owned(),
        hidden_size,
        layer_count,
        head_count,
        kv_head_count,
        head_dim,
        intermediate_size: match is_maple {
            true => keys.required_size("expert_feed_forward_length", WIDTH_MAX)?,
            false => keys.required_size("feed_forward_length", WIDTH_MAX)?,
        },
        vocab_size: vocab_size as usize,
        context_length: keys.required_size("context_length", u64::from(u32::MAX))?,
        rms_norm_eps,
        rope_theta: rope_theta(&keys, is_maple)?,
        rope_scaling: rope_scaling(&keys, architecture)?,
        activation: match architecture {
            Architecture::BitnetB158 => Activation::SquaredRelu,
            _ => Activation::Silu,
        },
        sub_norms: architecture.is_bitnet(),
        linear_norm_eps: pooling.map(|_| rms_norm_eps),
        qk_norm: is_qwen(architecture) || is_maple,
        group_scales: (architecture == Architecture::MiniCpm || is_qwen(architecture) || is_maple)
            && pooling.is_none(),
        ternary_tables: is_qwen(architecture) && pooling.is_none(),
        // Those of the tensors are found with them.
        linear_biases: Vec::new(),
        multipliers: match architecture {
            Architecture::MiniCpm => multipliers(&keys)?,
            _ => Multipliers::NONE,
        },
        rotary_dim: match turns_part {
            true => Some(rotary_dim(&keys, head_dim)?).filter(|turned| *turned != head_dim),
            false => None,
        },
        delta_net,
        // Read with the names of the tensors.
        rotation: None,
        windows: is_maple.then(|| maple::windows(file, &keys, layer_count)).transpose()?,
        experts: is_maple.then(|| maple::experts(file, &keys, layer_count)).transpose()?,
        pooling,
        tied_head: architecture.is_bitnet() || !has_output,
        bos_token: global.token("tokenizer.ggml.bos_token_id", vocab_size)?,
        eos_tokens: Vec::new(),
    })
}

/// Returns the blocks after the layers. These draft tokens, which changes no answer; only hybrid models have some.
///
/// # Errors
/// If `block_count` is missing or out of range, or all blocks draft tokens.
pub(crate) fn draft_blocks(
    gguf: &Gguf<'_>,
    (architecture, name): (Architecture, &str),
) -> Result<Range<usize>, ModelError> {
    let prefix = format!("{name}.");
    let keys = Keys { gguf, prefix: &prefix };
    let blocks = keys.required_size("block_count", LAYERS_MAX)?;
    let drafts = match architecture {
        Architecture::Qwen35 => keys.whole(DRAFT_BLOCKS_KEY)?.unwrap_or(0),
        _ => 0,
    };
    match usize::try_from(drafts).ok().and_then(|drafts| blocks.checked_sub(drafts)) {
        Some(layers) if layers > 0 => Ok(layers..blocks),
        _ => Err(keys.bad(DRAFT_BLOCKS_KEY, "less than block_count")),
    }
}

/// Reads the base of the RoPE frequencies. All layers of Maple that have RoPE have windows.
fn rope_theta(keys: &Keys<'_>, is_maple: bool) -> Result<f32, ModelError> {
    let of_windows = match is_maple {
        true => keys.positive("rope.freq_base_swa", f32::MAX)?,
        false => None,
    };
    Ok(match of_windows {
        Some(theta) => theta,
        None => keys.positive("rope.freq_base", f32::MAX)?.unwrap_or(10_000.0),
    })
}

fn is_qwen(architecture: Architecture) -> bool {
    matches!(architecture, Architecture::Qwen3 | Architecture::Qwen35)
}

/// Reads the recurrent layers. Whether their rates are dense is found with the tensors.
fn delta_net(file: &str, keys: &Keys<'_>) -> Result<DeltaNet, ModelError> {
    check_sections(file, keys)?;
    let attention_interval = keys.size("full_attention_interval", LAYERS_MAX)?.unwrap_or(4);
    let key_heads = keys.required_size("ssm.group_count", WIDTH_MAX)?;
    let value_heads = keys.required_size("ssm.time_step_rank", WIDTH_MAX)?;
    let head_dim = keys.required_size("ssm.state_size", 1024)?;
    let delta =
        DeltaNet { attention_interval, key_heads, value_heads, head_dim, dense_rates: false };
    if keys.required_size("ssm.conv_kernel", WIDTH_MAX)? != DeltaNet::TAPS {
        return Err(keys.unsupported("ssm.conv_kernel", "convolutions of other lengths than 4"));
    }
    if !value_heads.is_multiple_of(key_heads) {
        return Err(keys.bad("ssm.time_step_rank", "a multiple of ssm.group_count"));
    }
    if !head_dim.is_multiple_of(16) {
        return Err(keys.bad("ssm.state_size", "a multiple of 16"));
    }
    if delta.channels() as u64 > WIDTH_MAX {
        return Err(keys.bad("ssm.time_step_rank", "heads times ssm.state_size within 2^20"));
    }
    if keys.required_size("ssm.inner_size", WIDTH_MAX)? != delta.values() {
        return Err(keys.bad("ssm.inner_size", "ssm.time_step_rank times ssm.state_size"));
    }
    Ok(delta)
}

/// Checks the sections of RoPE. They change nothing for text, of which all positions are equal, but a key of another kind means
/// something else.
fn check_sections(file: &str, keys: &Keys<'_>) -> Result<(), ModelError> {
    const KEY: &str = "rope.dimension_sections";
    const SECTIONS_MAX: usize = 4;
    let Some(sections) = keys.array(KEY)? else { return Ok(()) };
    let is_count = |value: &Value<'_>| match value {
        Value::Unsigned(_) => true,
        Value::Signed(count) => *count >= 0,
        _ => false,
    };
    let counts = sections.len() <= SECTIONS_MAX
        && sections.values(file).all(|value| value.is_ok_and(|value| is_count(&value)));
    if counts { Ok(()) } else { Err(keys.bad(KEY, "up to four whole numbers of at least 0")) }
}

/// Reads the number of elements of a head that RoPE turns.
fn rotary_dim(keys: &Keys<'_>, head_dim: usize) -> Result<usize, ModelError> {
    const KEY: &str = "rope.dimension_count";
    match keys.size(KEY, head_dim as u64)?.unwrap_or(head_dim) {
        turned if turned.is_multiple_of(2) => Ok(turned),
        _ => Err(keys.bad(KEY, "an even number")),
    }
}

/// Reads how texts become vectors: type 3 of llama.cpp's kinds is the last token, 0 none. BitNet embedding models are `qwen3` files with
/// it, and with a norm in front of each linear.
fn pooling(keys: &Keys<'_>, architecture: Architecture) -> Result<Option<Pooling>, ModelError> {
    const KEY: &str = "pooling_type";
    match keys.get(KEY) {
        None | Some(Value::Unsigned(0) | Value::Signed(0)) => Ok(None),
        Some(Value::Unsigned(3) | Value::Signed(3)) if architecture == Architecture::Qwen3 => {
            Ok(Some(Pooling::LastToken))
        }
        Some(_) => Err(keys.unsupported(KEY, "vectors of texts other than the last token's")),
    }
}

/// Reads the number of elements of a head, of queries, keys and values alike.
fn head_dim(
    keys: &Keys<'_>,
    (hidden_size, head_count): (usize, usize),
    turns_part: bool,
) -> Result<usize, ModelError> {
    let head_dim = match keys.size("attention.key_length", WIDTH_MAX)? {
        Some(length) => length,
        None if hidden_size.is_multiple_of(head_count) => hidden_size / head_count,
        None => return Err(keys.bad("attention.head_count", "a divisor of embedding_length")),
    };
    if !head_dim.is_multiple_of(2) || (head_count * head_dim) as u64 > WIDTH_MAX {
        return Err(keys.bad("attention.head_count", "heads of an even width, 2^20 in all"));
    }
    for key in ["attention.value_length", "rope.dimension_count"] {
        if key == "rope.dimension_count" && turns_part {
            continue;
        }
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
