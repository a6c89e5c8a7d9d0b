//! The recurrent layers of Qwen3.5 in a `config.json`. Defaults are those of transformers' `Qwen3_5TextConfig`.

use serde_json::Value;

use super::json_keys::Keys;
use crate::{
    config::DeltaNet,
    files::{
        error::ModelError,
        limits::{LAYERS_MAX, WIDTH_MAX},
    },
};

/// Reads the recurrent layers. Whether their rates are dense is found with the tensors.
pub(super) fn delta_net(keys: &Keys<'_>, layer_count: usize) -> Result<DeltaNet, ModelError> {
    let size = |key: &str| keys.size(key, WIDTH_MAX)?.ok_or_else(|| keys.missing(key));
    if size("linear_conv_kernel_dim")? != DeltaNet::TAPS {
        let why = "convolutions of other lengths than 4";
        return Err(keys.unsupported("linear_conv_kernel_dim", why));
    }
    if keys.flag("attn_output_gate")? == Some(false) {
        return Err(keys.unsupported("attn_output_gate", "attention without a gate"));
    }
    let delta = DeltaNet {
        attention_interval: attention_interval(keys, layer_count)?,
        key_heads: size("linear_num_key_heads")?,
        value_heads: size("linear_num_value_heads")?,
        head_dim: size("linear_key_head_dim")?,
        dense_rates: false,
    };
    if size("linear_value_head_dim")? != delta.head_dim {
        let why = "heads of values with another width than those of keys";
        return Err(keys.unsupported("linear_value_head_dim", why));
    }
    if !delta.value_heads.is_multiple_of(delta.key_heads) {
        return Err(keys.bad("linear_num_value_heads", "a multiple of linear_num_key_heads"));
    }
    if !delta.head_dim.is_multiple_of(16) || delta.head_dim > 1024 {
        return Err(keys.bad("linear_key_head_dim", "a multiple of 16, at most 1024"));
    }
    if delta.channels() as u64 > WIDTH_MAX {
        return Err(keys.bad("linear_num_value_heads", "heads times their width within 2^20"));
    }
    Ok(delta)
}

/// Reads after how many layers one has attention.
fn attention_interval(keys: &Keys<'_>, layer_count: usize) -> Result<usize, ModelError> {
    const INTERVAL: &str = "full_attention_interval";
    const TYPES: &str = "layer_types";
    let given = keys.size(INTERVAL, LAYERS_MAX)?;
    let Some(types) = keys.get(TYPES) else {
        return match given.unwrap_or(4) {
            interval if interval <= layer_count => Ok(interval),
            _ => Err(keys.bad(INTERVAL, "at most num_hidden_layers")),
        };
    };
    let expected = "num_hidden_layers types, of which every so many one is full_attention";
    let types = types.as_array().ok_or_else(|| keys.bad(TYPES, expected))?;
    let is_full = |kind: &Value| kind == "full_attention";
    let first = types.iter().position(is_full).ok_or_else(|| keys.bad(TYPES, expected))?;
    let interval = given.unwrap_or(first + 1);
    let fits = types.len() == layer_count
        && types.iter().enumerate().all(|(layer, kind)| {
            let has_attention = (layer + 1).is_multiple_of(interval);
            if has_attention { is_full(kind) } else { kind == "linear_attention" }
        });
    if fits {
        Ok(interval)
    } else {
        Err(keys.unsupported(TYPES, "layers of other kinds or in another order"))
    }
}

/// Reads the number of elements of a head that RoPE turns; a quarter without the key.
pub(super) fn rotary_dim(keys: &Keys<'_>, head_dim: usize) -> Result<usize, ModelError> {
    const KEY: &str = "partial_rotary_factor";
    let block = keys.get("rope_parameters").and_then(Value::as_object);
    let inner = block.map(|map| Keys { map, prefix: "rope_parameters." });
    let keys = inner.as_ref().filter(|inner| inner.get(KEY).is_some()).unwrap_or(keys);
    let factor = keys.get(KEY).map_or(Some(0.25), Value::as_f64);
    // As transformers: towards zero.
    let turned = factor.map_or(0, |factor| (head_dim as f64 * factor) as usize);
    match (2..=head_dim).contains(&turned) && turned.is_multiple_of(2) {
        true => Ok(turned),
        false => Err(keys.bad(KEY, "a share of the head with an even number of elements")),
    }
}
