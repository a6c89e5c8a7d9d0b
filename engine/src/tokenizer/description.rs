//! The parts of a `tokenizer.json` that are checked, hashed and converted.

use std::collections::{HashMap, HashSet};

use serde::Deserialize;
use serde_json::Value;

use super::TokenizerError;

/// The pre-tokenizer of Llama 3.
pub(crate) const LLAMA3_REGEX: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// The pre-tokenizer of Qwen2 and Qwen3, whose texts are in NFC.
pub(crate) const QWEN2_REGEX: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// The used parts of the file.
#[derive(Debug, Deserialize)]
pub(super) struct TokenizerJson {
    #[serde(default)]
    pub added_tokens: Vec<AddedToken>,
    #[serde(default)]
    pub normalizer: Value,
    #[serde(default)]
    pub pre_tokenizer: Value,
    #[serde(default)]
    decoder: Value,
    pub model: BpeJson,
}

#[derive(Debug, Clone, Deserialize)]
pub(super) struct AddedToken {
    pub id: u32,
    pub content: String,
    #[serde(default)]
    pub special: bool,
}

#[derive(Debug, Deserialize)]
pub(super) struct BpeJson {
    #[serde(rename = "type", default)]
    kind: Option<String>,
    #[serde(default)]
    dropout: Option<f32>,
    #[serde(default)]
    byte_fallback: bool,
    #[serde(default)]
    pub ignore_merges: bool,
    pub vocab: HashMap<String, u32>,
    pub merges: Vec<Merge>,
}

/// A merge, in one of the two forms in use.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub(super) enum Merge {
    Pair(String, String),
    Joined(String),
}

impl Merge {
    pub(super) fn joined(&self) -> String {
        match self {
            Self::Pair(left, right) => format!("{left} {right}"),
            Self::Joined(joined) => joined.clone(),
        }
    }
}

/// Rejects tokenizers that are not byte-level BPE or not deterministic.
pub(super) fn check_kind(json: &TokenizerJson) -> Result<(), TokenizerError> {
    let unsupported = |key, value: String, why| {
        Err(TokenizerError::Unsupported { key, value: crate::files::shorten(value), why })
    };
    let model = &json.model;
    if let Some(kind) = model.kind.as_deref().filter(|kind| *kind != "BPE") {
        return unsupported("model.type", kind.to_owned(), "only BPE is supported");
    }
    if model.byte_fallback {
        let why = "SentencePiece vocabularies are not supported";
        return unsupported("model.byte_fallback", "true".to_owned(), why);
    }
    if let Some(dropout) = model.dropout.filter(|dropout| *dropout != 0.0) {
        let why = "the same text would encode differently each time";
        return unsupported("model.dropout", dropout.to_string(), why);
    }
    if !mentions_byte_level(&json.pre_tokenizer) {
        let why = "only byte-level vocabularies are supported";
        return unsupported("pre_tokenizer", json.pre_tokenizer.to_string(), why);
    }
    if json.decoder["type"] != "ByteLevel" {
        let why = "only the ByteLevel decoder is supported";
        return unsupported("decoder", json.decoder.to_string(), why);
    }
    Ok(())
}

fn mentions_byte_level(pre_tokenizer: &Value) -> bool {
    pre_tokenizer["type"] == "ByteLevel"
        || pre_tokenizer["pretokenizers"]
            .as_array()
            .is_some_and(|list| list.iter().any(|inner| inner["type"] == "ByteLevel"))
}

/// Returns the GGUF name that stands for exactly this pre-tokenizer, if there is one.
pub(super) fn named_pre_tokenizer(json: &TokenizerJson) -> Option<&'static str> {
    let pre = &json.pre_tokenizer;
    let is_nfc = json.normalizer["type"] == "NFC";
    if !json.normalizer.is_null() && !is_nfc {
        return None;
    }
    if !is_nfc && is_bytes_only(json) {
        return Some("llama-bpe");
    }
    let [split] = split_patterns(pre).try_into().ok()?;
    let split: Value = serde_json::from_str(&split).ok()?;
    let is_split = split["type"] == "Split"
        && split["behavior"] == "Isolated"
        && split["invert"] == Value::Bool(false);
    let is_llama3 = is_split && split["pattern"]["Regex"] == LLAMA3_REGEX;
    let is_qwen2 = is_split && split["pattern"]["Regex"] == QWEN2_REGEX;
    let is_gpt2 = split["type"] == "ByteLevel"
        && split["use_regex"] == Value::Bool(true)
        && split["add_prefix_space"] == Value::Bool(false);
    match json.model.ignore_merges {
        false if is_nfc => is_qwen2.then_some("qwen2"),
        true if is_nfc => None,
        true if is_llama3 => Some("llama-bpe"),
        false if is_gpt2 => Some("gpt-2"),
        _ => None,
    }
}

/// Returns whether the tokens are exactly the bytes; the split of the text then makes no difference.
pub(super) fn is_bytes_only(json: &TokenizerJson) -> bool {
    let keeps_text = |pattern: &String| {
        serde_json::from_str::<Value>(pattern).is_ok_and(|part| {
            let isolates = part["type"] == "Split" && part["behavior"] == "Isolated";
            let no_space = part["add_prefix_space"] == Value::Bool(false);
            isolates || (part["type"] == "ByteLevel" && no_space)
        })
    };
    let added: HashSet<&str> = json.added_tokens.iter().map(|token| &*token.content).collect();
    let is_byte = |token: &String| token.chars().nth(1).is_none() || added.contains(token.as_str());
    json.model.merges.is_empty()
        && json.model.vocab.keys().all(is_byte)
        && split_patterns(&json.pre_tokenizer).iter().all(keeps_text)
}

/// Returns the parts of a pre-tokenizer that split the text or change it. This leaves out a byte-level
/// mapping that neither splits nor adds a space.
pub(super) fn split_patterns(pre_tokenizer: &Value) -> Vec<String> {
    let parts = match pre_tokenizer["pretokenizers"].as_array() {
        Some(list) => list.as_slice(),
        None => std::slice::from_ref(pre_tokenizer),
    };
    let plain = |part: &Value| {
        part["type"] == "ByteLevel"
            && part["use_regex"] == Value::Bool(false)
            && part["add_prefix_space"] == Value::Bool(false)
    };
    parts.iter().filter(|part| !plain(part)).map(Value::to_string).collect()
}
