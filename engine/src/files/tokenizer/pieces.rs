//! Turns a SentencePiece vocabulary into a `tokenizer.json`, as transformers' converters do.
//!
//! BPE merges follow from the pieces: a piece that consists of two pieces is a merge, and the merges of pieces
//! with higher scores come first. This gives the tokens of SentencePiece, except where two neighbours of one
//! merged piece overlap (`aa`+`a` and `a`+`aa`): SentencePiece takes the left ones, the library the merge with
//! the shorter left part. Control tokens and user-defined pieces are matched in the text before anything else.
//!
//! The space before a text: [`PrefixSpace::EachPart`] puts one also after each such token (transformers with
//! `legacy`, the default of Llama's first tokenizers, and llama.cpp), [`PrefixSpace::First`] only at the begin.

use std::collections::{HashMap, HashSet};

use serde_json::{Map, Value, json};

use super::json::added_token;
use crate::{
    files::error::shorten,
    tokenizer::{TokenizerError, charsmap_json},
};

/// Longest piece that is looked at for merges, in bytes. SentencePiece's trainer writes pieces of 16 characters
/// unless told otherwise; the time for merges grows with the square of the length.
const MERGED_BYTES_MAX: usize = 1024;

/// The kind of a piece, with its number in both file formats.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PieceKind {
    Normal = 1,
    Unknown = 2,
    Control = 3,
    UserDefined = 4,
    Unused = 5,
    Byte = 6,
}

impl PieceKind {
    pub fn from_number(number: i64) -> Option<Self> {
        use PieceKind::{Byte, Control, Normal, Unknown, Unused, UserDefined};
        [Normal, Unknown, Control, UserDefined, Unused, Byte]
            .into_iter()
            .find(|&kind| kind as i64 == number)
    }
}

/// A piece; its id is its place.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Piece<'a> {
    pub text: &'a str,
    pub score: f32,
    pub kind: PieceKind,
}

/// Where encoding adds a space that is not in the text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PrefixSpace {
    Never,
    /// Before the text, unless it begins with a special token.
    First,
    /// Before the text and after every special token.
    EachPart,
}

/// The algorithm of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Algorithm {
    Bpe,
    Unigram,
}

/// A SentencePiece vocabulary with its settings.
#[derive(Debug)]
pub(crate) struct Pieces<'a> {
    pub list: Vec<Piece<'a>>,
    pub algorithm: Algorithm,
    /// The normalizer's character map; empty for none.
    pub charsmap: &'a [u8],
    pub remove_extra_whitespaces: bool,
    pub prefix_space: PrefixSpace,
    /// Tokens beside the pieces, as in a `tokenizer.json`.
    pub added: Vec<Value>,
    pub post_processor: Value,
}

fn wrong<T>(id: usize, piece: &Piece<'_>, why: &'static str) -> Result<T, TokenizerError> {
    Err(TokenizerError::Piece { id: id as u32, piece: shorten(piece.text), why })
}

impl Pieces<'_> {
    /// Returns the `tokenizer.json`.
    ///
    /// # Errors
    /// [`TokenizerError::Piece`] names the piece that cannot be used.
    pub fn into_json(self) -> Result<Value, TokenizerError> {
        let ids = self.check()?;
        let byte_fallback = self.list.iter().any(|piece| piece.kind == PieceKind::Byte);
        let mut added: Vec<Value> = Vec::new();
        for (id, piece) in self.list.iter().enumerate() {
            let special = matches!(piece.kind, PieceKind::Control | PieceKind::Unknown);
            if special || piece.kind == PieceKind::UserDefined {
                added.push(added_token(id as u32, piece.text, special));
            }
        }
        let model = match self.algorithm {
            Algorithm::Bpe => self.bpe(&ids, byte_fallback)?,
            Algorithm::Unigram => self.unigram(byte_fallback)?,
        };
        Ok(json!({
            "version": "1.0", "truncation": null, "padding": null,
            "added_tokens": merge_added(added, self.added.clone()),
            "normalizer": self.normalizer(),
            "pre_tokenizer": self.pre_tokenizer(byte_fallback),
            "post_processor": self.post_processor,
            "decoder": self.decoder(byte_fallback),
            "model": model,
        }))
    }

    /// Checks scores and texts; returns the ids by text.
    fn check(&self) -> Result<HashMap<&str, usize>, TokenizerError> {
        let mut ids = HashMap::with_capacity(self.list.len());
        for (id, piece) in self.list.iter().enumerate() {
            if !piece.score.is_finite() {
                return wrong(id, piece, "its score is not a number");
            }
            if piece.kind == PieceKind::Unused {
                continue; // Padding: no text encodes to it.
            }
            if piece.text.is_empty() {
                return wrong(id, piece, "it has no text");
            }
            if ids.insert(piece.text, id).is_some() {
                return wrong(id, piece, "another piece has the same text");
            }
        }
        Ok(ids)
    }

    fn unknown(&self) -> Option<(usize, &Piece<'_>)> {
        self.list.iter().enumerate().find(|(_, piece)| piece.kind == PieceKind::Unknown)
    }

    fn bpe(
        &self,
        ids: &HashMap<&str, usize>,
        byte_fallback: bool,
    ) -> Result<Value, TokenizerError> {
        let used = self.list.iter().enumerate().filter(|(_, p)| p.kind != PieceKind::Unused);
        let vocab: Map<String, Value> =
            used.map(|(id, piece)| (piece.text.to_owned(), json!(id))).collect();
        let normal =
            |text: &str| ids.get(text).is_some_and(|&id| self.list[id].kind == PieceKind::Normal);
        let mut merges: Vec<(f32, usize, &str, &str)> = Vec::new();
        for (id, piece) in self.list.iter().enumerate() {
            let unused = piece.kind == PieceKind::Unused;
            if piece.kind != PieceKind::Normal && !unused {
                continue;
            }
            if piece.text.len() > MERGED_BYTES_MAX {
                return wrong(id, piece, "it is longer than 1024 bytes");
            }
            for (at, _) in piece.text.char_indices().skip(1) {
                let (left, right) = piece.text.split_at(at);
                if !normal(left) || !normal(right) {
                    continue;
                }
                if unused {
                    return wrong(id, piece, "it is unused, but two other pieces make it");
                }
                merges.push((piece.score, id, left, right));
            }
        }
        merges.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)).then(a.2.cmp(b.2)));
        let merges: Vec<Value> = merges.iter().map(|(_, _, l, r)| json!([l, r])).collect();
        Ok(json!({
            "type": "BPE", "dropout": null, "unk_token": self.unknown().map(|(_, p)| p.text),
            "continuing_subword_prefix": null, "end_of_word_suffix": null, "fuse_unk": true,
            "byte_fallback": byte_fallback, "ignore_merges": false,
            "vocab": vocab, "merges": merges,
        }))
    }

    fn unigram(&self, byte_fallback: bool) -> Result<Value, TokenizerError> {
        let used = self.list.iter().rposition(|piece| piece.kind != PieceKind::Unused);
        let list = &self.list[..used.map_or(0, |last| last + 1)];
        if let Some(id) = list.iter().position(|piece| piece.kind == PieceKind::Unused) {
            return wrong(id, &list[id], "unused pieces before used ones are not supported");
        }
        let vocab: Vec<Value> =
            list.iter().map(|piece| json!([piece.text, f64::from(piece.score)])).collect();
        Ok(json!({
            "type": "Unigram", "unk_id": self.unknown().map(|(id, _)| id), "vocab": vocab,
            "byte_fallback": byte_fallback,
        }))
    }

    fn normalizer(&self) -> Value {
        let replace = |pattern: Value, content: &str| json!({ "type": "Replace", "pattern": pattern, "content": content });
        let mut steps = Vec::new();
        if !self.charsmap.is_empty() {
            steps.push(charsmap_json(self.charsmap));
        }
        if self.remove_extra_whitespaces {
            steps.push(replace(json!({ "Regex": " {2,}" }), " "));
            steps.push(replace(json!({ "Regex": r"\A |[ ▁]+\z" }), ""));
        }
        if self.prefix_space == PrefixSpace::EachPart {
            steps.push(json!({ "type": "Prepend", "prepend": "▁" }));
        }
        if self.prefix_space != PrefixSpace::First {
            steps.push(replace(json!({ "String": " " }), "▁"));
        }
        match steps.len() {
            0 => Value::Null,
            _ => json!({ "type": "Sequence", "normalizers": steps }),
        }
    }

    fn pre_tokenizer(&self, byte_fallback: bool) -> Value {
        let mut steps = Vec::new();
        if self.prefix_space == PrefixSpace::First {
            steps.push(json!({
                "type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": false,
            }));
        }
        if self.algorithm == Algorithm::Unigram && byte_fallback {
            // The library would take the text `<0x41>` for the byte; without one of its digits it cannot.
            steps.push(json!({
                "type": "Split", "pattern": { "Regex": "(?<=<0x[0-9A-F])[0-9A-F](?=>)" },
                "behavior": "Isolated", "invert": false,
            }));
        }
        match steps.len() {
            0 => Value::Null,
            _ => json!({ "type": "Sequence", "pretokenizers": steps }),
        }
    }

    fn decoder(&self, byte_fallback: bool) -> Value {
        let mut steps = vec![json!({
            "type": "Replace", "pattern": { "String": "▁" }, "content": " ",
        })];
        if byte_fallback {
            steps.push(json!({ "type": "ByteFallback" }));
        }
        steps.push(json!({ "type": "Fuse" }));
        if self.prefix_space != PrefixSpace::Never || self.remove_extra_whitespaces {
            steps.push(json!({ "type": "Strip", "content": " ", "start": 1, "stop": 0 }));
        }
        json!({ "type": "Sequence", "decoders": steps })
    }
}

/// Joins the added tokens of the pieces and of other files by id: the other files describe a token better.
fn merge_added(mut of_pieces: Vec<Value>, others: Vec<Value>) -> Vec<Value> {
    let ids: HashSet<u64> = others.iter().filter_map(|token| token["id"].as_u64()).collect();
    of_pieces.retain(|token| !token["id"].as_u64().is_some_and(|id| ids.contains(&id)));
    of_pieces.extend(others);
    of_pieces.sort_by_key(|token| token["id"].as_u64());
    of_pieces
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tokenizer::Tokenizer;

    const NORMAL: PieceKind = PieceKind::Normal;

    fn pieces<'a>(list: &[(&'a str, f32, PieceKind)]) -> Pieces<'a> {
        let piece = |&(text, score, kind): &(&'a str, f32, PieceKind)| Piece { text, score, kind };
        Pieces {
            list: list.iter().map(piece).collect(),
            algorithm: Algorithm::Bpe,
            charsmap: &[],
            remove_extra_whitespaces: false,
            prefix_space: PrefixSpace::EachPart,
            added: Vec::new(),
            post_processor: Value::Null,
        }
    }

    fn problem(list: &[(&str, f32, PieceKind)]) -> (u32, &'static str) {
        match pieces(list).into_json() {
            Err(TokenizerError::Piece { id, why, .. }) => (id, why),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn merges_follow_the_scores() {
        let list = [
            ("<unk>", 0.0, PieceKind::Unknown),
            ("a", -9.0, NORMAL),
            ("b", -9.0, NORMAL),
            ("ab", -2.0, NORMAL),
            ("ba", -1.0, NORMAL),
            ("aba", -3.0, NORMAL),
            ("▁", -9.0, NORMAL),
        ];
        let json = pieces(&list).into_json().expect("valid");
        assert_eq!(
            json["model"]["merges"],
            json!([["b", "a"], ["a", "b"], ["a", "ba"], ["ab", "a"]])
        );
        let tokenizer = Tokenizer::from_json(json.to_string().as_bytes()).expect("valid");
        assert_eq!(tokenizer.encode("abab", false).expect("encodes"), [6, 5, 2]);
        assert_eq!(tokenizer.decode(&[6, 5, 2], false), "abab");
    }

    #[test]
    fn pieces_that_cannot_be_used_are_named() {
        let a = ("a", 0.0, NORMAL);
        assert_eq!(problem(&[a, a]), (1, "another piece has the same text"));
        assert_eq!(problem(&[a, ("", 0.0, NORMAL)]), (1, "it has no text"));
        assert_eq!(problem(&[("b", f32::NAN, NORMAL)]), (0, "its score is not a number"));
        let unused = ("aa", 0.0, PieceKind::Unused);
        assert_eq!(problem(&[a, unused]), (1, "it is unused, but two other pieces make it"));
        let long = "a".repeat(1025);
        assert_eq!(problem(&[(&long, 0.0, NORMAL)]), (0, "it is longer than 1024 bytes"));
    }
}
