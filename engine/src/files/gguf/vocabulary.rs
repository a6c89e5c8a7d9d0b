//! The vocabulary of a GGUF file: its tokens with their types, and the tokens put around a prompt.

use serde_json::Value as Json;

use super::{container::Value, keys::Keys, names::EOS_TOKENS_KEY};
use crate::{
    config::ModelConfig,
    files::{error::ModelError, tokenizer::json},
};

/// Token types of GGUF files.
pub(crate) const TYPE_NORMAL: i64 = 1;
pub(crate) const TYPE_CONTROL: i64 = 3;
pub(crate) const TYPE_USER_DEFINED: i64 = 4;
pub(crate) const TYPE_UNUSED: i64 = 5;

/// One entry of the vocabulary.
pub(crate) struct Token<'a> {
    pub text: &'a str,
    pub kind: i64,
}

/// Whether a prompt gets BOS before and EOS after it.
pub(crate) struct BosEos {
    pub bos: bool,
    pub eos: bool,
}

/// Reads the tokens, by id.
pub(crate) fn read_tokens<'a>(
    file: &'a str,
    keys: &Keys<'a>,
    vocab_size: usize,
) -> Result<Vec<Token<'a>>, ModelError> {
    const TOKENS: &str = "tokenizer.ggml.tokens";
    const TYPES: &str = "tokenizer.ggml.token_type";
    let Some(texts) = keys.array(TOKENS)? else {
        return Err(ModelError::MissingKey { key: TOKENS.to_owned() });
    };
    if texts.len() > vocab_size {
        return Err(keys.bad(TOKENS, "at most one token per row of token_embd.weight"));
    }
    let mut kinds = Vec::new();
    if let Some(types) = keys.array(TYPES)? {
        if types.len() != texts.len() {
            return Err(keys.bad(TYPES, "as many types as tokens"));
        }
        for value in types.values(file) {
            kinds.push(match value? {
                Value::Signed(kind) => kind,
                Value::Unsigned(kind) => i64::try_from(kind).unwrap_or(0),
                _ => return Err(keys.bad(TYPES, "a list of whole numbers")),
            });
        }
    }
    let mut tokens = Vec::new();
    for (index, value) in texts.values(file).enumerate() {
        let Value::Text(text) = value? else {
            return Err(keys.bad(TOKENS, "a list of texts"));
        };
        let kind = kinds.get(index).copied().unwrap_or(TYPE_NORMAL);
        tokens.push(Token { text, kind });
    }
    mark_control_tokens(keys, vocab_size, &mut tokens)?;
    Ok(tokens)
}

/// Makes tokens control tokens that some converters write as normal ones, as llama.cpp does: those that end a text by
/// their key, and those with the text of a control token. Otherwise such a text would become other tokens, and an
/// answer would not end.
fn mark_control_tokens(
    keys: &Keys<'_>,
    vocab_size: usize,
    tokens: &mut [Token<'_>],
) -> Result<(), ModelError> {
    // A file with its own list of end tokens was written from a model with known types.
    if keys.array(EOS_TOKENS_KEY)?.is_some() {
        return Ok(());
    }
    let mut ids = Vec::new();
    for key in ["bos_token_id", "eos_token_id", "eot_token_id", "eom_token_id"] {
        ids.extend(keys.token(&format!("tokenizer.ggml.{key}"), vocab_size as u64)?);
    }
    for (id, token) in tokens.iter_mut().enumerate() {
        let is_normal = matches!(token.kind, TYPE_NORMAL | TYPE_USER_DEFINED);
        let is_ending = ids.iter().any(|&ending| ending as usize == id);
        let is_named = match token.kind {
            TYPE_NORMAL => looks_like_control(token.text),
            _ => json::END_TOKENS.contains(&token.text),
        };
        if is_normal && (is_ending || is_named) {
            let text = token.text;
            tracing::warn!(
                id,
                token = text,
                "the file has this control token with another type; it is one now"
            );
            token.kind = TYPE_CONTROL;
        }
    }
    Ok(())
}

/// Returns whether a text is that of a control token.
///
/// Source: the names in `llama-vocab.cpp` of llama.cpp.
fn looks_like_control(text: &str) -> bool {
    const NAMES: [&str; 14] = [
        "<s>",
        "</s>",
        "<bos>",
        "<eos>",
        "<pad>",
        "<EOT>",
        "_<EOT>",
        "< EOT >",
        "<|endoftext|>",
        "<end_of_turn>",
        "<start_of_turn>",
        "<end_of_utterance>",
        "<｜end▁of▁sentence｜>",
        "<｜begin▁of▁sentence｜>",
    ];
    let inner = text.strip_prefix("<|").and_then(|text| text.strip_suffix("|>"));
    let is_name = |inner: &str| {
        !inner.is_empty() && inner.chars().all(|c| c.is_ascii_alphanumeric() || "_-.".contains(c))
    };
    NAMES.contains(&text) || inner.is_some_and(is_name)
}

/// Tokens put around a prompt, by default those of `surround`.
pub(crate) fn post_processor(
    keys: &Keys<'_>,
    tokens: &[Token<'_>],
    config: &ModelConfig,
    surround: BosEos,
) -> Result<Json, ModelError> {
    let vocab_size = config.vocab_size as u64;
    let eos = keys.token("tokenizer.ggml.eos_token_id", vocab_size)?;
    let add_bos = keys.flag("tokenizer.ggml.add_bos_token")?.unwrap_or(surround.bos);
    let add_eos = keys.flag("tokenizer.ggml.add_eos_token")?.unwrap_or(surround.eos);
    let text_of = |id: u32| tokens.get(id as usize).map(|token| (id, token.text));
    let bos = config.bos_token.filter(|_| add_bos).and_then(text_of);
    let eos = eos.filter(|_| add_eos).and_then(text_of);
    Ok(json::post_processor(bos, eos))
}
