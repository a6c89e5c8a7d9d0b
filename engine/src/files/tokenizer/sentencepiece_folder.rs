//! The tokenizer of a folder that has `tokenizer.model` and no `tokenizer.json`.
//!
//! `tokenizer_config.json` says which tokens surround a prompt, where a space is added, and which tokens were added
//! after the training (`added_tokens.json` in older folders). What it leaves open is as in transformers' Llama
//! tokenizer of the same age: BOS before a prompt, no EOS, `legacy` spaces.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::Value;

use super::{
    json::{added_token, post_processor},
    pieces::{PieceKind, Pieces, PrefixSpace},
    sentencepiece,
};
use crate::{
    files::error::ModelError,
    tokenizer::{Charsmap, TokenizerConfig, TokenizerError},
};

/// Files beside `tokenizer.model`.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct TokenizerFiles<'a> {
    /// `tokenizer_config.json`
    pub config: Option<&'a [u8]>,
    /// `special_tokens_map.json`
    pub special_tokens_map: Option<&'a [u8]>,
    /// `added_tokens.json`
    pub added_tokens: Option<&'a [u8]>,
}

/// Keys of `tokenizer_config.json` that change tokens.
#[derive(Debug, Default, Deserialize)]
struct Settings {
    add_bos_token: Option<bool>,
    add_eos_token: Option<bool>,
    add_prefix_space: Option<bool>,
    legacy: Option<bool>,
}

fn parse<'a, T: Deserialize<'a> + Default>(
    file: &'static str,
    bytes: Option<&'a [u8]>,
) -> Result<T, ModelError> {
    let Some(bytes) = bytes else { return Ok(T::default()) };
    let parsed = serde_json::from_slice(bytes);
    Ok(parsed.map_err(|source| TokenizerError::Json { file, source })?)
}

/// Returns the `tokenizer.json` of a folder.
///
/// # Errors
/// Names the file, and the byte, line, key or piece at fault.
pub(crate) fn to_json(model: &[u8], files: TokenizerFiles<'_>) -> Result<Vec<u8>, ModelError> {
    let model = sentencepiece::parse(model)?;
    let settings: Settings = parse("tokenizer_config.json", files.config)?;
    let config = TokenizerConfig::parse(files.config, files.special_tokens_map)?;
    if !model.charsmap.is_empty() {
        Charsmap::parse(model.charsmap).map_err(TokenizerError::Charsmap)?;
    }
    let older: BTreeMap<String, u32> = parse("added_tokens.json", files.added_tokens)?;
    let added = added_tokens(&config, &older);

    let control = |id: i64| {
        let piece = usize::try_from(id).ok().and_then(|id| model.pieces.get(id))?;
        (piece.kind == PieceKind::Control).then_some((id as u32, piece.text))
    };
    let named = |name: &str| find(&model, &added, config.special_token(name)?);
    let bos = named("bos_token").or_else(|| control(model.bos_id));
    let eos = named("eos_token").or_else(|| control(model.eos_id));
    let post_processor = post_processor(
        bos.filter(|_| settings.add_bos_token.unwrap_or(true)),
        eos.filter(|_| settings.add_eos_token.unwrap_or(false)),
    );
    let prefix_space =
        match (settings.add_prefix_space.unwrap_or(model.add_dummy_prefix), settings.legacy) {
            (false, _) => PrefixSpace::Never,
            (true, Some(false)) => PrefixSpace::First,
            (true, None | Some(true)) => PrefixSpace::EachPart,
        };
    let pieces = Pieces {
        algorithm: model.algorithm,
        charsmap: model.charsmap,
        remove_extra_whitespaces: model.remove_extra_whitespaces,
        prefix_space,
        post_processor,
        added: added.clone(),
        list: model.pieces,
    };
    let json = pieces.into_json()?;
    Ok(serde_json::to_vec(&json)
        .map_err(|source| TokenizerError::Json { file: sentencepiece::FILE, source })?)
}

/// Returns the tokens of the JSON files, by id; those of `added_tokens_decoder` come before those of the older file.
fn added_tokens(config: &TokenizerConfig, older: &BTreeMap<String, u32>) -> Vec<Value> {
    let mut tokens: BTreeMap<u32, Value> =
        older.iter().map(|(text, &id)| (id, added_token(id, text, false))).collect();
    tokens.extend(config.added_tokens.iter().map(|(&id, token)| (id, token.to_json(id))));
    tokens.into_values().collect()
}

/// Returns the token with a text.
fn find<'a>(
    model: &sentencepiece::SentencePieceModel<'a>,
    added: &'a [Value],
    text: &str,
) -> Option<(u32, &'a str)> {
    let of_pieces = || {
        let id = model.pieces.iter().position(|piece| piece.text == text)?;
        Some((id as u32, model.pieces[id].text))
    };
    let of_added = |token: &'a Value| {
        let (id, content) = (token["id"].as_u64()?, token["content"].as_str()?);
        (content == text).then_some((u32::try_from(id).ok()?, content))
    };
    added.iter().find_map(of_added).or_else(of_pieces)
}
