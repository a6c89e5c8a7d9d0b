//! Converts text to tokens and back, by byte-level BPE or by the pieces of SentencePiece (BPE or Unigram).
//!
//! Encoding uses the `tokenizers` crate with a `tokenizer.json` (for GGUF files and `tokenizer.model`, one that
//! `files` builds from them). Decoding uses a table: each token is a byte string, and text is the
//! concatenation of its tokens' bytes. [`Tokenizer::token_bytes`] may end inside a character. Most
//! SentencePiece models put a space before a text: [`Tokenizer::decode`] and answers to an empty prompt leave it
//! out, while an answer that continues a prompt keeps the space that it begins with.
//!
//! Truncation and padding are switched off, so that encoding depends on the text alone. Dropout and other
//! kinds of vocabularies are errors, and so is what the library would panic at.

mod added;
mod alphabet;
mod charsmap;
mod checks;
mod config;
mod description;
mod normalization;
mod patterns;
mod table;

use alphabet::Alphabet;
pub(crate) use charsmap::Charsmap;
pub use charsmap::CharsmapError;
pub use config::{AddedToken, TokenizerConfig};
pub(crate) use description::{LLAMA3_REGEX, QWEN2_REGEX, QWEN35_REGEX};
use description::{
    Merge, TokenizerJson, Vocab, is_bytes_only, named_pre_tokenizer, split_patterns,
};
use normalization::Normalization;
pub(crate) use normalization::charsmap_json;
use table::TokenTable;
pub(crate) use table::{TokenKind, byte_alphabet};

use serde_json::{Map, Value};
use tokenizers::{
    DecoderWrapper, ModelWrapper, PostProcessorWrapper, PreTokenizerWrapper, TokenizerImpl,
};

/// A tokenizer is invalid or not supported, or a text cannot be encoded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TokenizerError {
    /// A JSON file does not have the expected form.
    #[error("{file} is not valid: {source}")]
    Json {
        /// Name of the file.
        file: &'static str,
        /// Line, column and cause.
        #[source]
        source: serde_json::Error,
    },
    /// The tokenizer is of a kind that is not supported.
    #[error("tokenizer.json: {key} is {value}: {why}")]
    Unsupported {
        /// Dotted name.
        key: String,
        /// The value in the file, shortened.
        value: String,
        /// The reason.
        why: &'static str,
    },
    /// The value of a key has the wrong type.
    #[error("{file}: {key} is {value}, expected {expected}")]
    BadKey {
        /// Name of the file.
        file: &'static str,
        /// Name in the file.
        key: String,
        /// The value in the file, shortened.
        value: String,
        /// A description of valid values.
        expected: &'static str,
    },
    /// A configuration names a token that the vocabulary lacks, and the embedding has no row for another one.
    #[error("{file}: {key} is {token:?}: the vocabulary has no such token")]
    UnknownToken {
        /// Name of the file.
        file: &'static str,
        /// Name in the file.
        key: String,
        /// The token's text, shortened.
        token: String,
    },
    /// A piece of a SentencePiece vocabulary cannot be used.
    #[error("piece {id} ({piece:?}): {why}")]
    Piece {
        /// Its id.
        id: u32,
        /// Its text, shortened.
        piece: String,
        /// The reason.
        why: &'static str,
    },
    /// The character map of a SentencePiece vocabulary is damaged.
    #[error(transparent)]
    Charsmap(CharsmapError),
    /// The embedding has no row for the id of a token.
    #[error("token {token:?} has id {id}, outside the vocabulary of {vocab_size}")]
    TokenOutOfRange {
        /// The token's text, shortened.
        token: String,
        /// Id of the token.
        id: u32,
        /// Rows of the embedding.
        vocab_size: usize,
    },
    /// Two tokens have the same id.
    #[error("id {id} belongs to two tokens")]
    DuplicateId {
        /// The id.
        id: u32,
    },
    /// The id of an added token is neither in the vocabulary nor the next free one.
    #[error("added token {token:?} cannot have id {id}")]
    AddedTokenId {
        /// The token's text, shortened.
        token: String,
        /// The id in the file.
        id: u32,
    },
    /// An error of the tokenizer library.
    #[error("tokenizer: {0}")]
    Library(#[source] Box<dyn std::error::Error + Send + Sync>),
}

/// A vocabulary as text.
pub(crate) struct Vocabulary {
    /// Tokens by id; `None` for ids without a token.
    pub tokens: Vec<Option<(String, TokenKind)>>,
    /// Merges, by rank: pairs separated by a space.
    pub merges: Vec<String>,
    /// The name of the pre-tokenizer in GGUF files, if it has one.
    pub pre: Option<&'static str>,
}

/// The library's tokenizer, with a normalizer of our own.
type Encoder = TokenizerImpl<
    ModelWrapper,
    Normalization,
    PreTokenizerWrapper,
    PostProcessorWrapper,
    DecoderWrapper,
>;

/// A byte-level or SentencePiece tokenizer.
#[derive(Debug)]
pub struct Tokenizer {
    inner: Encoder,
    tokens: TokenTable,
    alphabet: Alphabet,
    digest: [u8; 32],
    json: Vec<u8>,
    /// Texts of the control tokens.
    control_names: Vec<String>,
}

impl Tokenizer {
    /// Builds a tokenizer from a `tokenizer.json`.
    ///
    /// # Errors
    /// If the file is malformed, or the tokenizer is neither byte-level BPE nor one of SentencePiece's.
    pub fn from_json(bytes: &[u8]) -> Result<Self, TokenizerError> {
        let json: TokenizerJson = serde_json::from_slice(bytes)
            .map_err(|source| TokenizerError::Json { file: "tokenizer.json", source })?;
        let alphabet = Alphabet::from_json(&json)?;
        checks::check(&json)?;
        let tokens = TokenTable::new(&json, alphabet)?;
        let mut inner: Encoder = serde_json::from_slice(bytes)
            .map_err(|source| TokenizerError::Json { file: "tokenizer.json", source })?;
        inner.with_truncation(None).map_err(TokenizerError::Library)?;
        inner.with_padding(None);
        check_ids(&inner, &json)?;
        checks::check_read(&inner, &json)?;
        let control_names = json
            .added_tokens
            .iter()
            .filter(|added| tokens.kind(added.id) == Some(TokenKind::Special))
            .map(|added| added.token.content.clone())
            .collect();
        let json_bytes = bytes.to_vec();
        let mut tokenizer =
            Self { inner, tokens, alphabet, digest: [0; 32], json: json_bytes, control_names };
        let framed = tokenizer.encode("", true)?;
        tokenizer.digest = digest(&json, &tokenizer, &framed);
        Ok(tokenizer)
    }

    /// Builds a tokenizer from a `tokenizer.json`, with the added and special tokens of its configuration.
    ///
    /// # Errors
    /// As [`from_json`](Self::from_json), and if a token of the configuration has another id in the file.
    pub fn with_config(bytes: &[u8], config: &TokenizerConfig) -> Result<Self, TokenizerError> {
        let invalid = |source| TokenizerError::Json { file: "tokenizer.json", source };
        let json: TokenizerJson = serde_json::from_slice(bytes).map_err(invalid)?;
        let Some(added) = added::merged(&json, config)? else { return Self::from_json(bytes) };
        let mut json: Map<String, Value> = serde_json::from_slice(bytes).map_err(invalid)?;
        json.insert("added_tokens".to_owned(), added.into());
        Self::from_json(&serde_json::to_vec(&json).map_err(invalid)?)
    }

    /// Encodes text. With `add_special`, adds the tokens that the model expects around a plain prompt
    /// (usually BOS). Names of special tokens in the text become special tokens in both cases.
    ///
    /// # Errors
    /// [`TokenizerError::Library`] if the regular expression of the pre-tokenizer fails.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>, TokenizerError> {
        let encoding =
            self.inner.encode_fast(text, add_special).map_err(TokenizerError::Library)?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Decodes the tokens of a whole text. Invalid UTF-8 becomes U+FFFD; unknown ids are skipped, and so is the
    /// space that the tokenizer puts before a text.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> String {
        let mut bytes = Vec::new();
        for &id in ids {
            if !(skip_special && self.is_special(id)) {
                bytes.extend_from_slice(self.token_bytes(id).unwrap_or_default());
            }
        }
        if self.strips_leading_space() && bytes.first() == Some(&b' ') {
            bytes.remove(0);
        }
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Returns whether a text loses the space that it begins with: encoding put it there.
    pub fn strips_leading_space(&self) -> bool {
        matches!(self.alphabet, Alphabet::Pieces { strips_space: true, .. })
    }

    /// Returns whether tokens are the pieces of SentencePiece instead of byte-level BPE.
    pub(crate) fn has_pieces(&self) -> bool {
        self.alphabet != Alphabet::ByteLevel
    }

    /// Returns the bytes of a token; a special token stands for its name. `None` for ids without a token
    /// (models pad their vocabulary).
    pub fn token_bytes(&self, id: u32) -> Option<&[u8]> {
        self.tokens.bytes(id)
    }

    /// Returns whether a token is a control token that is not part of the generated text.
    pub fn is_special(&self, id: u32) -> bool {
        self.tokens.kind(id) == Some(TokenKind::Special)
    }

    /// Returns the texts of the control tokens.
    pub fn control_names(&self) -> &[String] {
        &self.control_names
    }

    /// Returns the id of a token by its text, special tokens included.
    pub fn token_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// Returns the largest token id plus one.
    pub fn id_limit(&self) -> u32 {
        self.tokens.entries.len() as u32
    }

    /// Checks that the embedding has a row for every token, and for those around a prompt.
    pub(crate) fn check_vocab_size(&self, vocab_size: usize) -> Result<(), TokenizerError> {
        if let Some(id) = self.id_limit().checked_sub(1).filter(|&id| id as usize >= vocab_size) {
            let token = String::from_utf8_lossy(self.token_bytes(id).unwrap_or_default());
            let token = crate::files::shorten(token);
            return Err(TokenizerError::TokenOutOfRange { token, id, vocab_size });
        }
        let around = self.encode("", true)?;
        match around.into_iter().find(|&id| id as usize >= vocab_size) {
            Some(id) => {
                let why = "no token of the vocabulary has this id";
                alphabet::unsupported("post_processor", id, why)
            }
            None => Ok(()),
        }
    }

    /// BLAKE3 of the tokenizer's behaviour: tokens by id, merges, pre-tokenizer, and the tokens around a
    /// prompt. A `tokenizer.json` and the GGUF metadata converted from it have the same digest.
    pub(crate) fn digest(&self) -> [u8; 32] {
        self.digest
    }

    /// Returns the tokens and merges as text, for writing other formats.
    pub(crate) fn vocabulary(&self) -> Result<Vocabulary, TokenizerError> {
        let json: TokenizerJson = serde_json::from_slice(&self.json)
            .map_err(|source| TokenizerError::Json { file: "tokenizer.json", source })?;
        let pre = named_pre_tokenizer(&json);
        let mut tokens = vec![None; self.tokens.entries.len()];
        let added = json.added_tokens.iter().map(|added| (added.token.content.as_str(), added.id));
        for (text, id) in json.model.vocab.tokens().chain(added) {
            tokens[id as usize] = self.tokens.kind(id).map(|kind| (text.to_owned(), kind));
        }
        let merges = json.model.merges.iter().map(Merge::joined).collect();
        Ok(Vocabulary { tokens, merges, pre })
    }

    /// Returns the `tokenizer.json` of this tokenizer.
    pub(crate) fn json(&self) -> &[u8] {
        &self.json
    }
}

/// Checks the ids of added tokens: the library numbers them from the size of the vocabulary on, and
/// only warns if the file has other ids.
fn check_ids(inner: &Encoder, json: &TokenizerJson) -> Result<(), TokenizerError> {
    for added in &json.added_tokens {
        if inner.token_to_id(&added.token.content) != Some(added.id) {
            let token = crate::files::shorten(&added.token.content);
            return Err(TokenizerError::AddedTokenId { token, id: added.id });
        }
    }
    Ok(())
}

fn digest(json: &TokenizerJson, tokenizer: &Tokenizer, framed_empty: &[u32]) -> [u8; 32] {
    let tokens = &tokenizer.tokens;
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
    if tokenizer.has_pieces() {
        pieces_digest(json, tokenizer.alphabet, &mut field);
    } else if is_bytes_only(json) {
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

/// Hashes what a vocabulary of pieces has beyond tokens, merges and normalizer.
fn pieces_digest(json: &TokenizerJson, alphabet: Alphabet, field: &mut dyn FnMut(&[u8])) {
    let model = &json.model;
    field(b"pieces");
    field(format!("{alphabet:?}").as_bytes());
    field(&[model.byte_fallback, model.ignore_merges, model.fuse_unk].map(u8::from));
    field(model.unk_token.as_deref().unwrap_or_default().as_bytes());
    field(&model.unk_id.map_or(u64::MAX, u64::from).to_le_bytes());
    if let Vocab::Scores(list) = &model.vocab {
        list.iter().for_each(|(_, score)| field(&score.to_bits().to_le_bytes()));
    }
    field(json.pre_tokenizer.to_string().as_bytes());
}
