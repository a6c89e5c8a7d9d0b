//! SentencePiece vocabularies in GGUF files: `tokenizer.ggml.model` is `llama` (BPE) or `t5` (Unigram).
//!
//! Absent keys have the defaults of llama.cpp: a space before the text and after special tokens, spaces kept; BOS
//! before a prompt for `llama`, EOS after it for `t5`.

use serde_json::{Value as Json, json};

use super::{
    container::Value,
    keys::Keys,
    names::MERGES_KEY,
    vocabulary::{BosEos, Token, post_processor},
};
use crate::{
    config::ModelConfig,
    files::{
        error::ModelError,
        tokenizer::pieces::{Algorithm, Piece, PieceKind, Pieces, PrefixSpace},
    },
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
    if keys.array(TYPES)?.is_none() {
        return Err(ModelError::MissingKey { key: TYPES.to_owned() });
    }
    let scores = scores(file, keys, tokens.len())?;
    let mut list = Vec::with_capacity(tokens.len());
    let mut relabelled = 0;
    for (token, score) in tokens.iter().zip(scores) {
        let Some(mut kind) = PieceKind::from_number(token.kind) else {
            return Err(keys.bad(TYPES, "a list of types from 1 to 6"));
        };
        // As llama.cpp, which finds bytes by their text: some converters write them as normal tokens.
        if kind == PieceKind::Normal && algorithm == Algorithm::Bpe && is_byte(token.text) {
            kind = PieceKind::Byte;
            relabelled += 1;
        }
        list.push(Piece { text: token.text, score, kind });
    }
    if relabelled > 0 {
        tracing::warn!(
            tokens = relabelled,
            "the file has tokens of bytes with another type; they are bytes now"
        );
    }
    let charsmap = charsmap(file, keys)?;
    let flag = |key, default| keys.flag(key).map(|flag| flag.unwrap_or(default));
    let prefix_space = match flag("tokenizer.ggml.add_space_prefix", true)? {
        true => PrefixSpace::EachPart,
        false => PrefixSpace::Never,
    };
    let surround = match algorithm {
        Algorithm::Bpe => BosEos { bos: true, eos: false },
        Algorithm::Unigram => BosEos { bos: false, eos: true },
    };
    let pieces = Pieces {
        list,
        algorithm,
        charsmap: &charsmap,
        remove_extra_whitespaces: flag("tokenizer.ggml.remove_extra_whitespaces", false)?,
        prefix_space,
        added: Vec::new(),
        post_processor: post_processor(keys, tokens, config, surround)?,
    };
    let mut json = pieces.into_json()?;
    if let Some(merges) = merges(file, keys)?.filter(|_| algorithm == Algorithm::Bpe) {
        json["model"]["merges"] = merges;
    }
    Ok(json)
}

/// Returns whether a text is that of a byte: `<0x0A>`.
fn is_byte(text: &str) -> bool {
    let digits = text.strip_prefix("<0x").and_then(|text| text.strip_suffix('>'));
    digits.is_some_and(|digits| {
        digits.len() == 2 && digits.bytes().all(|digit| matches!(digit, b'0'..=b'9' | b'A'..=b'F'))
    })
}

/// Reads merges in another order than that of the scores.
fn merges(file: &str, keys: &Keys<'_>) -> Result<Option<Json>, ModelError> {
    let Some(list) = keys.array(MERGES_KEY)? else { return Ok(None) };
    let pair = |value| match value {
        Value::Text(text) => text.split_once(' ').map(|(left, right)| json!([left, right])),
        _ => None,
    };
    let bad = || keys.bad(MERGES_KEY, "a list of pairs separated by a space");
    list.values(file).map(|value| pair(value?).ok_or_else(bad)).collect::<Result<_, _>>().map(Some)
}

fn scores(file: &str, keys: &Keys<'_>, count: usize) -> Result<Vec<f32>, ModelError> {
    let Some(list) = keys.array(SCORES)? else {
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
    let Some(list) = keys.array(CHARSMAP)? else { return Ok(Vec::new()) };
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
