//! The vocabulary of synthetic models: one token for each byte, and special tokens.

use serde_json::{Map, Value, json};

use crate::{
    files::tokenizer::json::{self as tokenizer_json, TokenizerJson},
    tokenizer::byte_alphabet,
};

/// The special tokens of a synthetic model; their ids follow the 256 bytes.
pub(super) const SPECIAL: [&str; 4] =
    ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"];
pub(super) const BOS: u32 = 256;
pub(super) const EOS: u32 = 259;
/// Smallest vocabulary: 256 bytes and the special tokens.
pub const VOCAB_MIN: usize = 260;

pub(super) const CHAT_TEMPLATE: &str = "{% for message in messages %}{% if loop.first %}{{ bos_token }}{% endif %}{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}";

/// Returns a byte-level tokenizer without merges: one token per byte, and the special tokens. `with_end` puts the end token behind texts.
pub(super) fn byte_tokenizer(with_end: bool) -> Value {
    let mut vocab = Map::new();
    let mut alphabet: Vec<(char, u8)> = byte_alphabet().into_iter().collect();
    alphabet.sort_unstable_by_key(|&(_, byte)| byte);
    for (character, byte) in alphabet {
        vocab.insert(character.to_string(), json!(byte));
    }
    let added = |(id, token): (u32, &&str)| tokenizer_json::added_token(id, token, true);
    TokenizerJson {
        added: (BOS..).zip(&SPECIAL).map(added).collect(),
        normalizer: Value::Null,
        pre_tokenizer: tokenizer_json::llama3_pre_tokenizer(),
        post_processor: tokenizer_json::post_processor(
            Some((BOS, SPECIAL[0])),
            with_end.then_some((EOS, SPECIAL[3])),
        ),
        decoder: tokenizer_json::byte_level(false),
        ignore_merges: true,
        vocab,
        merges: Vec::new(),
    }
    .into_json()
}
