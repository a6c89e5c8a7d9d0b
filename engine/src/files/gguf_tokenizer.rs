//! Rebuilds a `tokenizer.json` from the vocabulary of a GGUF file; [`gguf_pieces`] has SentencePiece vocabularies.
//!
//! The metadata hold tokens, their types and merges, but only the name of the pre-tokenizer
//! (`tokenizer.ggml.pre`). Files without that key, such as the published BitNet b1.58 2B4T, get the
//! pre-tokenizer of Llama 3, with which that model was trained. A name that does not stand for
//! exactly one known regular expression is an error.

use serde_json::{Map, Value as Json, json};

use super::{
    error::{ModelError, shorten},
    gguf::{Array, Gguf, Value},
    gguf_config::Keys,
    gguf_names::EOS_TOKENS_KEY,
    gguf_pieces,
    tokenizer_json::{self, TokenizerJson, byte_level},
};
use crate::{
    chat::ChatTemplate,
    config::ModelConfig,
    tokenizer::{Tokenizer, TokenizerError},
};

/// Token types of GGUF files.
pub(crate) const TYPE_NORMAL: i64 = 1;
pub(crate) const TYPE_CONTROL: i64 = 3;
pub(crate) const TYPE_USER_DEFINED: i64 = 4;
pub(crate) const TYPE_UNUSED: i64 = 5;

/// Control tokens that end a turn besides `eos_token_id`: the format has one key, but models have
/// several such tokens (llama.cpp recognizes the same names).
pub(crate) const END_TOKENS: [&str; 7] = [
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|endoftext|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
];

/// Tokenizer, template and end tokens of a file.
pub(crate) struct Text {
    pub tokenizer: Tokenizer,
    pub chat_template: Option<ChatTemplate>,
    pub eos_tokens: Vec<u32>,
}

/// One entry of the vocabulary.
pub(super) struct Token<'a> {
    pub text: &'a str,
    pub kind: i64,
}

/// Whether a prompt gets BOS before and EOS after it.
pub(super) struct Surround {
    pub bos: bool,
    pub eos: bool,
}

/// Reads vocabulary and chat template.
pub(crate) fn read(file: &str, gguf: &Gguf<'_>, config: &ModelConfig) -> Result<Text, ModelError> {
    let keys = Keys { gguf, prefix: "" };
    let model = keys.required_text("tokenizer.ggml.model")?;
    let pieces = gguf_pieces::algorithm(model);
    if pieces.is_none() && model != "gpt2" {
        let why = "only byte-level BPE (gpt2) and SentencePiece (llama, t5) are supported";
        return Err(keys.unsupported("tokenizer.ggml.model", why));
    }
    let tokens = tokens(file, &keys, config.vocab_size)?;
    let json = match pieces {
        Some(algorithm) => gguf_pieces::to_json(file, &keys, &tokens, config, algorithm)?,
        None => to_json(file, &keys, &tokens, config)?,
    };
    let bytes = serde_json::to_vec(&json)
        .map_err(|source| TokenizerError::Json { file: "tokenizer metadata", source })?;
    let tokenizer = Tokenizer::from_json(&bytes)?;

    let vocab_size = config.vocab_size as u64;
    let mut eos_tokens = Vec::new();
    for key in ["eos_token_id", "eot_token_id", "eom_token_id"] {
        eos_tokens.extend(keys.token(&format!("tokenizer.ggml.{key}"), vocab_size)?);
    }
    let text_of = |id: Option<&u32>| {
        id.and_then(|&id| tokens.get(id as usize)).map(|token| token.text.to_owned())
    };
    let (bos, eos) = (text_of(config.bos_token.as_ref()), text_of(eos_tokens.first()));
    if let Some(exact) = array(&keys, EOS_TOKENS_KEY)? {
        eos_tokens = listed_tokens(file, &keys, exact, vocab_size)?;
    } else {
        for (id, token) in tokens.iter().enumerate() {
            if token.kind == TYPE_CONTROL && END_TOKENS.contains(&token.text) {
                eos_tokens.push(id as u32);
            }
        }
    }
    eos_tokens.sort_unstable();
    eos_tokens.dedup();
    let chat_template = keys
        .text("tokenizer.chat_template")?
        .map(|source| ChatTemplate::parse(source.to_owned(), bos, eos))
        .transpose()?;
    Ok(Text { tokenizer, chat_template, eos_tokens })
}

fn listed_tokens(
    file: &str,
    keys: &Keys<'_>,
    list: Array<'_>,
    vocab_size: u64,
) -> Result<Vec<u32>, ModelError> {
    list.values(file)
        .map(|value| match value? {
            Value::Unsigned(id) if id < vocab_size => Ok(id as u32),
            _ => Err(keys.bad(EOS_TOKENS_KEY, "a list of token ids inside the vocabulary")),
        })
        .collect()
}

pub(super) fn array<'a>(keys: &Keys<'a>, key: &str) -> Result<Option<Array<'a>>, ModelError> {
    match keys.get(key) {
        None => Ok(None),
        Some(Value::Array(array)) => Ok(Some(array)),
        Some(_) => Err(keys.bad(key, "a list")),
    }
}

fn tokens<'a>(
    file: &'a str,
    keys: &Keys<'a>,
    vocab_size: usize,
) -> Result<Vec<Token<'a>>, ModelError> {
    const TOKENS: &str = "tokenizer.ggml.tokens";
    const TYPES: &str = "tokenizer.ggml.token_type";
    let Some(texts) = array(keys, TOKENS)? else {
        return Err(ModelError::MissingKey { key: TOKENS.to_owned() });
    };
    if texts.len() > vocab_size {
        return Err(keys.bad(TOKENS, "at most one token per row of token_embd.weight"));
    }
    let mut kinds = Vec::new();
    if let Some(types) = array(keys, TYPES)? {
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
    Ok(tokens)
}

fn to_json(
    file: &str,
    keys: &Keys<'_>,
    tokens: &[Token<'_>],
    config: &ModelConfig,
) -> Result<Json, ModelError> {
    let mut vocab = Map::new();
    let mut added = Vec::new();
    for (id, token) in tokens.iter().enumerate() {
        if token.kind == TYPE_UNUSED {
            continue; // Padding: no text encodes to it.
        }
        if vocab.insert(token.text.to_owned(), json!(id)).is_some() {
            let value = shorten(format!("{:?} twice", token.text));
            let key = "tokenizer.ggml.tokens".to_owned();
            return Err(ModelError::BadKey { key, value, expected: "distinct tokens" });
        }
        if matches!(token.kind, TYPE_CONTROL | TYPE_USER_DEFINED) {
            let is_special = token.kind == TYPE_CONTROL;
            added.push(tokenizer_json::added_token(id as u32, token.text, is_special));
        }
    }
    let Splitting { normalizer, pre_tokenizer, ignore_merges } = splitting(keys)?;
    let merges = merges(file, keys, &vocab)?;
    let surround = Surround { bos: true, eos: false };
    let post_processor = post_processor(keys, tokens, config, surround)?;
    let decoder = byte_level(true);
    let json = TokenizerJson {
        added,
        normalizer,
        pre_tokenizer,
        post_processor,
        decoder,
        ignore_merges,
        vocab,
        merges,
    };
    Ok(json.into_json())
}

/// What happens to a text before BPE.
struct Splitting {
    normalizer: Json,
    pre_tokenizer: Json,
    /// Whether a piece that is a token skips the merges.
    ignore_merges: bool,
}

/// Returns what the name of the pre-tokenizer stands for.
fn splitting(keys: &Keys<'_>) -> Result<Splitting, ModelError> {
    let plain = |pre_tokenizer, ignore_merges| {
        Ok(Splitting { normalizer: Json::Null, pre_tokenizer, ignore_merges })
    };
    match keys.text("tokenizer.ggml.pre")?.unwrap_or("llama-bpe") {
        // llama.cpp gives all of these one regular expression; `falcon_e` is in bitnet.cpp's fork of
        // it (microsoft/BitNet #268) and in ik_llama.cpp (#551).
        "llama-bpe" | "llama3" | "llama-v3" | "falcon3" | "falcon-h1" | "falcon_e" | "falcon-e" => {
            plain(tokenizer_json::llama3_pre_tokenizer(), true)
        }
        "gpt-2" => plain(byte_level(true), false),
        "qwen2" => Ok(Splitting {
            normalizer: json!({ "type": "NFC" }),
            pre_tokenizer: tokenizer_json::qwen2_pre_tokenizer(),
            ignore_merges: false,
        }),
        _ => Err(keys.unsupported("tokenizer.ggml.pre", "unknown pre-tokenizer")),
    }
}

/// Merges as pairs. A merge can only apply if its parts and its result are tokens; others are left
/// out, which changes no encoding.
fn merges(file: &str, keys: &Keys<'_>, vocab: &Map<String, Json>) -> Result<Vec<Json>, ModelError> {
    const KEY: &str = "tokenizer.ggml.merges";
    let Some(list) = array(keys, KEY)? else {
        return Err(ModelError::MissingKey { key: KEY.to_owned() });
    };
    let mut merges = Vec::new();
    for value in list.values(file) {
        let Value::Text(merge) = value? else {
            return Err(keys.bad(KEY, "a list of texts"));
        };
        let Some((left, right)) = merge.split_once(' ') else {
            return Err(keys.bad(KEY, "pairs separated by a space"));
        };
        let result = format!("{left}{right}");
        if vocab.contains_key(left) && vocab.contains_key(right) && vocab.contains_key(&result) {
            merges.push(json!([left, right]));
        }
    }
    Ok(merges)
}

/// Tokens put around a prompt, by default those of `surround`.
pub(super) fn post_processor(
    keys: &Keys<'_>,
    tokens: &[Token<'_>],
    config: &ModelConfig,
    surround: Surround,
) -> Result<Json, ModelError> {
    let vocab_size = config.vocab_size as u64;
    let eos = keys.token("tokenizer.ggml.eos_token_id", vocab_size)?;
    let add_bos = keys.flag("tokenizer.ggml.add_bos_token")?.unwrap_or(surround.bos);
    let add_eos = keys.flag("tokenizer.ggml.add_eos_token")?.unwrap_or(surround.eos);
    let text_of = |id: u32| tokens.get(id as usize).map(|token| (id, token.text));
    let bos = config.bos_token.filter(|_| add_bos).and_then(text_of);
    let eos = eos.filter(|_| add_eos).and_then(text_of);
    Ok(tokenizer_json::post_processor(bos, eos))
}
