//! Rebuilds a `tokenizer.json` from the vocabulary of a GGUF file; [`pieces`] has SentencePiece vocabularies.
//!
//! The metadata hold tokens, their types and merges, but only the name of the pre-tokenizer
//! (`tokenizer.ggml.pre`). Files without that key, such as the published BitNet b1.58 2B4T, get the
//! pre-tokenizer of Llama 3, with which that model was trained. A name that does not stand for
//! exactly one known regular expression is an error.

use serde_json::{Map, Value as Json, json};

use super::{
    container::{Array, Gguf, Value},
    keys::Keys,
    names::EOS_TOKENS_KEY,
    pieces,
    vocabulary::{
        BosEos, TYPE_CONTROL, TYPE_UNUSED, TYPE_USER_DEFINED, Token, post_processor, read_tokens,
    },
};
use crate::{
    chat::{ChatTemplate, SpecialTokens},
    config::ModelConfig,
    files::{
        error::{ModelError, shorten},
        tokenizer::json::{self, END_TOKENS, TokenizerJson, byte_level},
    },
    tokenizer::{Tokenizer, TokenizerError},
};

/// Special tokens, by their names in templates and in files (`seperator` is the format's spelling).
pub(in crate::files) const SPECIAL_TOKENS: [(&str, &str); 7] = [
    ("bos_token", "tokenizer.ggml.bos_token_id"),
    ("eos_token", "tokenizer.ggml.eos_token_id"),
    ("unk_token", "tokenizer.ggml.unknown_token_id"),
    ("sep_token", "tokenizer.ggml.seperator_token_id"),
    ("pad_token", "tokenizer.ggml.padding_token_id"),
    ("cls_token", "tokenizer.ggml.cls_token_id"),
    ("mask_token", "tokenizer.ggml.mask_token_id"),
];

/// Tokenizer, template and end tokens of a file.
pub(crate) struct Text {
    pub tokenizer: Tokenizer,
    pub chat_template: Option<ChatTemplate>,
    pub eos_tokens: Vec<u32>,
}

/// Reads vocabulary and chat template.
pub(crate) fn read(file: &str, gguf: &Gguf<'_>, config: &ModelConfig) -> Result<Text, ModelError> {
    let keys = Keys { gguf, prefix: "" };
    let model = keys.required_text("tokenizer.ggml.model")?;
    let algorithm = pieces::algorithm(model);
    if algorithm.is_none() && model != "gpt2" {
        let why = "only byte-level BPE (gpt2) and SentencePiece (llama, t5) are supported";
        return Err(keys.unsupported("tokenizer.ggml.model", why));
    }
    let tokens = read_tokens(file, &keys, config.vocab_size)?;
    let json = match algorithm {
        Some(algorithm) => pieces::to_json(file, &keys, &tokens, config, algorithm)?,
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
    let mut special = SpecialTokens::new();
    for (name, key) in SPECIAL_TOKENS {
        let id = keys
            .token(key, vocab_size)?
            .or(eos_tokens.first().copied().filter(|_| name == "eos_token"));
        let token = id.and_then(|id| tokens.get(id as usize));
        special.extend(token.map(|token| (name.to_owned(), token.text.to_owned())));
    }
    if let Some(exact) = keys.array(EOS_TOKENS_KEY)? {
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
        .map(|source| ChatTemplate::new(source.to_owned(), special));
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
            added.push(json::added_token(id as u32, token.text, is_special));
        }
    }
    let Splitting { normalizer, pre_tokenizer, ignore_merges } = splitting(keys)?;
    let merges = merges(file, keys, &vocab)?;
    let surround = BosEos { bos: true, eos: false };
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
            plain(json::llama3_pre_tokenizer(), true)
        }
        "gpt-2" => plain(byte_level(true), false),
        name @ ("qwen2" | "qwen35") => Ok(Splitting {
            normalizer: json!({ "type": "NFC" }),
            pre_tokenizer: match name {
                "qwen2" => json::qwen2_pre_tokenizer(),
                _ => json::qwen35_pre_tokenizer(),
            },
            ignore_merges: false,
        }),
        _ => Err(keys.unsupported("tokenizer.ggml.pre", "unknown pre-tokenizer")),
    }
}

/// Merges as pairs. A merge can only apply if its parts and its result are tokens; others are left
/// out, which changes no encoding.
fn merges(file: &str, keys: &Keys<'_>, vocab: &Map<String, Json>) -> Result<Vec<Json>, ModelError> {
    const KEY: &str = "tokenizer.ggml.merges";
    let Some(list) = keys.array(KEY)? else {
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
