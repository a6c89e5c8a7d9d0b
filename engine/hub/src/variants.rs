//! What the name of a GGUF file says: its ternary type, or why it is not the model to run.
//!
//! All types are packed alike when they are loaded, so one model runs equally fast from each of them, with two differences: groups
//! of 64 inputs, where they do not pair up, cost more than groups of 128, and base-3 digits take longer to decode at the start.

use std::fmt;

/// Ternary types that the engine reads, by their names in file names, the best first. `q2_0` is the type of llama.cpp, with groups of 64, or in older
/// repositories of groups of 128; `q2_g64` is a spelling of `q2_0_g64`.
const TERNARY_TYPES: [&str; 8] =
    ["i2_s", "tq2_0", "pq2_0", "q2_0", "q2_0_g64", "q2_g64", "ptq1_0", "tq1_0"];

/// A file that is not the one to run, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct PassedOver {
    /// Path in the repository.
    pub file: String,
    /// The reason.
    pub why: WhyNot,
}

/// Why a file is not chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum WhyNot {
    /// The name has no ternary type.
    OtherType,
    /// A part of a model; the engine reads whole files.
    Part,
    /// The projector of a model that sees images.
    Projector,
    /// Statistics by which a model was quantized.
    Statistics,
    /// The same weights with base-3 digits, which are smaller and take longer to decode.
    Digits,
    /// The same weights with a scale for each 64 inputs, where another file has one for 128.
    SmallGroups,
    /// The same weights in a type that other programs prefer.
    OtherEncoding,
}

impl WhyNot {
    /// Returns the reason in words.
    pub fn text(self) -> &'static str {
        match self {
            Self::OtherType => "its name has no ternary type",
            Self::Part => "it is a part of a model: merge the parts with llama-gguf-split first",
            Self::Projector => "it is a projector for images, not a language model",
            Self::Statistics => "it has statistics to quantize a model by",
            Self::Digits => "the same weights as base-3 digits, smaller and slower to start",
            Self::SmallGroups => {
                "the same weights with a scale for each 64 inputs, larger and no faster"
            }
            Self::OtherEncoding => {
                "the same weights, in a type no faster than I2_S, TQ2_0 or PQ2_0"
            }
        }
    }
}

impl fmt::Display for WhyNot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.text())
    }
}

impl fmt::Display for PassedOver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.file, self.why)
    }
}

/// Returns why a file cannot be the one to run, if its name says so.
pub(crate) fn excluded(name: &str) -> Option<WhyNot> {
    let lower = name.to_ascii_lowercase();
    let stem = lower.strip_suffix(".gguf").unwrap_or(&lower);
    let has_word = |word: &str| stem.split(|c: char| !c.is_ascii_alphanumeric()).any(|w| w == word);
    if has_word("mmproj") {
        Some(WhyNot::Projector)
    } else if has_word("imatrix") {
        Some(WhyNot::Statistics)
    } else if is_part(stem) {
        Some(WhyNot::Part)
    } else if type_of(&lower).is_none() {
        Some(WhyNot::OtherType)
    } else {
        None
    }
}

/// Returns the place of a file's type among the ternary types; the first is the best.
pub(crate) fn rank(name: &str) -> usize {
    let found = type_of(&name.to_ascii_lowercase()).map(|(rank, _)| rank);
    found.unwrap_or(TERNARY_TYPES.len())
}

/// Returns the name without its type: files of one model have it in common.
pub(crate) fn without_type(name: &str) -> String {
    let lower = name.to_ascii_lowercase();
    match type_of(&lower) {
        Some((_, at)) => format!("{}{}", &lower[..at.start], &lower[at.end..]),
        None => lower,
    }
}

/// Returns why a file with a ternary type is passed over for a better one.
pub(crate) fn slower_than(name: &str) -> WhyNot {
    match TERNARY_TYPES.get(rank(name)) {
        Some(&("ptq1_0" | "tq1_0")) => WhyNot::Digits,
        Some(&("q2_0_g64" | "q2_g64")) => WhyNot::SmallGroups,
        _ => WhyNot::OtherEncoding,
    }
}

/// Returns the rank and the place of the ternary type in a name in lower case.
fn type_of(lower: &str) -> Option<(usize, std::ops::Range<usize>)> {
    let separates = |c: char| !c.is_ascii_alphanumeric() && c != '_';
    let mut start = 0;
    for part in lower.split(separates) {
        let end = start + part.len();
        for (rank, kind) in TERNARY_TYPES.iter().enumerate() {
            let before = part.strip_suffix(kind);
            if before.is_some_and(|before| before.is_empty() || before.ends_with('_')) {
                return Some((rank, end - kind.len()..end));
            }
        }
        // Separators are matched as single characters.
        start = end + lower[end..].chars().next().map_or(0, char::len_utf8);
    }
    None
}

/// Returns whether a name ends as those of split files do: `-00001-of-00003`.
fn is_part(stem: &str) -> bool {
    let is_number = |text: &str| text.len() == 5 && text.bytes().all(|byte| byte.is_ascii_digit());
    let Some((before, count)) = stem.rsplit_once("-of-") else { return false };
    let number = before.rsplit_once('-').map_or(before, |(_, number)| number);
    is_number(count) && is_number(number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_are_whole_parts_of_names() {
        for (name, kind) in [
            ("Ternary-Bonsai-8B-PQ2_0.gguf", Some("pq2_0")),
            ("Ternary-Bonsai-8B-Q2_0.gguf", Some("q2_0")),
            ("Ternary-Bonsai-8B-Q2_0_g64.gguf", Some("q2_0_g64")),
            ("Ternary-Bonsai-27B-Q2_g64.gguf", Some("q2_g64")),
            ("Ternary-Bonsai-2-27B-PTQ1_0.gguf", Some("ptq1_0")),
            ("ggml-model-i2_s.gguf", Some("i2_s")),
            ("x/a_TQ2_0.gguf", Some("tq2_0")),
            ("ü.tq1_0.gguf", Some("tq1_0")),
            ("m-Q2_K.gguf", None),
            ("m-xq2_0.gguf", None),
            ("m-q8_0.gguf", None),
        ] {
            let found = type_of(&name.to_ascii_lowercase()).map(|(rank, at)| {
                assert_eq!(&name.to_ascii_lowercase()[at], TERNARY_TYPES[rank]);
                TERNARY_TYPES[rank]
            });
            assert_eq!(found, kind, "{name}");
        }
    }

    #[test]
    fn parts_and_companions_are_excluded() {
        for (name, why) in [
            ("m-PQ2_0-00001-of-00003.gguf", Some(WhyNot::Part)),
            ("mmproj-F16.gguf", Some(WhyNot::Projector)),
            ("m-PQ2_0-mmproj.gguf", Some(WhyNot::Projector)),
            ("m.imatrix.gguf", Some(WhyNot::Statistics)),
            ("m-F16.gguf", Some(WhyNot::OtherType)),
            ("state-of-art-PQ2_0.gguf", None),
        ] {
            assert_eq!(excluded(name), why, "{name}");
        }
    }
}
