//! Writes SentencePiece vocabularies as GGUF metadata: the inverse of [`crate::files::gguf`]'s reader.
//!
//! llama.cpp merges pieces by their scores, a `tokenizer.json` by the order of its merges. So the score of a piece is
//! the place of its merges in that order, negative. The merges of one piece have one score: where their order is not that
//! of the reader, [`MERGES_KEY`] keeps it.
//!
//! Vocabularies that llama.cpp would encode with other tokens are refused: it changes no characters and no spaces
//! before BPE, has no bytes in Unigram and none but these in BPE, and puts a space after special tokens too.

use std::collections::{HashMap, HashSet};

use base64::{Engine, prelude::BASE64_STANDARD};
use serde::Deserialize;
use serde_json::Value;

use crate::{
    files::{
        gguf::{names::MERGES_KEY, write::Meta},
        tokenizer::pieces::{Algorithm, Piece, PieceKind, Pieces, PrefixSpace},
    },
    tokenizer::AddedToken,
};

/// Score of ids without a token, as llama.cpp's converter writes it.
const PADDING_SCORE: f32 = -1000.0;

/// Why a vocabulary cannot be written.
type Refusal = &'static str;

/// The parts of a `tokenizer.json` that the format has keys for.
#[derive(Debug, Deserialize)]
struct Json {
    #[serde(default)]
    added_tokens: Vec<AddedWithId>,
    #[serde(default)]
    normalizer: Value,
    #[serde(default)]
    pre_tokenizer: Value,
    model: Model,
}

#[derive(Debug, Deserialize)]
struct AddedWithId {
    id: u32,
    #[serde(flatten)]
    token: AddedToken,
}

#[derive(Debug, Deserialize)]
struct Model {
    #[serde(default)]
    byte_fallback: bool,
    unk_token: Option<String>,
    unk_id: Option<u32>,
    vocab: Vocab,
    #[serde(default)]
    merges: Vec<Merge>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Vocab {
    Scores(Vec<(String, f64)>),
    Ids(HashMap<String, u32>),
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Merge {
    Pair(String, String),
    Joined(String),
}

impl Merge {
    fn parts(&self) -> Option<(&str, &str)> {
        match self {
            Self::Pair(left, right) => Some((left, right)),
            Self::Joined(joined) => joined.split_once(' '),
        }
    }
}

/// Returns the keys of a vocabulary of pieces, padded to `vocab_size`. The caller checks that they read back as the same
/// tokenizer.
///
/// # Errors
/// Says what the format cannot express.
pub(super) fn metadata(
    tokenizer_json: &[u8],
    vocab_size: usize,
) -> Result<Vec<(&'static str, Meta)>, Refusal> {
    let json: Json =
        serde_json::from_slice(tokenizer_json).map_err(|_| "its tokenizer.json has other parts")?;
    check_added(&json)?;
    let unknown = json.unknown();
    let mut list: Vec<Piece<'_>> = json.pieces(unknown)?.into_iter().map(padded).collect();
    let settings = Settings::parse(&json)?;
    let mut merges = None;
    let algorithm = match json.model.vocab {
        Vocab::Ids(_) => {
            settings.check_bpe(&list)?;
            merges = bpe_scores(&json.model.merges, &mut list)?;
            Algorithm::Bpe
        }
        Vocab::Scores(_) => {
            settings.check_unigram(&json.model)?;
            Algorithm::Unigram
        }
    };
    let mut texts: Vec<String> = list.iter().map(|piece| piece.text.to_owned()).collect();
    for (id, text) in texts.iter_mut().enumerate().filter(|(_, text)| text.is_empty()) {
        *text = format!("[PAD{id}]");
    }
    texts.extend((texts.len()..vocab_size).map(|id| format!("[PAD{id}]")));
    let mut scores: Vec<f32> = list.iter().map(|piece| piece.score).collect();
    scores.resize(vocab_size, PADDING_SCORE);
    let mut kinds: Vec<i32> = list.iter().map(|piece| piece.kind as i32).collect();
    kinds.resize(vocab_size, PieceKind::Unused as i32);
    let model = if algorithm == Algorithm::Bpe { "llama" } else { "t5" };
    let mut metadata = vec![
        ("tokenizer.ggml.model", Meta::Text(model.to_owned())),
        ("tokenizer.ggml.pre", Meta::Text("default".to_owned())),
        ("tokenizer.ggml.tokens", Meta::Texts(texts)),
        ("tokenizer.ggml.scores", Meta::F32s(scores)),
        ("tokenizer.ggml.token_type", Meta::I32s(kinds)),
        ("tokenizer.ggml.add_space_prefix", Meta::Bool(settings.prefix_space)),
        ("tokenizer.ggml.remove_extra_whitespaces", Meta::Bool(settings.removes_spaces)),
    ];
    if !settings.charsmap.is_empty() {
        metadata.push(("tokenizer.ggml.precompiled_charsmap", Meta::U8s(settings.charsmap)));
    }
    metadata.extend(unknown.map(|id| ("tokenizer.ggml.unknown_token_id", Meta::U32(id))));
    metadata.extend(merges.map(|merges| (MERGES_KEY, Meta::Texts(merges))));
    Ok(metadata)
}

fn padded(piece: Option<Piece<'_>>) -> Piece<'_> {
    piece.unwrap_or(Piece { text: "", score: PADDING_SCORE, kind: PieceKind::Unused })
}

/// Tokens beside the pieces are matched as they stand in the text.
fn check_added(json: &Json) -> Result<(), Refusal> {
    for AddedWithId { token, .. } in &json.added_tokens {
        if token.lstrip || token.rstrip || token.single_word {
            return Err("an added token takes spaces or whole words, which the format cannot say");
        }
        if token.is_normalized() && !json.normalizer.is_null() {
            return Err(
                "an added token is looked for in changed text, which the format cannot say",
            );
        }
    }
    Ok(())
}

impl Json {
    fn unknown(&self) -> Option<u32> {
        match &self.model.vocab {
            Vocab::Ids(ids) => ids.get(self.model.unk_token.as_ref()?).copied(),
            Vocab::Scores(_) => self.model.unk_id,
        }
    }

    /// Returns the tokens by id, the pieces of BPE with score 0.
    fn pieces(&self, unknown: Option<u32>) -> Result<Vec<Option<Piece<'_>>>, Refusal> {
        let (mut of_model, is_bpe): (Vec<(&str, u32, f32)>, bool) = match &self.model.vocab {
            Vocab::Ids(ids) => (ids.iter().map(|(text, &id)| (&**text, id, 0.0)).collect(), true),
            Vocab::Scores(list) => {
                let list = (0u32..).zip(list);
                (list.map(|(id, (text, score))| (&**text, id, *score as f32)).collect(), false)
            }
        };
        of_model.sort_unstable_by_key(|&(_, id, _)| id);
        let added = self.added_tokens.iter().map(|token| token.id as usize + 1).max();
        let len = of_model.last().map_or(0, |&(_, id, _)| id as usize + 1).max(added.unwrap_or(0));
        let mut list = vec![None; len];
        for (text, id, score) in of_model {
            let is_byte = self.model.byte_fallback && is_byte(text);
            let kind = if is_byte { PieceKind::Byte } else { PieceKind::Normal };
            list[id as usize] = Some(Piece { text, score, kind });
        }
        for AddedWithId { id, token } in &self.added_tokens {
            let kind = match token.special {
                _ if unknown == Some(*id) => PieceKind::Unknown,
                true => PieceKind::Control,
                false => PieceKind::UserDefined,
            };
            let known: Option<Piece<'_>> = list[*id as usize];
            if known.is_none() && !is_bpe {
                return Err("it has added tokens without a score");
            }
            let score = known.map_or(0.0, |piece| piece.score);
            list[*id as usize] = Some(Piece { text: &token.content, score, kind });
        }
        Ok(list)
    }
}

fn is_byte(text: &str) -> bool {
    let digits = text.strip_prefix("<0x").and_then(|text| text.strip_suffix('>'));
    let is_digit = |digit: u8| digit.is_ascii_digit() || (b'A'..=b'F').contains(&digit);
    digits.is_some_and(|digits| digits.len() == 2 && digits.bytes().all(is_digit))
}

/// What happens to a text before the pieces.
struct Settings {
    prefix_space: bool,
    removes_spaces: bool,
    charsmap: Vec<u8>,
}

impl Settings {
    fn parse(json: &Json) -> Result<Self, Refusal> {
        let steps = |value: &Value, key: &str| match value[key].as_array() {
            Some(list) => list.clone(),
            None => vec![value.clone()],
        };
        if steps(&json.pre_tokenizer, "pretokenizers")
            .iter()
            .any(|step| step["type"] == "Metaspace")
        {
            return Err(
                "it puts a space only before the text, the format also after special tokens",
            );
        }
        let steps = steps(&json.normalizer, "normalizers");
        let map = steps.iter().find_map(|step| step["precompiled_charsmap"].as_str());
        let charsmap = map.map(|map| BASE64_STANDARD.decode(map)).transpose();
        Ok(Self {
            prefix_space: steps.iter().any(|step| step["type"] == "Prepend"),
            removes_spaces: steps.iter().any(|step| step["pattern"]["Regex"] == " {2,}"),
            charsmap: charsmap
                .map_err(|_| "its map of characters is not base64")?
                .unwrap_or_default(),
        })
    }

    fn check_bpe(&self, list: &[Piece<'_>]) -> Result<(), Refusal> {
        if !self.charsmap.is_empty() || self.removes_spaces {
            return Err("it changes characters or spaces before BPE, which llama.cpp does not");
        }
        match list.iter().filter(|piece| piece.kind == PieceKind::Byte).count() {
            256 => Ok(()),
            _ => Err("it has no bytes for unknown characters, which llama.cpp needs for BPE"),
        }
    }

    fn check_unigram(&self, model: &Model) -> Result<(), Refusal> {
        if model.byte_fallback {
            return Err("it has bytes for unknown characters, which llama.cpp has not for Unigram");
        }
        match self.prefix_space == self.removes_spaces {
            true => Ok(()),
            // A text of spaces alone would differ.
            false => {
                Err("it adds spaces and keeps others, or the reverse, unlike llama.cpp's Unigram")
            }
        }
    }
}

/// Sets the scores of pieces by their merges. Returns the merges where their order does not follow from the scores.
fn bpe_scores(merges: &[Merge], list: &mut [Piece<'_>]) -> Result<Option<Vec<String>>, Refusal> {
    const ORDER: Refusal = "its merges are not in the order of pieces with scores";
    let ids: HashMap<&str, usize> = (0..list.len()).map(|id| (list[id].text, id)).collect();
    let kind = |text: &str| ids.get(text).map(|&id| list[id].kind);
    let mut live = Vec::new();
    let mut scores: HashMap<usize, f32> = HashMap::new();
    let mut last = None;
    for merge in merges {
        let (left, right) = merge.parts().ok_or(ORDER)?;
        let text = format!("{left}{right}");
        let id = *ids.get(&*text).ok_or(ORDER)?;
        // Texts of such tokens are found before pieces are merged.
        let is_matched_before = |text: &str| {
            use PieceKind::{Control, Unknown, UserDefined};
            matches!(kind(text), Some(Control | Unknown | UserDefined))
        };
        if [left, right, &text].into_iter().any(is_matched_before) {
            continue;
        }
        if last != Some(id) {
            if scores.insert(id, -(scores.len() as f32)).is_some() {
                return Err(ORDER);
            }
            last = Some(id);
        }
        live.push((left, right));
    }
    let unmerged = -(scores.len() as f32);
    check_merges(&live, list, &ids)?;
    for (id, piece) in list.iter_mut().enumerate().filter(|(_, p)| p.kind == PieceKind::Normal) {
        piece.score = scores.get(&id).copied().unwrap_or(unmerged);
    }
    let pieces = Pieces {
        list: list.to_vec(),
        algorithm: Algorithm::Bpe,
        charsmap: &[],
        remove_extra_whitespaces: false,
        prefix_space: PrefixSpace::Never,
        added: Vec::new(),
        post_processor: Value::Null,
    };
    let derived = pieces.into_json().map_err(|_| "one of its pieces cannot be written")?;
    let texts = |merge: &Merge| merge.parts().map(|(left, right)| format!("{left} {right}"));
    let derived: Vec<Merge> = Vec::deserialize(&derived["model"]["merges"]).map_err(|_| ORDER)?;
    let (listed, derived): (Vec<_>, Vec<_>) =
        (merges.iter().map(texts).collect(), derived.iter().map(texts).collect());
    Ok((listed != derived).then(|| listed.into_iter().flatten().collect()))
}

/// Checks that there is a merge for every way to make a piece of two others, as llama.cpp makes them.
fn check_merges(
    live: &[(&str, &str)],
    list: &[Piece<'_>],
    ids: &HashMap<&str, usize>,
) -> Result<(), Refusal> {
    let is_normal =
        |text: &str| ids.get(text).is_some_and(|&id| list[id].kind == PieceKind::Normal);
    let listed: HashSet<(&str, &str)> = live.iter().copied().collect();
    let mut count = 0;
    for piece in list.iter().filter(|p| matches!(p.kind, PieceKind::Normal | PieceKind::Byte)) {
        for (at, _) in piece.text.char_indices().skip(1) {
            let (left, right) = piece.text.split_at(at);
            // llama.cpp also merges characters that are no pieces.
            let can_be = |text: &str| is_normal(text) || text.chars().nth(1).is_none();
            if can_be(left) && can_be(right) {
                if !listed.contains(&(left, right)) {
                    return Err("its merges leave out ways to make a piece of two others");
                }
                count += 1;
            }
        }
    }
    match count == live.len() {
        true => Ok(()),
        false => Err("its merges make pieces of others than two pieces"),
    }
}
