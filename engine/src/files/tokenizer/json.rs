//! The text of a `tokenizer.json`: byte-level BPE, from GGUF metadata or for a synthetic model.

use std::collections::HashSet;

use serde_json::{Map, Value, json};

use crate::tokenizer::{LLAMA3_REGEX, QWEN2_REGEX, QWEN35_REGEX};

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

/// Parts of a `tokenizer.json` that differ between models.
pub(crate) struct TokenizerJson {
    /// Tokens with [`added_token`] entries.
    pub added: Vec<Value>,
    pub normalizer: Value,
    pub pre_tokenizer: Value,
    pub post_processor: Value,
    pub decoder: Value,
    /// Whether a piece that is a token skips the merges.
    pub ignore_merges: bool,
    /// Ids, by token.
    pub vocab: Map<String, Value>,
    /// Merged pairs, by rank.
    pub merges: Vec<Value>,
}

impl TokenizerJson {
    /// Returns the whole file.
    pub fn into_json(self) -> Value {
        json!({
            "version": "1.0", "truncation": null, "padding": null,
            "added_tokens": self.added, "normalizer": self.normalizer, "pre_tokenizer": self.pre_tokenizer,
            "post_processor": self.post_processor, "decoder": self.decoder,
            "model": {
                "type": "BPE", "dropout": null, "unk_token": null,
                "continuing_subword_prefix": null, "end_of_word_suffix": null, "fuse_unk": false,
                "byte_fallback": false, "ignore_merges": self.ignore_merges,
                "vocab": self.vocab, "merges": self.merges,
            },
        })
    }
}

/// Returns a token that is matched in the text before BPE.
pub(crate) fn added_token(id: u32, text: &str, special: bool) -> Value {
    json!({
        "id": id, "content": text, "single_word": false, "lstrip": false, "rstrip": false,
        "normalized": false, "special": special,
    })
}

/// Returns the byte-level mapping, as a pre-tokenizer or decoder.
pub(crate) fn byte_level(use_regex: bool) -> Value {
    json!({
        "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
        "use_regex": use_regex,
    })
}

/// Returns the pre-tokenizer of Llama 3.
pub(crate) fn llama3_pre_tokenizer() -> Value {
    split_by(LLAMA3_REGEX)
}

/// Returns the pre-tokenizer of Qwen2 and Qwen3.
pub(crate) fn qwen2_pre_tokenizer() -> Value {
    split_by(QWEN2_REGEX)
}

/// Returns the pre-tokenizer of Qwen3.5, which joins marks to letters.
pub(crate) fn qwen35_pre_tokenizer() -> Value {
    split_by(QWEN35_REGEX)
}

fn split_by(regex: &str) -> Value {
    let split = json!({
        "type": "Split", "pattern": { "Regex": regex }, "behavior": "Isolated", "invert": false,
    });
    json!({ "type": "Sequence", "pretokenizers": [split, byte_level(false)] })
}

/// Puts a BOS token before a prompt and an EOS token after it, where they are given.
pub(crate) fn post_processor(bos: Option<(u32, &str)>, eos: Option<(u32, &str)>) -> Value {
    let piece = |(_, text): (u32, &str)| json!({ "SpecialToken": { "id": text, "type_id": 0 } });
    let mut single = Vec::from_iter(bos.map(piece));
    single.push(json!({ "Sequence": { "id": "A", "type_id": 0 } }));
    single.extend(eos.map(piece));
    let mut pair = single.clone();
    pair.push(json!({ "Sequence": { "id": "B", "type_id": 1 } }));
    let mut special = Map::new();
    let mut seen = HashSet::new();
    for (id, text) in bos.into_iter().chain(eos).filter(|(id, _)| seen.insert(*id)) {
        special.insert(text.to_owned(), json!({ "id": text, "ids": [id], "tokens": [text] }));
    }
    json!({
        "type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special,
    })
}
