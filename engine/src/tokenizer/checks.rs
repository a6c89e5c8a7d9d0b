//! What of a `tokenizer.json` the library would panic at, or make a text endless with: refused by its key, most of it before the library
//! reads the file.
//!
//! - Steps of the normalizer and the pre-tokenizer have a type that the library knows: of others it guesses the type by their fields. A
//!   bound of how many times as long each step makes a text is known, and so is their product.
//! - The post-processor puts known tokens around the text, which is in its template once.
//! - Merges join tokens to a token: the library copies both parts into a buffer for the longest token.
//! - Tokens that are found in a text before all else have a text, also after normalization: an empty one is found between the bytes of a
//!   character. And they leave one another the spaces that they take.

use std::collections::HashMap;

use serde_json::Value;
use tokenizers::{ModelWrapper, NormalizedString, Normalizer};

use super::{
    Encoder, TokenizerError,
    alphabet::unsupported,
    charsmap,
    description::{Merge, ModelJson, TokenizerJson, Vocab},
    patterns,
};

/// Longest text that a step puts in the place of another one or before it, in bytes.
const CONTENT_BYTES_MAX: usize = 64;
/// Most times as long as it was that all steps together may make a text.
const GROWTH_MAX: u64 = 1024;
/// Times as long that Unicode's forms make a text at most: the canonical ones, and those of compatibility.
const CANONICAL_GROWTH: u64 = 3;
const COMPATIBILITY_GROWTH: u64 = 11;
/// Most steps of the normalizer, the pre-tokenizer and the post-processor together.
const STEPS_MAX: usize = 1024;
/// Most nested sequences.
const DEPTH_MAX: usize = 8;
/// Most tokens that are put around a text.
const SURROUND_MAX: usize = 64;
/// Longest piece of Unigram, in bytes: the library frees its trie recursively, byte by byte.
const PIECE_BYTES_MAX: usize = 1024;
/// Most bytes of the texts in one trie of the library, which takes more than a hundred bytes for each.
const TRIE_BYTES_MAX: u64 = 16 << 20;

/// A list of steps that change or split a text.
struct Part {
    key: &'static str,
    /// The key of the steps of a sequence.
    list: &'static str,
    known: &'static [&'static str],
}

const NORMALIZER: Part = Part {
    key: "normalizer",
    list: "normalizers",
    known: &[
        "Bert",
        "BertNormalizer",
        "ByteLevel",
        "Lowercase",
        "NFC",
        "NFD",
        "NFKC",
        "NFKD",
        "Nmt",
        "Precompiled",
        "Prepend",
        "Replace",
        "Strip",
        "StripAccents",
    ],
};

const PRE_TOKENIZER: Part = Part {
    key: "pre_tokenizer",
    list: "pretokenizers",
    known: &[
        "BertPreTokenizer",
        "ByteLevel",
        "CharDelimiterSplit",
        "Digits",
        "FixedLength",
        "Metaspace",
        "Punctuation",
        "Split",
        "UnicodeScripts",
        "Whitespace",
        "WhitespaceSplit",
    ],
};

/// Checks a file before the library reads it.
///
/// # Errors
/// [`TokenizerError::Unsupported`] names the key.
pub(super) fn check(json: &TokenizerJson) -> Result<(), TokenizerError> {
    let mut steps = Steps { count: 0, growth: 1, templates: 0, surround: 0 };
    for (part, value) in [(NORMALIZER, &json.normalizer), (PRE_TOKENIZER, &json.pre_tokenizer)] {
        if !value.is_null() {
            steps.add(&part, value, part.key, 0)?;
        }
    }
    if !json.post_processor.is_null() {
        steps.post_process(&json.post_processor, "post_processor", 0)?;
    }
    check_model(&json.model)?;
    let bytes = json.added_tokens.iter().map(|added| {
        let growth = if added.token.is_normalized() { steps.growth } else { 1 };
        growth.saturating_mul(added.token.content.len() as u64)
    });
    check_trie("added_tokens", bytes)
}

/// Checks a file that the library has read.
///
/// # Errors
/// As [`check`].
pub(super) fn check_read(inner: &Encoder, json: &TokenizerJson) -> Result<(), TokenizerError> {
    match (inner.get_model(), &json.model.vocab) {
        (ModelWrapper::BPE(_), Vocab::Ids(_)) | (ModelWrapper::Unigram(_), Vocab::Scores(_)) => {}
        _ => return unsupported("model.type", "absent", "BPE needs a vocabulary and merges"),
    }
    let takes_after = json.added_tokens.iter().any(|added| added.token.rstrip);
    for (index, added) in json.added_tokens.iter().enumerate() {
        let token = &added.token;
        let mut text = NormalizedString::from(token.content.as_str());
        if let Some(normalizer) = inner.get_normalizer().filter(|_| token.is_normalized()) {
            normalizer.normalize(&mut text).map_err(TokenizerError::Library)?;
        }
        let refused = |why| {
            unsupported(format!("added_tokens[{index}].content"), quoted(&token.content), why)
        };
        if text.is_empty() && !token.content.is_empty() {
            return refused("the normalizer leaves nothing of it");
        }
        let is_space = !text.is_empty() && text.get().chars().all(char::is_whitespace);
        if takes_after && is_space && token.lstrip && !token.rstrip {
            return refused(
                "another token takes the spaces after it, and this one those before it",
            );
        }
    }
    Ok(())
}

fn quoted(text: &str) -> String {
    format!("{text:?}")
}

/// The steps that were checked so far.
struct Steps {
    count: usize,
    /// Most times as long as it was that a text may be after them.
    growth: u64,
    templates: usize,
    /// Tokens put around a text.
    surround: usize,
}

impl Steps {
    fn enter(&mut self, value: &Value, key: &str, depth: usize) -> Result<(), TokenizerError> {
        self.count += 1;
        if self.count > STEPS_MAX {
            return unsupported(key, value, "a tokenizer has at most 1024 steps");
        }
        if depth > DEPTH_MAX {
            return unsupported(key, value, "sequences are nested too deeply");
        }
        Ok(())
    }

    /// Checks a step of a normalizer or pre-tokenizer.
    fn add(
        &mut self,
        part: &Part,
        step: &Value,
        key: &str,
        depth: usize,
    ) -> Result<(), TokenizerError> {
        self.enter(step, key, depth)?;
        let Some(kind) = step["type"].as_str() else {
            return unsupported(key, step, "a step is an object with a type");
        };
        if kind == "Sequence" {
            for (index, inner) in step[part.list].as_array().into_iter().flatten().enumerate() {
                let key = format!("{key}.{}[{index}]", part.list);
                self.add(part, inner, &key, depth + 1)?;
            }
            return Ok(());
        }
        if !part.known.contains(&kind) {
            return unsupported(format!("{key}.type"), quoted(kind), "a step of an unknown type");
        }
        self.growth = self.growth.saturating_mul(growth(kind, step, key)?);
        if self.growth > GROWTH_MAX {
            let why = "the steps up to it may make a text more than 1024 times as long";
            return unsupported(key, step, why);
        }
        Ok(())
    }

    /// Checks a post-processor. The library does not look at its type, but takes the first one that its fields fit.
    fn post_process(
        &mut self,
        step: &Value,
        key: &str,
        depth: usize,
    ) -> Result<(), TokenizerError> {
        self.enter(step, key, depth)?;
        let Some(fields) = step.as_object() else {
            return unsupported(key, step, "a post-processor is an object");
        };
        if fields.contains_key("cls") || fields.contains_key("sep") {
            self.surround += 2;
        }
        if ["single", "pair", "special_tokens"].iter().any(|field| fields.contains_key(*field)) {
            self.template(step, key)?;
        }
        let inner = step["processors"].as_array().into_iter().flatten();
        for (index, inner) in inner.enumerate() {
            self.post_process(inner, &format!("{key}.processors[{index}]"), depth + 1)?;
        }
        if self.surround > SURROUND_MAX {
            return unsupported(key, step, "more than 64 tokens around a text");
        }
        Ok(())
    }

    /// Checks the template for one text.
    fn template(&mut self, step: &Value, key: &str) -> Result<(), TokenizerError> {
        let key = format!("{key}.single");
        self.templates += 1;
        if self.templates > 1 {
            return unsupported(key, &step["single"], "a text goes through one template");
        }
        let mut texts = 0;
        for (index, piece) in step["single"].as_array().into_iter().flatten().enumerate() {
            if let Some(sequence) = piece.get("Sequence") {
                if sequence["id"] != "A" {
                    let key = format!("{key}[{index}].Sequence.id");
                    return unsupported(key, &sequence["id"], "one text is the sequence A");
                }
                texts += 1;
            } else if let Some(token) = piece.get("SpecialToken") {
                let named = token["id"].as_str().and_then(|id| step["special_tokens"].get(id));
                let Some(ids) = named.and_then(|named| named["ids"].as_array()) else {
                    let key = format!("{key}[{index}].SpecialToken.id");
                    return unsupported(key, &token["id"], "special_tokens has no such token");
                };
                self.surround += ids.len();
            } else {
                let why = "a piece is a Sequence or a SpecialToken";
                return unsupported(format!("{key}[{index}]"), piece, why);
            }
        }
        match texts {
            1 => Ok(()),
            _ => unsupported(key, &step["single"], "the text must be in it once"),
        }
    }
}

/// Returns how many times as long a step may make a text.
fn growth(kind: &str, step: &Value, key: &str) -> Result<u64, TokenizerError> {
    match kind {
        "Replace" => replacement_growth(step, key),
        "Split" => pattern(step, key).map(|_| 1),
        "Prepend" => match step["prepend"].as_str() {
            Some("") => unsupported(format!("{key}.prepend"), quoted(""), "nothing to put before"),
            Some(text) => content_bytes(format!("{key}.prepend"), text).map(|bytes| 1 + bytes),
            None => Ok(1), // The library refuses it.
        },
        "Metaspace" => Ok(1 + step["replacement"].as_str().map_or(0, |text| text.len() as u64)),
        "FixedLength" if step["length"].as_u64() == Some(0) => {
            unsupported(format!("{key}.length"), 0, "texts of no length")
        }
        // The library would guess the type by these fields.
        "Bert" | "BertNormalizer" if !has_bert_fields(step) => {
            let why = "it needs clean_text, handle_chinese_chars, strip_accents and lowercase";
            unsupported(key, step, why)
        }
        // Spaces around characters, and the canonical form.
        "Bert" | "BertNormalizer" => Ok(1 + CANONICAL_GROWTH),
        // Two bytes for most bytes, and for a space before.
        "ByteLevel" => Ok(if step["add_prefix_space"] == Value::Bool(true) { 4 } else { 2 }),
        "NFC" | "NFD" => Ok(CANONICAL_GROWTH),
        "NFKC" | "NFKD" => Ok(COMPATIBILITY_GROWTH),
        "Precompiled" => Ok(charsmap::GROWTH_MAX as u64),
        _ => Ok(1),
    }
}

fn has_bert_fields(step: &Value) -> bool {
    let flags = ["clean_text", "handle_chinese_chars", "lowercase"];
    let strips = &step["strip_accents"];
    flags.iter().all(|flag| step[*flag].is_boolean()) && (strips.is_null() || strips.is_boolean())
}

/// The pattern of a step.
enum Found<'a> {
    Text(&'a str),
    Regex,
}

/// Checks the pattern of a step; `None` for one that the library refuses.
fn pattern<'a>(step: &'a Value, key: &str) -> Result<Option<Found<'a>>, TokenizerError> {
    let pattern = &step["pattern"];
    if let Some(text) = pattern["String"].as_str() {
        return Ok(Some(Found::Text(text)));
    }
    let Some(regex) = pattern["Regex"].as_str() else { return Ok(None) };
    match patterns::refusal(regex) {
        Some(why) => unsupported(format!("{key}.pattern"), quoted(regex), why),
        None => Ok(Some(Found::Regex)),
    }
}

fn replacement_growth(step: &Value, key: &str) -> Result<u64, TokenizerError> {
    let found = pattern(step, key)?;
    let is_empty = |kind: &str| step["pattern"][kind] == "";
    if is_empty("String") || is_empty("Regex") {
        let why = "an empty pattern is found everywhere";
        return unsupported(format!("{key}.pattern"), &step["pattern"], why);
    }
    let content = step["content"].as_str().unwrap_or_default();
    let bytes = content_bytes(format!("{key}.content"), content)?;
    Ok(match found {
        Some(Found::Text(text)) => bytes.div_ceil(text.len() as u64).max(1),
        // It may match no character, before each one.
        Some(Found::Regex) | None => 1 + bytes,
    })
}

/// Returns the length of a text that a step adds.
fn content_bytes(key: String, text: &str) -> Result<u64, TokenizerError> {
    match text.len() {
        len @ 0..=CONTENT_BYTES_MAX => Ok(len as u64),
        _ => unsupported(key, quoted(text), "a step adds at most 64 bytes"),
    }
}

fn check_model(model: &ModelJson) -> Result<(), TokenizerError> {
    for (key, text) in [
        ("model.continuing_subword_prefix", &model.continuing_subword_prefix),
        ("model.end_of_word_suffix", &model.end_of_word_suffix),
    ] {
        if let Some(text) = text.as_deref().filter(|text| !text.is_empty()) {
            return unsupported(key, quoted(text), "marks of tokens inside words");
        }
    }
    match &model.vocab {
        Vocab::Ids(ids) => check_merges(&model.merges, ids),
        Vocab::Scores(list) => {
            if let Some(at) = list.iter().position(|(piece, _)| piece.len() > PIECE_BYTES_MAX) {
                let key = format!("model.vocab[{at}]");
                return unsupported(key, quoted(&list[at].0), "it is longer than 1024 bytes");
            }
            check_trie("model.vocab", list.iter().map(|(piece, _)| piece.len() as u64))
        }
    }
}

fn check_merges(merges: &[Merge], vocab: &HashMap<String, u32>) -> Result<(), TokenizerError> {
    let mut whole = String::new();
    for (rank, merge) in merges.iter().enumerate() {
        let refused =
            |why| unsupported(format!("model.merges[{rank}]"), quoted(&merge.joined()), why);
        let Some((left, right)) = merge.parts() else {
            match merge {
                Merge::Joined(line) if line.starts_with("#version") => continue,
                _ => return refused("a merge is two tokens with a space between them"),
            }
        };
        whole.clear();
        whole.push_str(left);
        whole.push_str(right);
        if ![left, right, &whole].iter().all(|part| vocab.contains_key(*part)) {
            return refused("a merge joins two tokens of the vocabulary to a third one");
        }
    }
    Ok(())
}

/// Checks the texts of which the library makes a trie, by their lengths.
fn check_trie(key: &'static str, lengths: impl Iterator<Item = u64>) -> Result<(), TokenizerError> {
    match lengths.fold(0, u64::saturating_add) {
        0..=TRIE_BYTES_MAX => Ok(()),
        bytes => unsupported(key, format!("{bytes} bytes"), "at most 16777216 are supported"),
    }
}
