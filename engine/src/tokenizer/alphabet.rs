//! How the tokens of a `tokenizer.json` stand for bytes, and which tokenizers are refused.
//!
//! A byte-level vocabulary writes each byte as a character. SentencePiece's pieces are text, with `▁` for a space; with
//! byte fallback, the tokens `<0x00>` to `<0xFF>` stand for the bytes of characters that no piece has. A text
//! gets a space before it when it is encoded, and loses one when it is decoded: the decoder says so.

use std::fmt::Display;

use serde_json::Value;

use super::{
    TokenizerError,
    description::{TokenizerJson, Vocab},
};

/// The bytes that tokens stand for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Alphabet {
    /// A character for each byte.
    ByteLevel,
    /// Text, with `▁` for a space.
    Pieces {
        /// Whether `<0x00>` to `<0xFF>` are bytes.
        byte_fallback: bool,
        /// Whether a decoded text loses the space before it.
        strips_space: bool,
    },
}

/// Returns the error of a value that is not supported.
pub(super) fn unsupported<T>(
    key: impl Into<String>,
    value: impl Display,
    why: &'static str,
) -> Result<T, TokenizerError> {
    let value = crate::files::shorten(value);
    Err(TokenizerError::Unsupported { key: key.into(), value, why })
}

impl Alphabet {
    /// Returns the alphabet of a tokenizer.
    ///
    /// # Errors
    /// If the tokenizer is neither byte-level BPE nor one of pieces, is not deterministic, or has no token for
    /// some characters.
    pub fn from_json(json: &TokenizerJson) -> Result<Self, TokenizerError> {
        let model = &json.model;
        if let Some(dropout) = model.dropout.filter(|dropout| *dropout != 0.0) {
            let why = "the same text would encode differently each time";
            return unsupported("model.dropout", dropout, why);
        }
        let kind = model.kind.as_deref().unwrap_or("BPE");
        match (kind, &model.vocab) {
            ("BPE", Vocab::Ids(_)) if mentions_byte_level(&json.pre_tokenizer) => byte_level(json),
            ("BPE", Vocab::Ids(_)) if json.decoder["type"] == "ByteLevel" => {
                let why = "a byte-level vocabulary needs the ByteLevel pre-tokenizer";
                unsupported("pre_tokenizer", &json.pre_tokenizer, why)
            }
            ("BPE", Vocab::Ids(_)) | ("Unigram", Vocab::Scores(_)) => {
                check_unknown(json)?;
                pieces(json)
            }
            ("BPE" | "Unigram", _) => {
                let why = "BPE needs a map of ids, Unigram a list of scores";
                unsupported("model.type", kind, why)
            }
            _ => unsupported("model.type", kind, "only BPE and Unigram are supported"),
        }
    }

    /// Appends the bytes of a token of pieces.
    pub fn push_piece(self, token: &str, bytes: &mut Vec<u8>) {
        if matches!(self, Self::Pieces { byte_fallback: true, .. })
            && let Some(byte) = fallback_byte(token)
        {
            return bytes.push(byte);
        }
        for (index, part) in token.split('▁').enumerate() {
            if index > 0 {
                bytes.push(b' ');
            }
            bytes.extend_from_slice(part.as_bytes());
        }
    }
}

/// Returns the byte of a token such as `<0x0A>`.
fn fallback_byte(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    // `from_str_radix` takes a sign, too.
    let are_digits = digits.len() == 2 && digits.bytes().all(|digit| digit.is_ascii_hexdigit());
    u8::from_str_radix(digits, 16).ok().filter(|_| are_digits)
}

fn byte_level(json: &TokenizerJson) -> Result<Alphabet, TokenizerError> {
    if json.model.byte_fallback {
        let why = "a byte-level vocabulary has all bytes";
        return unsupported("model.byte_fallback", "true", why);
    }
    if json.decoder["type"] != "ByteLevel" {
        let why = "a byte-level vocabulary needs the ByteLevel decoder";
        return unsupported("decoder", &json.decoder, why);
    }
    Ok(Alphabet::ByteLevel)
}

fn mentions_byte_level(pre_tokenizer: &Value) -> bool {
    pre_tokenizer["type"] == "ByteLevel"
        || pre_tokenizer["pretokenizers"]
            .as_array()
            .is_some_and(|list| list.iter().any(|inner| inner["type"] == "ByteLevel"))
}

/// Refuses vocabularies of pieces that have no token for unknown characters: the library would leave these out
/// or fail.
fn check_unknown(json: &TokenizerJson) -> Result<(), TokenizerError> {
    let model = &json.model;
    match &model.vocab {
        Vocab::Ids(ids) => {
            let all_bytes = || (0..=255u8).all(|byte| ids.contains_key(&format!("<0x{byte:02X}>")));
            let has_unknown = model.unk_token.as_ref().is_some_and(|token| ids.contains_key(token));
            if has_unknown || (model.byte_fallback && all_bytes()) {
                return Ok(());
            }
            let why = "the vocabulary has no token for unknown characters";
            let shown = model.unk_token.as_ref().map(|token| format!("{token:?}"));
            unsupported("model.unk_token", shown.as_deref().unwrap_or("absent"), why)
        }
        Vocab::Scores(list) => {
            if model.unk_id.is_none_or(|id| id as usize >= list.len()) {
                let why = "the vocabulary has no token for unknown characters";
                let shown = model.unk_id.map_or_else(|| "absent".to_owned(), |id| id.to_string());
                return unsupported("model.unk_id", shown, why);
            }
            if let Some((token, score)) = list.iter().find(|(_, score)| !score.is_finite()) {
                let why = "a score must be a number";
                return unsupported("model.vocab", format!("{token}: {score}"), why);
            }
            Ok(())
        }
    }
}

/// Reads the decoder of pieces: `Metaspace`, or a sequence of `Replace`, `ByteFallback`, `Fuse` and `Strip`.
fn pieces(json: &TokenizerJson) -> Result<Alphabet, TokenizerError> {
    let decoder = &json.decoder;
    let Some((byte_fallback, strips_space)) = metaspace(decoder).or_else(|| sequence(decoder))
    else {
        let why = "neither byte-level nor the decoder of SentencePiece";
        return unsupported("decoder", decoder, why);
    };
    if json.model.byte_fallback && !byte_fallback {
        let why = "byte_fallback needs the ByteFallback decoder";
        return unsupported("decoder", decoder, why);
    }
    Ok(Alphabet::Pieces { byte_fallback, strips_space })
}

fn metaspace(decoder: &Value) -> Option<(bool, bool)> {
    if decoder["type"] != "Metaspace" || decoder["replacement"] != "▁" {
        return None;
    }
    let never = decoder["prepend_scheme"] == "never" || decoder["add_prefix_space"] == false;
    Some((false, !never))
}

fn sequence(decoder: &Value) -> Option<(bool, bool)> {
    if decoder["type"] != "Sequence" {
        return None;
    }
    let mut parts = decoder["decoders"].as_array()?.iter().peekable();
    let replace = parts.next()?;
    let spaces = replace["type"] == "Replace"
        && replace["pattern"]["String"] == "▁"
        && replace["content"] == " ";
    if !spaces {
        return None;
    }
    let byte_fallback = parts.next_if(|part| part["type"] == "ByteFallback").is_some();
    let fused = parts.next_if(|part| part["type"] == "Fuse").is_some();
    let one_space = |part: &Value| {
        part["type"] == "Strip" && part["content"] == " " && part["start"] == 1 && part["stop"] == 0
    };
    let strips_space = parts.next_if(|part| fused && one_space(part)).is_some();
    parts.next().is_none().then_some((byte_fallback, strips_space))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_stand_for_text_bytes_and_spaces() {
        let bytes = |byte_fallback, token: &str| {
            let mut bytes = Vec::new();
            Alphabet::Pieces { byte_fallback, strips_space: true }.push_piece(token, &mut bytes);
            bytes
        };
        assert_eq!(bytes(true, "▁▁a▁"), b"  a ");
        assert_eq!(bytes(true, "<0xE2>"), [0xe2]);
        assert_eq!(bytes(false, "<0xE2>"), b"<0xE2>");
        for text in ["<0xE>", "<0xE2", "<0x+1>", "<0xÄ>", "0xE2"] {
            assert_eq!(bytes(true, text), text.as_bytes());
        }
    }
}
