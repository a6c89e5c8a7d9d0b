//! The rotated basis of a file: `prism.hadamard.*`, version 1 (Ternary Bonsai 2; PrismML's fork of llama.cpp).
//!
//! A tensor of `weight_names` holds `W diag(s) H`, with the signs `s` of its width and the Walsh-Hadamard matrix `H` of each block. Every
//! key is read: a file with another one, or with a value that stands for something else, is refused.

use std::{collections::BTreeSet, ops::Range};

use super::{
    container::{Gguf, Value},
    keys::Keys,
    names::{EMBEDDING, HEAD, block_of, linear_name},
    write::Meta,
};
use crate::{
    config::{ModelConfig, Rotation},
    files::{error::ModelError, limits::WIDTH_MAX, roles::linears},
};

/// The namespace of the keys.
pub(super) const NAMESPACE: &str = "prism.hadamard.";

const TRANSFORM: &str = "normalized-sylvester-walsh-hadamard";
const AXIS: &str = "input-last-dimension";
const KEYS: [&str; 10] = [
    "version",
    "block_size",
    "transform",
    "axis",
    "sign_mode",
    "sign_widths",
    "sign_values",
    "weight_names",
    "inverse_weight_names",
    "gdn_v_grouped",
];

/// Reads the rotation; `None` if the file has none. Matrices of the blocks that draft tokens may have it or not.
///
/// # Errors
/// Names the key that is missing, unknown or has a value that is not supported.
pub(super) fn read(
    file: &str,
    gguf: &Gguf<'_>,
    (config, drafts): (&ModelConfig, &Range<usize>),
) -> Result<Option<Rotation>, ModelError> {
    let keys = Keys { gguf, prefix: NAMESPACE };
    let given = || gguf.metadata.keys().filter_map(|key| key.strip_prefix(NAMESPACE));
    if given().next().is_none() {
        return Ok(None);
    }
    if let Some(key) = given().find(|key| !KEYS.contains(key)) {
        return Err(keys.unsupported(key, "a rotated basis of another kind"));
    }
    if keys.required_size("version", WIDTH_MAX)? != 1 {
        return Err(keys.unsupported("version", "only version 1 is known"));
    }
    let texts =
        [("transform", "normalized-sylvester-walsh-hadamard"), ("axis", "input-last-dimension")];
    for (key, known) in texts {
        if keys.required_text(key)? != known {
            return Err(keys.unsupported(key, "a rotated basis of another kind"));
        }
    }
    if config.tied_head {
        return Err(keys.unsupported("weight_names", "a head that is the rotated embedding"));
    }
    if keys.flag("gdn_v_grouped")? != Some(true) {
        return Err(keys.unsupported("gdn_v_grouped", "outputs of value heads in tiled order"));
    }
    let expected: BTreeSet<String> = linears(config)
        .map(|(layer, linear)| linear_name(layer, linear))
        .chain([HEAD.to_owned()])
        .collect();
    let rates_are_rotated = config.delta_net.is_some_and(|delta| !delta.dense_rates);
    let mut rotated = names(&keys, file, "weight_names")?;
    rotated.retain(|name| block_of(name).is_none_or(|block| !drafts.contains(&block)));
    if rates_are_rotated || rotated != expected {
        return Err(keys.unsupported("weight_names", "a basis that only some matrices have"));
    }
    if names(&keys, file, "inverse_weight_names")? != BTreeSet::from([EMBEDDING.to_owned()]) {
        return Err(keys.unsupported("inverse_weight_names", "others than the embedding"));
    }
    let block = keys.required_size("block_size", WIDTH_MAX)?;
    let widths: BTreeSet<usize> =
        linears(config).map(|(_, linear)| config.linear_shape(linear).1).collect();
    let fits = widths.iter().all(|width| width.is_multiple_of(block));
    if !block.is_power_of_two() || block < 16 || !fits {
        return Err(keys.bad("block_size", "a power of two from 16 on that divides all inputs"));
    }
    let signs = match keys.required_text("sign_mode")? {
        "identity" => Vec::new(),
        "explicit" => signs(&keys, file, &widths)?,
        _ => return Err(keys.unsupported("sign_mode", "only explicit and identity are known")),
    };
    Ok(Some(Rotation { block, signs }))
}

/// Returns the keys of a rotation.
pub(crate) fn metadata(rotation: &Rotation, config: &ModelConfig) -> Vec<(String, Meta)> {
    let text = |text: &str| Meta::Text(text.to_owned());
    let linears = linears(config).map(|(layer, linear)| linear_name(layer, linear));
    let names = linears.chain([HEAD.to_owned()]).collect();
    let mode = if rotation.signs.is_empty() { "identity" } else { "explicit" };
    let mut keys = vec![
        ("version", Meta::U32(1)),
        ("block_size", Meta::U32(rotation.block as u32)),
        ("transform", text(TRANSFORM)),
        ("axis", text(AXIS)),
        ("sign_mode", text(mode)),
        ("weight_names", Meta::Texts(names)),
        ("inverse_weight_names", Meta::Texts(vec![EMBEDDING.to_owned()])),
        ("gdn_v_grouped", Meta::Bool(true)),
    ];
    if !rotation.signs.is_empty() {
        let widths = rotation.signs.iter().map(|signs| signs.len() as u32).collect();
        let values = rotation.signs.iter().flatten().map(|sign| *sign as i32).collect();
        keys.extend([("sign_widths", Meta::U32s(widths)), ("sign_values", Meta::I32s(values))]);
    }
    keys.into_iter().map(|(key, value)| (format!("{NAMESPACE}{key}"), value)).collect()
}

/// Reads a list of names of tensors.
fn names(keys: &Keys<'_>, file: &str, key: &str) -> Result<BTreeSet<String>, ModelError> {
    let missing = || ModelError::MissingKey { key: keys.name(key) };
    let list = keys.array(key)?.ok_or_else(missing)?;
    let text = |value: Result<Value<'_>, ModelError>| match value? {
        Value::Text(text) => Ok(text.to_owned()),
        _ => Err(keys.bad(key, "a list of names")),
    };
    list.values(file).map(text).collect()
}

/// Reads the signs of each width.
fn signs(
    keys: &Keys<'_>,
    file: &str,
    widths: &BTreeSet<usize>,
) -> Result<Vec<Vec<f32>>, ModelError> {
    const WIDTHS: &str = "sign_widths";
    const VALUES: &str = "sign_values";
    let whole = |key: &'static str| {
        let missing = || ModelError::MissingKey { key: keys.name(key) };
        let list = keys.array(key)?.ok_or_else(missing)?;
        let number = |value: Result<Value<'_>, ModelError>| match value? {
            Value::Unsigned(number) => {
                i64::try_from(number).map_err(|_| keys.bad(key, "whole numbers within bounds"))
            }
            Value::Signed(number) => Ok(number),
            _ => Err(keys.bad(key, "a list of whole numbers")),
        };
        list.values(file).map(number).collect::<Result<Vec<i64>, ModelError>>()
    };
    let (given, values) = (whole(WIDTHS)?, whole(VALUES)?);
    let distinct: BTreeSet<i64> = given.iter().copied().collect();
    let wanted: BTreeSet<i64> = widths.iter().map(|width| *width as i64).collect();
    if distinct != wanted || given.len() != wanted.len() {
        return Err(keys.bad(WIDTHS, "each number of inputs of the matrices, once"));
    }
    if values.len() as i64 != given.iter().sum::<i64>() {
        return Err(keys.bad(VALUES, "as many as the sum of sign_widths"));
    }
    if values.iter().any(|value| value.abs() != 1) {
        return Err(keys.bad(VALUES, "only 1 and -1"));
    }
    let mut rest = &values[..];
    let of_width = |width: i64| {
        let (signs, after) = rest.split_at(width as usize);
        rest = after;
        signs.iter().map(|sign| *sign as f32).collect()
    };
    Ok(given.into_iter().map(of_width).collect())
}
