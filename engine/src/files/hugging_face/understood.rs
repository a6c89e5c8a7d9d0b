//! Refuses folders with settings or files that may change a result and that no code reads.
//!
//! A key of `config.json` is accepted if it is read; if it is in [`UNSUPPORTED_KEYS`] with the value that stands for a feature's
//! absence; if its value is null, false, zero or empty; if its name speaks of training or of an implementation; or if no word of
//! its name has to do with the arithmetic ([`needs`]). Hence `attn_output_gate` = true is an error, `something_new` is not: configurations
//! have many keys that only tools read.

use std::path::Path;

use serde_json::Value;

use super::{family::Family, json_keys::Keys};
use crate::files::{error::ModelError, needs};

/// Files that say how the weights beside them were changed.
const CHANGING_FILES: [&str; 2] = ["hadamard_packing.json", "hadamard.json"];

/// The value of an unsupported key that changes nothing (a null or missing key never changes anything).
#[derive(Clone, Copy)]
enum Neutral {
    False,
    True,
    One,
    Zero,
    Nothing,
}

/// Keys for features that the engine does not support: key, harmless value, feature.
const UNSUPPORTED_KEYS: &[(&str, Neutral, &str)] = &[
    ("qkv_bias", Neutral::False, "biases"),
    ("use_bias", Neutral::False, "biases"),
    ("bias", Neutral::False, "biases"),
    ("partial_rotary_factor", Neutral::One, "partial RoPE"),
    ("rotary_pct", Neutral::One, "partial RoPE"),
    ("rotary_dim", Neutral::Nothing, "partial RoPE"),
    ("no_rope_layers", Neutral::Nothing, "layers without RoPE"),
    ("alibi", Neutral::False, "ALiBi positions"),
    ("attention_chunk_size", Neutral::Nothing, "chunked attention"),
    ("num_experts", Neutral::Zero, "mixture of experts"),
    ("num_local_experts", Neutral::Zero, "mixture of experts"),
    ("n_routed_experts", Neutral::Zero, "mixture of experts"),
    ("num_experts_per_tok", Neutral::Zero, "mixture of experts"),
    ("n_group", Neutral::One, "groups of experts"),
    ("is_causal", Neutral::True, "attention to later positions"),
    ("causal", Neutral::True, "attention to later positions"),
    ("use_rope", Neutral::True, "layers without RoPE"),
    ("scale_attn_weights", Neutral::True, "a different attention scale"),
    ("attention_multiplier", Neutral::Nothing, "a different attention scale"),
    ("attention_in_multiplier", Neutral::One, "scaled activations"),
    ("attention_out_multiplier", Neutral::One, "scaled activations"),
    ("key_multiplier", Neutral::One, "scaled keys"),
    ("query_pre_attn_scalar", Neutral::Nothing, "a different attention scale"),
    ("residual_multiplier", Neutral::One, "scaled residuals"),
    ("embedding_multiplier", Neutral::One, "scaled embeddings"),
    ("lm_head_multiplier", Neutral::One, "scaled logits"),
    ("scale_emb", Neutral::One, "scaled embeddings"),
    ("scale_depth", Neutral::One, "scaled residuals"),
    ("logits_scaling", Neutral::One, "scaled logits"),
    ("logit_scale", Neutral::One, "scaled logits"),
    ("final_logit_softcapping", Neutral::Nothing, "capped logits"),
    ("attn_logit_softcapping", Neutral::Nothing, "capped attention scores"),
    ("use_qk_norm", Neutral::False, "normalized queries and keys"),
    ("qk_layernorm", Neutral::False, "normalized queries and keys"),
    ("qk_norm", Neutral::False, "normalized queries and keys"),
    ("parallel_attn", Neutral::False, "parallel attention"),
    ("use_parallel_residual", Neutral::False, "parallel residuals"),
    ("is_encoder_decoder", Neutral::False, "an encoder"),
    ("add_cross_attention", Neutral::False, "cross attention"),
    ("sparse_config", Neutral::Nothing, "sparse attention"),
    ("mamba_d_state", Neutral::Nothing, "state-space layers"),
];

/// Keys that are read, here or in [`super::config`], and have a word of the arithmetic in their names.
const READ_KEYS: [&str; 14] = [
    "attention_bias",
    "layer_types",
    "max_window_layers",
    "mlp_bias",
    "num_attention_heads",
    "num_key_value_heads",
    "quantization",
    "quantization_config",
    "rms_norm_eps",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "sliding_window",
    "use_sliding_window",
];

/// Words of keys that change nothing at inference: training, implementations of the same function, what is returned.
const HARMLESS_WORDS: [&str; 19] = [
    "dropout",
    "drop",
    "pdrop",
    "loss",
    "coef",
    "aux",
    "jitter",
    "init",
    "initializer",
    "implementation",
    "flash",
    "flash_attn",
    "sdpa",
    "dtype",
    "checkpointing",
    "output_attentions",
    "output_router_logits",
    "logits_to_keep",
    "fused",
];

/// Names of other libraries for `rms_norm_eps`.
const EPSILON_KEYS: [&str; 3] = ["norm_eps", "layer_norm_eps", "layer_norm_epsilon"];

/// Refuses a configuration that asks for more than is computed.
///
/// # Errors
/// Names the first such key, and what it would need.
pub(super) fn refuse_keys(keys: &Keys<'_>, family: Family) -> Result<(), ModelError> {
    for &(key, harmless, feature) in UNSUPPORTED_KEYS {
        let Some(value) = keys.get(key) else { continue };
        if family.own_keys().contains(&key) {
            continue;
        }
        let fine = match harmless {
            Neutral::False => value == &Value::Bool(false),
            Neutral::True => value == &Value::Bool(true),
            Neutral::One => value.as_f64() == Some(1.0),
            Neutral::Zero => value.as_f64() == Some(0.0),
            Neutral::Nothing => false,
        };
        if !fine {
            return Err(keys.unsupported(key, feature));
        }
    }
    let window_off = keys.get("use_sliding_window") == Some(&Value::Bool(false));
    let has_windows = family == Family::Maple;
    if keys.get("sliding_window").is_some() && !window_off && !has_windows {
        return Err(keys.unsupported("sliding_window", "windowed attention"));
    }
    if keys.get("use_sliding_window") == Some(&Value::Bool(!has_windows)) {
        let why = if has_windows { "attention without windows" } else { "windowed attention" };
        return Err(keys.unsupported("use_sliding_window", why));
    }
    if let Some(types) =
        keys.get("layer_types").filter(|_| family != Family::Qwen35 && !has_windows)
    {
        let full = |kind: &Value| kind == "full_attention";
        if !types.as_array().is_some_and(|types| types.iter().all(full)) {
            return Err(keys.unsupported("layer_types", "layers other than full attention"));
        }
    }
    refuse_unknown_keys(keys, family)
}

/// Refuses keys that no table has and that have to do with the arithmetic, by their names.
fn refuse_unknown_keys(keys: &Keys<'_>, family: Family) -> Result<(), ModelError> {
    for (key, value) in keys.map {
        let is_listed = READ_KEYS.contains(&key.as_str())
            || family.own_keys().contains(&key.as_str())
            || UNSUPPORTED_KEYS.iter().any(|(listed, ..)| listed == key);
        // Names with `_` in front are of transformers itself.
        if is_listed
            || key.starts_with('_')
            || is_absence(key, value)
            || needs::has_any(key, &HARMLESS_WORDS)
            || (EPSILON_KEYS.contains(&key.as_str()) && keys.get("rms_norm_eps") == Some(value))
        {
            continue;
        }
        if let Some(need) = needs::by_words(key) {
            return Err(keys.unsupported(key, need));
        }
    }
    Ok(())
}

/// Returns whether a value says that a feature is absent; a factor of 1 does, too.
fn is_absence(key: &str, value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Bool(true) => false,
        Value::Number(number) => {
            let is_factor = needs::has_any(key, &["multiplier", "scale", "scaling", "factor"]);
            number.as_f64() == Some(0.0) || (is_factor && number.as_f64() == Some(1.0))
        }
        Value::String(text) => text.is_empty(),
        Value::Array(list) => list.is_empty(),
        Value::Object(map) => map.is_empty(),
    }
}

/// Refuses a folder with a file that changes the meaning of its weights.
///
/// # Errors
/// Names the file.
pub(super) fn refuse_files(folder: &Path) -> Result<(), ModelError> {
    match CHANGING_FILES.iter().find(|file| folder.join(file).exists()) {
        Some(file) => Err(ModelError::UnsupportedFile {
            file: (*file).to_owned(),
            why: "the weights are in a rotated (Hadamard) basis, and this build does not transform inputs",
        }),
        None => Ok(()),
    }
}

/// Parts of Qwen3.5 that no text needs, by the beginning of their tensors' names.
pub(super) const SKIPPED_PARTS: [(&str, &str); 2] =
    [("model.visual.", needs::OTHER_INPUTS), ("mtp.", needs::DRAFTS)];

/// Returns whether a tensor without a role may stay in the folder, because it changes no result:
///
/// - `lm_head.weight` of a model that shares its embedding: transformers ties both, whatever the file has;
/// - the [parts](SKIPPED_PARTS) of Qwen3.5 that no text needs;
/// - `rotary_emb.inv_freq`, which old versions of transformers saved and no version reads: the frequencies follow from theta.
pub(super) fn ignores(tensor: &str, tied_head: bool, is_hybrid: bool) -> bool {
    if is_hybrid && SKIPPED_PARTS.iter().any(|(prefix, _)| tensor.starts_with(prefix)) {
        return true;
    }
    let is_frequencies = |name: &str| {
        let Some(module) = name.strip_suffix("rotary_emb.inv_freq") else { return false };
        module == "model."
            || (module.starts_with("model.layers.") && module.ends_with(".self_attn."))
    };
    (tied_head && tensor == "lm_head.weight") || is_frequencies(tensor)
}
