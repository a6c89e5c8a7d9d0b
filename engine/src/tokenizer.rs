//! Text to tokens and back: byte-level BPE, as every supported model uses.
//!
//! Encoding is the `tokenizers` crate, configured by a `tokenizer.json` (GGUF metadata are turned
//! into one first, see `files::gguf_tokenizer`). Decoding is a table: each token is a byte string,
//! so text is the concatenation of its tokens' bytes. A streaming reader takes
//! [`Tokenizer::token_bytes`] and may cut only where the bytes so far are whole characters.
//!
//! What would make encoding depend on anything but the text (dropout, truncation, padding) and
//! vocabularies that are not byte-level (SentencePiece) are refused or switched off at load.

use std::collections::{HashMap, HashSet};

use serde::Deserialize;
use serde_json::Value;

/// A tokenizer that cannot be used, or text that it cannot encode.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TokenizerError {
    /// A JSON file that does not have the expected form.
    #[error("{file} is not valid: {source}")]
    Json {
        /// Name of the file.
        file: &'static str,
        /// Line, column and cause.
        #[source]
        source: serde_json::Error,
    },
    /// A tokenizer of a kind that is not byte-level BPE.
    #[error("tokenizer.json: {key} is {value}: {why}")]
    Unsupported {
        /// Dotted name.
        key: &'static str,
        /// What the file says, shortened.
        value: String,
        /// Why it is refused.
        why: &'static str,
    },
    /// A token whose id the embedding has no row for.
    #[error("token {token:?} has id {id}, outside the vocabulary of {vocab_size}")]
    TokenOutOfRange {
        /// The token's text, shortened.
        token: String,
        /// Its id.
        id: u32,
        /// Rows of the embedding.
        vocab_size: usize,
    },
    /// Two tokens with one id.
    #[error("id {id} belongs to two tokens")]
    DuplicateId {
        /// The id.
        id: u32,
    },
    /// An added token whose id is neither in the vocabulary nor the next free one.
    #[error("added token {token:?} cannot have id {id}")]
    AddedTokenId {
        /// The token's text, shortened.
        token: String,
        /// The id in the file.
        id: u32,
    },
    /// A problem that only the tokenizer library can name.
    #[error("tokenizer: {0}")]
    Library(#[source] Box<dyn std::error::Error + Send + Sync>),
}

/// The pre-tokenizer of Llama 3.
pub(crate) const LLAMA3_REGEX: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// Ids are refused from here on, before a table is sized by them.
const VOCAB_MAX: u32 = 1 << 21;

/// The parts of `tokenizer.json` that are checked, hashed and rewritten here.
#[derive(Debug, Deserialize)]
struct TokenizerJson {
    #[serde(default)]
    added_tokens: Vec<AddedToken>,
    #[serde(default)]
    normalizer: Value,
    #[serde(default)]
    pre_tokenizer: Value,
    #[serde(default)]
    decoder: Value,
    model: BpeJson,
}

#[derive(Debug, Clone, Deserialize)]
struct AddedToken {
    id: u32,
    content: String,
    #[serde(default)]
    special: bool,
}

#[derive(Debug, Deserialize)]
struct BpeJson {
    #[serde(rename = "type", default)]
    kind: Option<String>,
    #[serde(default)]
    dropout: Option<f32>,
    #[serde(default)]
    byte_fallback: bool,
    #[serde(default)]
    ignore_merges: bool,
    vocab: HashMap<String, u32>,
    merges: Vec<Merge>,
}

/// A merge, in either of the two forms in use.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Merge {
    Pair(String, String),
    Joined(String),
}

impl Merge {
    fn joined(&self) -> String {
        match self {
            Self::Pair(left, right) => format!("{left} {right}"),
            Self::Joined(joined) => joined.clone(),
        }
    }
}

/// A vocabulary as text.
pub(crate) struct Vocabulary {
    /// By id; ids without a token are `None`.
    pub tokens: Vec<Option<(String, TokenKind)>>,
    /// Pairs separated by a space, by rank.
    pub merges: Vec<String>,
    /// The name GGUF files have for the pre-tokenizer, if there is one.
    pub pre: Option<&'static str>,
}

/// A byte-level BPE tokenizer.
#[derive(Debug)]
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    tokens: TokenTable,
    digest: [u8; 32],
    json: Vec<u8>,
}

impl Tokenizer {
    /// Builds the tokenizer that a `tokenizer.json` describes.
    ///
    /// # Errors
    /// If it is malformed, or not byte-level BPE.
    pub fn from_json(bytes: &[u8]) -> Result<Self, TokenizerError> {
        let json: TokenizerJson = serde_json::from_slice(bytes)
            .map_err(|source| TokenizerError::Json { file: "tokenizer.json", source })?;
        check_kind(&json)?;
        let tokens = TokenTable::new(&json)?;
        let mut inner =
            tokenizers::Tokenizer::from_bytes(bytes).map_err(TokenizerError::Library)?;
        inner.with_truncation(None).map_err(TokenizerError::Library)?;
        inner.with_padding(None);
        check_ids(&inner, &json)?;
        let mut tokenizer = Self { inner, tokens, digest: [0; 32], json: bytes.to_vec() };
        let framed = tokenizer.encode("", true)?;
        tokenizer.digest = digest(&json, &tokenizer.tokens, &framed);
        Ok(tokenizer)
    }

    /// Encodes text. With `add_special`, what the model wants around a plain prompt (usually a BOS
    /// token) is added. The text's own special-token strings become special tokens either way.
    ///
    /// # Errors
    /// [`TokenizerError::Library`] if the pre-tokenizer's regular expression gives up.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>, TokenizerError> {
        let encoding =
            self.inner.encode_fast(text, add_special).map_err(TokenizerError::Library)?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Decodes tokens; bytes that are no UTF-8 become U+FFFD, unknown ids become nothing.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> String {
        let mut bytes = Vec::new();
        for &id in ids {
            if !(skip_special && self.is_special(id)) {
                bytes.extend_from_slice(self.token_bytes(id).unwrap_or_default());
            }
        }
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// The bytes a token stands for; special tokens stand for their own text. `None` for ids that
    /// no token has (models pad their vocabulary).
    pub fn token_bytes(&self, id: u32) -> Option<&[u8]> {
        self.tokens.bytes(id)
    }

    /// Whether a token is a control token that is not part of the generated text.
    pub fn is_special(&self, id: u32) -> bool {
        self.tokens.kind(id) == Some(TokenKind::Special)
    }

    /// The id of a token by its text, special tokens included.
    pub fn token_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// One more than the largest id of a token.
    pub fn id_limit(&self) -> u32 {
        self.tokens.entries.len() as u32
    }

    /// Checks that the embedding has a row for every token.
    pub(crate) fn check_vocab_size(&self, vocab_size: usize) -> Result<(), TokenizerError> {
        let Some(id) = self.id_limit().checked_sub(1).filter(|&id| id as usize >= vocab_size)
        else {
            return Ok(());
        };
        let token = String::from_utf8_lossy(self.token_bytes(id).unwrap_or_default());
        let token = crate::files::shorten(token);
        Err(TokenizerError::TokenOutOfRange { token, id, vocab_size })
    }

    /// BLAKE3 of what the tokenizer does: its tokens by id, merges, pre-tokenizer, and what it puts
    /// around a prompt; the same for a `tokenizer.json` and the GGUF metadata made of it.
    pub(crate) fn digest(&self) -> [u8; 32] {
        self.digest
    }

    /// The tokens and merges as text, for writing them in another form.
    pub(crate) fn vocabulary(&self) -> Result<Vocabulary, TokenizerError> {
        let json: TokenizerJson = serde_json::from_slice(&self.json)
            .map_err(|source| TokenizerError::Json { file: "tokenizer.json", source })?;
        let pre = named_pre_tokenizer(&json);
        let mut tokens = vec![None; self.tokens.entries.len()];
        let added = json.added_tokens.into_iter().map(|token| (token.content, token.id));
        for (text, id) in json.model.vocab.into_iter().chain(added) {
            tokens[id as usize] = self.tokens.kind(id).map(|kind| (text, kind));
        }
        let merges = json.model.merges.iter().map(Merge::joined).collect();
        Ok(Vocabulary { tokens, merges, pre })
    }

    /// The `tokenizer.json` this was built from.
    pub(crate) fn json(&self) -> &[u8] {
        &self.json
    }
}

/// The library numbers added tokens itself, from the size of the vocabulary on, and only warns when
/// the file says otherwise.
fn check_ids(inner: &tokenizers::Tokenizer, json: &TokenizerJson) -> Result<(), TokenizerError> {
    for token in &json.added_tokens {
        if inner.token_to_id(&token.content) != Some(token.id) {
            let token_text = crate::files::shorten(&token.content);
            return Err(TokenizerError::AddedTokenId { token: token_text, id: token.id });
        }
    }
    Ok(())
}

fn check_kind(json: &TokenizerJson) -> Result<(), TokenizerError> {
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

/// What a token is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TokenKind {
    /// Learned by BPE.
    Normal,
    /// Added to the vocabulary as text.
    Added,
    /// A control token.
    Special,
}

/// Bytes of every token, by id.
#[derive(Debug, Default)]
struct TokenTable {
    /// End of the token's bytes in `bytes` (they start where the previous token's end), and its
    /// kind; `None` for ids without a token.
    entries: Vec<(usize, Option<TokenKind>)>,
    bytes: Vec<u8>,
}

impl TokenTable {
    fn new(json: &TokenizerJson) -> Result<Self, TokenizerError> {
        let mut by_id: Vec<Option<(&str, TokenKind)>> = Vec::new();
        let vocab = json.model.vocab.iter().map(|(token, &id)| (id, token.as_str(), false, false));
        let added = json.added_tokens.iter().map(|t| (t.id, t.content.as_str(), true, t.special));
        for (id, token, is_added, is_special) in vocab.chain(added) {
            if id >= VOCAB_MAX {
                let token = crate::files::shorten(token);
                let vocab_size = VOCAB_MAX as usize;
                return Err(TokenizerError::TokenOutOfRange { token, id, vocab_size });
            }
            if by_id.len() <= id as usize {
                by_id.resize(id as usize + 1, None);
            }
            let kind = match (is_added, is_special) {
                (false, _) => TokenKind::Normal,
                (true, false) => TokenKind::Added,
                (true, true) => TokenKind::Special,
            };
            // An added token may name a token of the vocabulary; nothing else may share an id.
            if by_id[id as usize].is_some_and(|(other, _)| other != token) {
                return Err(TokenizerError::DuplicateId { id });
            }
            by_id[id as usize] = Some((token, kind));
        }
        let alphabet = byte_alphabet();
        let mut table = Self::default();
        for entry in by_id {
            if let Some((token, _)) = entry {
                table.push_token(token, &alphabet);
            }
            table.entries.push((table.bytes.len(), entry.map(|(_, kind)| kind)));
        }
        Ok(table)
    }

    /// Appends the bytes of a token written in the byte-level alphabet. A token with any other
    /// character stands for its own UTF-8 (the rule of the reference decoder).
    fn push_token(&mut self, token: &str, alphabet: &HashMap<char, u8>) {
        let start = self.bytes.len();
        for character in token.chars() {
            match alphabet.get(&character) {
                Some(&byte) => self.bytes.push(byte),
                None => {
                    self.bytes.truncate(start);
                    self.bytes.extend_from_slice(token.as_bytes());
                    return;
                }
            }
        }
    }

    fn kind(&self, id: u32) -> Option<TokenKind> {
        self.entries.get(id as usize)?.1
    }

    fn bytes(&self, id: u32) -> Option<&[u8]> {
        let &(end, kind) = self.entries.get(id as usize)?;
        kind?;
        let start = id.checked_sub(1).map_or(0, |before| self.entries[before as usize].0);
        Some(&self.bytes[start..end])
    }
}

/// The characters that byte-level BPE writes bytes as (GPT-2's `bytes_to_unicode`): printable
/// Latin-1 stands for itself, the other 68 bytes are numbered from U+0100.
pub(crate) fn byte_alphabet() -> HashMap<char, u8> {
    let mut alphabet = HashMap::with_capacity(256);
    let mut next = 0x100;
    for byte in 0..=255u8 {
        let code = match byte {
            b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff => u32::from(byte),
            _ => {
                next += 1;
                next - 1
            }
        };
        let character = char::from_u32(code).expect("codes below U+0200 are characters");
        alphabet.insert(character, byte);
    }
    alphabet
}

fn digest(json: &TokenizerJson, tokens: &TokenTable, framed_empty: &[u32]) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new();
    let mut field = |bytes: &[u8]| {
        hasher.update(&(bytes.len() as u64).to_le_bytes());
        hasher.update(bytes);
    };
    for id in 0..tokens.entries.len() as u32 {
        field(tokens.bytes(id).unwrap_or_default());
        field(&[tokens.kind(id).map_or(0, |kind| kind as u8 + 1)]);
    }
    for merge in &json.model.merges {
        field(merge.joined().as_bytes());
    }
    field(json.normalizer.to_string().as_bytes());
    if is_bytes_only(json) {
        field(b"bytes");
    } else {
        field(&[u8::from(json.model.ignore_merges)]);
        for pattern in split_patterns(&json.pre_tokenizer) {
            field(pattern.as_bytes());
        }
    }
    for id in framed_empty {
        field(&id.to_le_bytes());
    }
    *hasher.finalize().as_bytes()
}

/// GGUF's name of the pre-tokenizer, if it has one that means exactly this.
fn named_pre_tokenizer(json: &TokenizerJson) -> Option<&'static str> {
    let pre = &json.pre_tokenizer;
    if !json.normalizer.is_null() {
        return None;
    }
    if is_bytes_only(json) {
        return Some("llama-bpe");
    }
    let [split] = split_patterns(pre).try_into().ok()?;
    let split: Value = serde_json::from_str(&split).ok()?;
    let is_llama3 = split["type"] == "Split"
        && split["pattern"]["Regex"] == LLAMA3_REGEX
        && split["behavior"] == "Isolated"
        && split["invert"] == Value::Bool(false);
    let is_gpt2 = split["type"] == "ByteLevel"
        && split["use_regex"] == Value::Bool(true)
        && split["add_prefix_space"] == Value::Bool(false);
    match json.model.ignore_merges {
        true if is_llama3 => Some("llama-bpe"),
        false if is_gpt2 => Some("gpt-2"),
        _ => None,
    }
}

/// Whether every byte is a token and nothing else is: then it makes no difference where the text is
/// split.
fn is_bytes_only(json: &TokenizerJson) -> bool {
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

/// What the pre-tokenizer splits by: its parts except the byte-level mapping, which only adds
/// information if it splits itself or adds a space.
fn split_patterns(pre_tokenizer: &Value) -> Vec<String> {
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

/// The parts of `tokenizer_config.json` that matter here.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TokenizerConfig {
    /// Text of the BOS token, for chat templates.
    pub bos_token: Option<String>,
    /// Text of the EOS token, for chat templates.
    pub eos_token: Option<String>,
    /// The template named `default`, or the only one.
    pub chat_template: Option<String>,
}

impl TokenizerConfig {
    /// Parses `tokenizer_config.json`.
    ///
    /// # Errors
    /// [`TokenizerError::Json`].
    pub fn parse(bytes: &[u8]) -> Result<Self, TokenizerError> {
        #[derive(Deserialize)]
        struct Raw {
            #[serde(default)]
            bos_token: Option<TokenText>,
            #[serde(default)]
            eos_token: Option<TokenText>,
            #[serde(default)]
            chat_template: Option<Templates>,
        }
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum TokenText {
            Plain(String),
            Described { content: String },
        }
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Templates {
            One(String),
            Named(Vec<Named>),
        }
        #[derive(Deserialize)]
        struct Named {
            name: String,
            template: String,
        }
        let raw: Raw = serde_json::from_slice(bytes)
            .map_err(|source| TokenizerError::Json { file: "tokenizer_config.json", source })?;
        let text = |token| match token {
            TokenText::Plain(text) | TokenText::Described { content: text } => text,
        };
        let chat_template = match raw.chat_template {
            None => None,
            Some(Templates::One(template)) => Some(template),
            Some(Templates::Named(list)) => {
                let only = list.len() == 1;
                let wanted = |named: &Named| only || named.name == "default";
                list.into_iter().find(wanted).map(|named| named.template)
            }
        };
        Ok(Self {
            bos_token: raw.bos_token.map(text),
            eos_token: raw.eos_token.map(text),
            chat_template,
        })
    }
}
