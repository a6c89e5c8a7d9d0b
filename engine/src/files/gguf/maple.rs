//! The experts and windows of `maple` files (llama.cpp `src/models/maple.cpp`).

use super::{
    container::{Array, Value},
    keys::Keys,
};
use crate::{
    config::{Experts, Windows},
    files::{error::ModelError, limits::WIDTH_MAX},
};

/// Bound of gate and up in files without the key.
const CLAMP: f32 = 7.0;

/// Reads the layers that attend within a window.
pub(super) fn windows(
    file: &str,
    keys: &Keys<'_>,
    layer_count: usize,
) -> Result<Windows, ModelError> {
    const PATTERN: &str = "attention.sliding_window_pattern";
    let size = keys.required_size("attention.sliding_window", u64::from(u32::MAX))?;
    let missing = || ModelError::MissingKey { key: keys.name(PATTERN) };
    let pattern = keys.array(PATTERN)?.ok_or_else(missing)?;
    let expected = "true or false for each layer";
    let flag = |value| match value {
        Value::Bool(flag) => Some(flag),
        _ => None,
    };
    let layers = of_layers(file, pattern, layer_count, flag)?;
    Ok(Windows { size, layers: layers.ok_or_else(|| keys.bad(PATTERN, expected))? })
}

/// Reads the number of experts, and the bounds of their gates.
pub(super) fn experts(
    file: &str,
    keys: &Keys<'_>,
    layer_count: usize,
) -> Result<Experts, ModelError> {
    const BOUNDS: &str = "swiglu_clamp_exp";
    let count = keys.required_size("expert_count", u64::from(u16::MAX))?;
    let used = keys.required_size("expert_used_count", u64::from(u16::MAX))?;
    if used > count {
        return Err(keys.bad("expert_used_count", "at most expert_count"));
    }
    let width = keys.required_size("expert_feed_forward_length", WIDTH_MAX)?;
    let hidden = keys.required_size("embedding_length", WIDTH_MAX)?;
    if !width.is_multiple_of(16) || !hidden.is_multiple_of(16) {
        return Err(
            keys.bad("expert_feed_forward_length", "with the hidden size, a multiple of 16")
        );
    }
    let bound = |value| match value {
        Value::Float(bound) => Some(bound as f32).filter(|bound| *bound > 0.0 && bound.is_finite()),
        _ => None,
    };
    let clamp = match keys.array(BOUNDS)? {
        None => vec![CLAMP; layer_count],
        Some(bounds) => of_layers(file, bounds, layer_count, bound)?
            .ok_or_else(|| keys.bad(BOUNDS, "a positive number for each layer"))?,
    };
    Ok(Experts { count, used, clamp })
}

/// Reads one value for each layer; `None` if there are more or fewer, or one is of another kind.
fn of_layers<'a, T>(
    file: &'a str,
    array: Array<'a>,
    layer_count: usize,
    read: impl Fn(Value<'a>) -> Option<T>,
) -> Result<Option<Vec<T>>, ModelError> {
    if array.len() != layer_count {
        return Ok(None);
    }
    array.values(file).map(|value| Ok(read(value?))).collect()
}
