//! The bytes of every token.

use std::collections::HashMap;

use super::{TokenizerError, alphabet::Alphabet, description::TokenizerJson};

/// Limit of token ids, which bounds the size of the table.
const VOCAB_MAX: u32 = 1 << 21;

/// Marks of the parts of an answer. They are text even in files that list them as control tokens, since an answer without
/// them could not be divided.
pub(super) const ANSWER_MARKS: [&str; 4] = ["<think>", "</think>", "<tool_call>", "</tool_call>"];

/// The kind of a token.
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
pub(super) struct TokenTable {
    /// End of the token's bytes in `bytes` (they start where the previous token's end), and its
    /// kind; `None` for ids without a token.
    pub entries: Vec<(usize, Option<TokenKind>)>,
    bytes: Vec<u8>,
}

impl TokenTable {
    /// Returns the tokens of a file.
    pub(super) fn new(json: &TokenizerJson, alphabet: Alphabet) -> Result<Self, TokenizerError> {
        let mut by_id: Vec<Option<(&str, TokenKind)>> = Vec::new();
        let vocab = json.model.vocab.tokens().map(|(token, id)| (id, token, false, false));
        let added = json
            .added_tokens
            .iter()
            .map(|t| (t.id, t.token.content.as_str(), true, t.token.special));
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
                (true, _) if ANSWER_MARKS.contains(&token) => TokenKind::Added,
                (true, false) => TokenKind::Added,
                (true, true) => TokenKind::Special,
            };
            // An added token may name a token of the vocabulary; nothing else may share an id.
            if by_id[id as usize].is_some_and(|(other, _)| other != token) {
                return Err(TokenizerError::DuplicateId { id });
            }
            by_id[id as usize] = Some((token, kind));
        }
        let characters = byte_alphabet();
        let mut table = Self::default();
        for entry in by_id {
            if let Some((token, _)) = entry {
                match alphabet {
                    Alphabet::ByteLevel => table.push_token(token, &characters),
                    Alphabet::Pieces { .. } => alphabet.push_piece(token, &mut table.bytes),
                }
            }
            table.entries.push((table.bytes.len(), entry.map(|(_, kind)| kind)));
        }
        Ok(table)
    }

    /// Appends the bytes of a token in the byte-level alphabet. A token with any other character stands
    /// for its own UTF-8, as in the reference decoder.
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

    /// Returns the kind of a token; `None` for ids without a token.
    pub(super) fn kind(&self, id: u32) -> Option<TokenKind> {
        self.entries.get(id as usize)?.1
    }

    /// Returns the bytes of a token; `None` for ids without a token.
    pub(super) fn bytes(&self, id: u32) -> Option<&[u8]> {
        let &(end, kind) = self.entries.get(id as usize)?;
        kind?;
        let start = id.checked_sub(1).map_or(0, |before| self.entries[before as usize].0);
        Some(&self.bytes[start..end])
    }
}

/// Returns the byte for each character of byte-level BPE (GPT-2's `bytes_to_unicode`): printable
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
