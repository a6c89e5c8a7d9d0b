//! The experts and windows of Maple in a `config.json` (deepgrove's `MapleForCausalLM`). What its converter to GGUF insists on is
//! required here, too: a checkpoint of another kind has the same keys.

use serde_json::Value;

use super::json_keys::Keys;
use crate::{
    config::{Experts, Windows},
    files::{error::ModelError, limits::WIDTH_MAX},
};

/// Keys of Maple.
pub(super) const KEYS: [&str; 11] = [
    "moe_intermediate_size",
    "num_experts",
    "num_experts_per_tok",
    "num_shared_experts",
    "norm_topk_prob",
    "sliding_window",
    "layer_types",
    "nope_on_global_attention",
    "use_qk_norm",
    "router_dtype",
    ROTARY,
];
/// Share of a head that RoPE turns.
const ROTARY: &str = "partial_rotary_factor";
/// Bound of gate and up; the configuration has no key for it.
const CLAMP: f32 = 7.0;

/// Reads the layers that attend within a window.
pub(super) fn windows(keys: &Keys<'_>, layer_count: usize) -> Result<Windows, ModelError> {
    const TYPES: &str = "layer_types";
    for (key, why) in [
        ("nope_on_global_attention", "RoPE in layers without a window"),
        ("use_qk_norm", "queries and keys without norms"),
    ] {
        if keys.flag(key)? != Some(true) {
            return Err(keys.unsupported(key, why));
        }
    }
    let rope = keys.get("rope_parameters").and_then(Value::as_object);
    if keys.get(ROTARY).is_none() && rope.is_none_or(|rope| !rope.contains_key(ROTARY)) {
        return Err(keys.missing(ROTARY));
    }
    let size = keys.required_size("sliding_window", u64::from(u32::MAX))?;
    let types = keys.get(TYPES).ok_or_else(|| keys.missing(TYPES))?;
    let has_window = |kind: &Value| match kind.as_str() {
        Some("sliding_attention") => Some(true),
        Some("full_attention") => Some(false),
        _ => None,
    };
    let types = types.as_array().filter(|types| types.len() == layer_count);
    let layers = types.and_then(|types| types.iter().map(has_window).collect());
    let expected = "sliding_attention or full_attention for each layer";
    Ok(Windows { size, layers: layers.ok_or_else(|| keys.bad(TYPES, expected))? })
}

/// Reads the number of experts.
pub(super) fn experts(
    keys: &Keys<'_>,
    (hidden, layer_count): (usize, usize),
) -> Result<Experts, ModelError> {
    if keys.flag("norm_topk_prob")? != Some(true) {
        let why = "weights of experts that are not divided by their sum";
        return Err(keys.unsupported("norm_topk_prob", why));
    }
    if keys.get("num_shared_experts").is_some_and(|shared| shared.as_u64() != Some(0)) {
        return Err(keys.unsupported("num_shared_experts", "experts of all tokens"));
    }
    if keys.text("router_dtype")?.is_some_and(|dtype| !matches!(dtype, "fp32" | "float32")) {
        return Err(keys.unsupported("router_dtype", "a router in another type than float32"));
    }
    for (key, value, why) in [
        ("scoring_func", "softmax", "a router without softmax"),
        ("hidden_act", "silu", "experts with another gate"),
    ] {
        if keys.text(key)?.is_some_and(|text| text != value) {
            return Err(keys.unsupported(key, why));
        }
    }
    if keys.flag("tie_word_embeddings")? == Some(true) {
        return Err(keys.unsupported("tie_word_embeddings", "a head that is the embedding"));
    }
    let count = keys.required_size("num_experts", u64::from(u16::MAX))?;
    let used = keys.required_size("num_experts_per_tok", u64::from(u16::MAX))?;
    if used > count {
        return Err(keys.bad("num_experts_per_tok", "at most num_experts"));
    }
    let width = keys.required_size("moe_intermediate_size", WIDTH_MAX)?;
    if !width.is_multiple_of(16) || !hidden.is_multiple_of(16) {
        return Err(keys.bad("moe_intermediate_size", "with hidden_size, a multiple of 16"));
    }
    Ok(Experts { count, used, clamp: vec![CLAMP; layer_count] })
}
