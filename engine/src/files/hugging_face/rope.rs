//! RoPE in a `config.json`: the base, a key of its own or inside a block, and the scaling of the frequencies.
//!
//! The block is `rope_scaling`, or `rope_parameters` since transformers 5. Scaling by 1 counts as no scaling, so that
//! equal models have equal fingerprints. Unknown kinds and keys are errors that name the key.

use serde_json::Value;

use super::json_keys::Keys;
use crate::{
    config::{LongFactors, RopeScaling, Yarn},
    files::error::ModelError,
};

/// Largest context accepted.
const CONTEXT_MAX: u64 = u32::MAX as u64;

/// The family of which RoPE turns a part of a head, in place of a kind of scaling.
pub(super) const HYBRID: &str = "qwen35";

/// Base and scaling. The base is `None` if the file leaves it to the default of the model family.
pub(super) struct Rope {
    pub theta: Option<f32>,
    pub scaling: RopeScaling,
}

/// Sizes of a model that a scaling may depend on.
#[derive(Clone, Copy)]
pub(super) struct Shape {
    /// Longest sequence; the original context of a scaling that does not name one.
    pub context_length: usize,
    /// Half of a head.
    pub frequencies: usize,
}

/// Reads base and scaling. `own` is a kind of scaling that only this model's family has: `yarn` or `longrope`.
pub(super) fn parse(keys: &Keys<'_>, shape: Shape, own: Option<&str>) -> Result<Rope, ModelError> {
    let mut rope = Rope { theta: keys.positive("rope_theta")?, scaling: RopeScaling::None };
    for block in ["rope_scaling", "rope_parameters"] {
        let Some(value) = keys.get(block) else { continue };
        let Some(map) = value.as_object() else {
            return Err(keys.bad(block, "an object"));
        };
        let prefix = format!("{block}.");
        let inner = Keys { map, prefix: &prefix };
        rope.theta = inner.positive("rope_theta")?.or(rope.theta);
        let scaling = scaling(&inner, shape, own)?;
        if rope.scaling.is_none() {
            rope.scaling = scaling;
        } else if !scaling.is_none() && scaling != rope.scaling {
            return Err(keys.bad(block, "the scaling that rope_scaling has"));
        }
    }
    Ok(rope)
}

fn scaling(keys: &Keys<'_>, shape: Shape, own: Option<&str>) -> Result<RopeScaling, ModelError> {
    let context_length = shape.context_length;
    // Older files call the key `type`; with both, transformers reads `rope_type`.
    let kind_key = if keys.get("rope_type").is_some() { "rope_type" } else { "type" };
    let (scaling, known): (_, &[&str]) = match keys.text(kind_key)?.unwrap_or("default") {
        "default" => (RopeScaling::None, &[]),
        "linear" => (linear(factor(keys, "factor")?), &["factor"]),
        "llama3" => (llama3(keys, context_length)?, &LLAMA3_KEYS),
        "yarn" if own == Some("yarn") => (yarn(keys, context_length)?, &YARN_KEYS),
        "longrope" if own == Some("longrope") => (longrope(keys, shape)?, &LONGROPE_KEYS),
        _ => return Err(keys.unsupported(kind_key, "this kind of RoPE scaling")),
    };
    for key in keys.map.keys().map(String::as_str) {
        let Some(value) = keys.get(key) else { continue };
        let fine = match key {
            "rope_theta" | "rope_type" | "type" => true,
            // Of text all positions are equal, so that their division changes nothing.
            "partial_rotary_factor" | "mrope_section" | "mrope_interleaved"
                if own == Some(HYBRID) =>
            {
                true
            }
            "partial_rotary_factor" => value.as_f64() == Some(1.0),
            _ => known.contains(&key),
        };
        if !fine {
            return Err(keys.unsupported(key, "RoPE scaling"));
        }
    }
    Ok(scaling)
}

/// Returns linear scaling; by 1 there is no scaling.
pub(super) fn linear(factor: f32) -> RopeScaling {
    if factor == 1.0 { RopeScaling::None } else { RopeScaling::Linear { factor } }
}

const LLAMA3_KEYS: [&str; 4] =
    ["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"];

fn llama3(keys: &Keys<'_>, context_length: usize) -> Result<RopeScaling, ModelError> {
    let [factor_key, low_key, high_key, context_key] = LLAMA3_KEYS;
    let (low, high) = (factor(keys, low_key)?, factor(keys, high_key)?);
    if low >= high {
        return Err(keys.bad(high_key, "a number above low_freq_factor"));
    }
    Ok(RopeScaling::Llama3 {
        factor: factor(keys, factor_key)?,
        low_frequency_factor: low,
        high_frequency_factor: high,
        original_context_length: keys.size(context_key, CONTEXT_MAX)?.unwrap_or(context_length),
    })
}

const YARN_KEYS: [&str; 5] =
    ["factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate"];

/// Reads YaRN. Keys that change its formula may only have their default values.
fn yarn(keys: &Keys<'_>, context_length: usize) -> Result<RopeScaling, ModelError> {
    let [factor_key, context_key, fast_key, slow_key, truncate_key] = YARN_KEYS;
    let factor = factor(keys, factor_key)?;
    if !(1.0..=Yarn::FACTOR_MAX).contains(&factor) {
        return Err(keys.bad(factor_key, "a factor from 1 to 65536"));
    }
    let has_other = |key: &str, default: f64| {
        keys.get(key).is_some_and(|value| value.as_f64() != Some(default))
    };
    for (key, is_other) in [
        (fast_key, has_other(fast_key, 32.0)),
        (slow_key, has_other(slow_key, 1.0)),
        (truncate_key, keys.get(truncate_key).is_some_and(|value| *value != Value::Bool(true))),
    ] {
        if is_other {
            return Err(keys.unsupported(key, "RoPE scaling"));
        }
    }
    let original_context = keys.size(context_key, CONTEXT_MAX)?.unwrap_or(context_length);
    Ok(RopeScaling::Yarn(Yarn { factor, original_context }))
}

const LONGROPE_KEYS: [&str; 4] =
    ["short_factor", "long_factor", "original_max_position_embeddings", "factor"];

/// Reads the scaling of MiniCPM4, which within the original context divides each frequency by its short factor.
/// LongFactors it the model's code changes the factors with the length of the text, which is refused.
fn longrope(keys: &Keys<'_>, shape: Shape) -> Result<RopeScaling, ModelError> {
    let [short_key, long_key, context_key, _] = LONGROPE_KEYS;
    let original = keys.size(context_key, CONTEXT_MAX)?.ok_or_else(|| keys.missing(context_key))?;
    if shape.context_length > original {
        return Err(keys.unsupported(context_key, "a context beyond the original one"));
    }
    let number = |value: &Value| value.as_f64().map(|number| number as f32);
    let is_good = |divisors: &Vec<f32>| {
        divisors.len() == shape.frequencies && divisors.iter().all(|d| d.is_finite() && *d > 0.0)
    };
    let divisors = |list: &Value| -> Option<Vec<f32>> {
        list.as_array()?.iter().map(number).collect::<Option<_>>().filter(is_good)
    };
    let list = keys.get(short_key).ok_or_else(|| keys.missing(short_key))?;
    let Some(short) = divisors(list) else {
        return Err(keys.bad(short_key, "a positive number for each frequency"));
    };
    let long = keys.get(long_key).and_then(divisors);
    let long_factors = long.map(|divisors| LongFactors { original_context: original, divisors });
    Ok(RopeScaling::of_divisors(short, long_factors))
}

fn factor(keys: &Keys<'_>, key: &str) -> Result<f32, ModelError> {
    keys.positive(key)?.ok_or_else(|| keys.missing(key))
}

/// Returns the block `rope_scaling` of a `config.json`; `None` for divisors, which it cannot express.
pub(crate) fn to_json(scaling: &RopeScaling) -> Option<Value> {
    match scaling {
        RopeScaling::None => Some(Value::Null),
        RopeScaling::Linear { factor } => {
            Some(serde_json::json!({ "rope_type": "linear", "factor": factor }))
        }
        RopeScaling::Llama3 {
            factor,
            low_frequency_factor,
            high_frequency_factor,
            original_context_length,
        } => Some(serde_json::json!({
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": low_frequency_factor,
            "high_freq_factor": high_frequency_factor,
            "original_max_position_embeddings": original_context_length,
        })),
        RopeScaling::Yarn(yarn) => Some(serde_json::json!({
            "rope_type": "yarn",
            "factor": yarn.factor,
            "original_max_position_embeddings": yarn.original_context,
        })),
        RopeScaling::Divisors { .. } => None,
    }
}
