//! SentencePiece vocabularies in GGUF files: `tokenizer.ggml.model` is `llama` (BPE) or `t5` (Unigram).
//!
//! Absent keys have the defaults of llama.cpp: a space before the text and after special tokens, spaces kept; BOS
//! before a prompt for `llama`, EOS after it for `t5`.

use serde_json::{Value as Json, json};

use super::{
    error::ModelError,
    gguf::Value,
    gguf_config::Keys,
    gguf_names::MERGES_KEY,
    gguf_tokenizer::{self, Surround, Token, array},
    pieces::{Algorithm, Piece, PieceKind, Pieces, PrefixSpace},
};
use crate::{
    config::ModelConfig,
    tokenizer::{Charsmap, TokenizerError},
};

const SCORES: &str = "tokenizer.ggml.scores";
const TYPES: &str = "tokenizer.ggml.token_type";
const CHARSMAP: &str = "tokenizer.ggml.precompiled_charsmap";

/// Returns the algorithm that a `tokenizer.ggml.model` stands for.
pub(super) fn algorithm(model: &str) -> Option<Algorithm> {
    match model {
        "llama" => Some(Algorithm::Bpe),
        "t5" => Some(Algorithm::Unigram),
        _ => None,
    }
}

/// Returns the `tokenizer.json` of a file.
pub(super) fn to_json(
    file: &str,
    keys: &Keys<'_>,
    tokens: &[Token<'_>],
    config: &ModelConfig,
    algorithm: Algorithm,
) -> Result<Json, ModelError> {
    if array(keys, TYPES)?.is_none() {
        return Err(ModelError::MissingKey { key: TYPES.to_owned() });
    }
    let scores = scores(file, keys, tokens.len())?;
    let mut list = Vec::with_capacity(tokens.len());
    for (token, score) in tokens.iter().zip(scores) {
        let Some(kind) = PieceKind::from_number(token.kind) else {
            return Err(keys.bad(TYPES, "a list of types from 1 to 6"));
        };
        list.push(Piece { text: token.text, score, kind });
    }
    let charsmap = charsmap(file, keys)?;
    let flag = |key, default| keys.flag(key).map(|flag| flag.unwrap_or(default));
    let prefix_space = match flag("tokenizer.ggml.add_space_prefix", true)? {
        true => PrefixSpace::EachPart,
        false => PrefixSpace::Never,
    };
    let surround = match algorithm {
        Algorithm::Bpe => Surround { bos: true, eos: false },
        Algorithm::Unigram => Surround { bos: false, eos: true },
    };
    let pieces = Pieces {
        list,
        algorithm,
        charsmap: &charsmap,
        remove_extra_whitespaces: flag("tokenizer.ggml.remove_extra_whitespaces", false)?,
        prefix_space,
        added: Vec::new(),
        post_processor: gguf_tokenizer::post_processor(keys, tokens, config, surround)?,
    };
    let mut json = pieces.into_json()?;
    if let Some(merges) = merges(file, keys)?.filter(|_| algorithm == Algorithm::Bpe) {
        json["model"]["merges"] = merges;
    }
    Ok(json)
}

/// Reads merges in another order than that of the scores.
fn merges(file: &str, keys: &Keys<'_>) -> Result<Option<Json>, ModelError> {
    let Some(list) = array(keys, MERGES_KEY)? else { return Ok(None) };
    let pair = |value| match value {
        Value::Text(text) => text.split_once(' ').map(|(left, right)| json!([left, right])),
        _ => None,
    };
    let bad = || keys.bad(MERGES_KEY, "a list of pairs separated by a space");
    list.values(file).map(|value| pair(value?).ok_or_else(bad)).collect::<Result<_, _>>().map(Some)
}

fn scores(file: &str, keys: &Keys<'_>, count: usize) -> Result<Vec<f32>, ModelError> {
    let Some(list) = array(keys, SCORES)? else {
        return Err(ModelError::MissingKey { key: SCORES.to_owned() });
    };
    if list.len() != count {
        return Err(keys.bad(SCORES, "as many scores as tokens"));
    }
    let score = |value| match value {
        Value::Float(score) => Ok(score as f32),
        _ => Err(keys.bad(SCORES, "a list of numbers")),
    };
    list.values(file).map(|value| score(value?)).collect()
}

fn charsmap(file: &str, keys: &Keys<'_>) -> Result<Vec<u8>, ModelError> {
    let Some(list) = array(keys, CHARSMAP)? else { return Ok(Vec::new()) };
    let byte = |value| match value {
        Value::Unsigned(byte @ 0..=255) => Ok(byte as u8),
        Value::Signed(byte @ -128..=127) => Ok(byte as u8),
        _ => Err(keys.bad(CHARSMAP, "a list of bytes")),
    };
    let bytes = list.values(file).map(|value| byte(value?)).collect::<Result<Vec<u8>, _>>()?;
    if !bytes.is_empty() {
        Charsmap::parse(&bytes).map_err(TokenizerError::Charsmap)?;
    }
    Ok(bytes)
}
