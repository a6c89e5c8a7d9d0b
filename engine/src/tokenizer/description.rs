//! The parts of a `tokenizer.json` that are checked, hashed and converted.

use std::{
    collections::{HashMap, HashSet},
    fmt,
};

use serde::{
    Deserialize, Deserializer,
    de::{
        MapAccess, SeqAccess, Visitor,
        value::{MapAccessDeserializer, SeqAccessDeserializer},
    },
};
use serde_json::Value;

use super::AddedToken;

/// The pre-tokenizer of Llama 3.
pub(crate) const LLAMA3_REGEX: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// The pre-tokenizer of Qwen2 and Qwen3; their texts are in NFC.
pub(crate) const QWEN2_REGEX: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// The regular expression of Qwen3.5.
pub(crate) const QWEN35_REGEX: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// The used parts of the file.
#[derive(Debug, Deserialize)]
pub(super) struct TokenizerJson {
    #[serde(default)]
    pub added_tokens: Vec<AddedTokenJson>,
    #[serde(default)]
    pub normalizer: Value,
    #[serde(default)]
    pub pre_tokenizer: Value,
    #[serde(default)]
    pub post_processor: Value,
    #[serde(default)]
    pub decoder: Value,
    pub model: ModelJson,
}

/// An entry of `added_tokens`.
#[derive(Debug, Clone, Deserialize)]
pub(super) struct AddedTokenJson {
    pub id: u32,
    #[serde(flatten)]
    pub token: AddedToken,
}

/// BPE or Unigram.
#[derive(Debug, Deserialize)]
pub(super) struct ModelJson {
    #[serde(rename = "type", default)]
    pub kind: Option<String>,
    #[serde(default)]
    pub dropout: Option<f32>,
    #[serde(default)]
    pub byte_fallback: bool,
    #[serde(default)]
    pub ignore_merges: bool,
    #[serde(default)]
    pub fuse_unk: bool,
    /// What a token inside a word begins with.
    #[serde(default)]
    pub continuing_subword_prefix: Option<String>,
    /// What the last token of a word ends with.
    #[serde(default)]
    pub end_of_word_suffix: Option<String>,
    /// The token for unknown characters, in BPE.
    #[serde(default)]
    pub unk_token: Option<String>,
    /// The same in Unigram.
    #[serde(default)]
    pub unk_id: Option<u32>,
    pub vocab: Vocab,
    #[serde(default)]
    pub merges: Vec<Merge>,
}

/// The tokens: with ids in BPE, with scores and in the order of ids in Unigram.
#[derive(Debug)]
pub(super) enum Vocab {
    Ids(HashMap<String, u32>),
    Scores(Vec<(String, f64)>),
}

impl Vocab {
    /// Returns the tokens with their ids.
    pub fn tokens(&self) -> Box<dyn Iterator<Item = (&str, u32)> + '_> {
        match self {
            Self::Ids(ids) => Box::new(ids.iter().map(|(token, &id)| (token.as_str(), id))),
            Self::Scores(list) => {
                Box::new((0u32..).zip(list).map(|(id, (token, _))| (&**token, id)))
            }
        }
    }
}

impl<'de> Deserialize<'de> for Vocab {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Either;
        impl<'de> Visitor<'de> for Either {
            type Value = Vocab;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a map of ids or a list of scores")
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Vocab, A::Error> {
                HashMap::deserialize(MapAccessDeserializer::new(map)).map(Vocab::Ids)
            }

            fn visit_seq<A: SeqAccess<'de>>(self, seq: A) -> Result<Vocab, A::Error> {
                Vec::deserialize(SeqAccessDeserializer::new(seq)).map(Vocab::Scores)
            }
        }
        deserializer.deserialize_any(Either)
    }
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

    /// Returns both parts; `None` if there are not two.
    pub(super) fn parts(&self) -> Option<(&str, &str)> {
        match self {
            Self::Pair(left, right) => Some((left, right)),
            Self::Joined(joined) => {
                joined.split_once(' ').filter(|(_, right)| !right.contains(' '))
            }
        }
    }
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
    let is_qwen35 = is_split && split["pattern"]["Regex"] == QWEN35_REGEX;
    let is_gpt2 = split["type"] == "ByteLevel"
        && split["use_regex"] == Value::Bool(true)
        && split["add_prefix_space"] == Value::Bool(false);
    match json.model.ignore_merges {
        false if is_nfc && is_qwen35 => Some("qwen35"),
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
    let added: HashSet<&str> =
        json.added_tokens.iter().map(|added| &*added.token.content).collect();
    let is_byte = |token: &str| token.chars().nth(1).is_none() || added.contains(token);
    json.model.merges.is_empty()
        && json.model.vocab.tokens().all(|(token, _)| is_byte(token))
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
