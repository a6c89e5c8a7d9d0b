//! The normalizer of a `tokenizer.json`: that of the `tokenizers` crate, except for SentencePiece's character
//! map, which [`Charsmap`] reads. What a file may hold of it is in [`super::checks`].

use base64::{Engine, prelude::BASE64_STANDARD};
use serde::{Deserialize, Deserializer, de::Error};
use serde_json::Value;
use tokenizers::{NormalizedString, Normalizer, NormalizerWrapper, tokenizer::normalizer::Range};

use super::charsmap::Charsmap;

/// Most nested sequences of normalizers.
const DEPTH_MAX: usize = 8;

/// The steps of normalization, in their order.
#[derive(Debug)]
pub(super) struct Normalization(Vec<Step>);

#[derive(Debug)]
enum Step {
    Charsmap(Charsmap),
    Library(NormalizerWrapper),
}

impl Normalizer for Normalization {
    fn normalize(&self, text: &mut NormalizedString) -> tokenizers::Result<()> {
        for step in &self.0 {
            match step {
                Step::Charsmap(map) => map.normalize(text),
                Step::Library(normalizer) => {
                    normalizer.normalize(text)?;
                    anchor(text);
                }
            }
        }
        Ok(())
    }
}

/// Gives what a step put before a text the place of its first character, as `Prepend` does. `Replace` gives it none if its pattern
/// matched no character there, and the next step of the library, or its pre-tokenizer, would then reach beyond the text.
fn anchor(text: &mut NormalizedString) {
    let has_place = |at: usize| {
        let place = text.convert_offsets(Range::Normalized(at..at + 1));
        place.is_none_or(|place| !place.is_empty())
    };
    if text.is_empty() || has_place(0) {
        return;
    }
    let whole = text.get().to_owned();
    let first = (1..whole.len()).find(|&at| has_place(at));
    let parts = first.and_then(|at| Some((whole.get(..at)?, whole.get(at..)?.chars().next()?)));
    let Some((before, next)) = parts else {
        // No character is left of what it was put before.
        *text = NormalizedString::from(whole.as_str());
        return;
    };
    let added = before.chars().enumerate().map(|(index, c)| (c, isize::from(index > 0)));
    let range = Range::Normalized(0..before.len() + next.len_utf8());
    text.transform_range(range, added.chain([(next, 1)]), before.chars().count());
}

impl<'de> Deserialize<'de> for Normalization {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut steps = Vec::new();
        collect(Value::deserialize(deserializer)?, &mut steps, 0)?;
        Ok(Self(steps))
    }
}

fn collect<E: Error>(value: Value, steps: &mut Vec<Step>, depth: usize) -> Result<(), E> {
    match value["type"].as_str() {
        Some("Sequence") if depth >= DEPTH_MAX => {
            return Err(E::custom("sequences of normalizers are nested too deeply"));
        }
        Some("Sequence") => {
            let Value::Object(mut map) = value else { return Ok(()) };
            let Some(Value::Array(list)) = map.remove("normalizers") else {
                return Err(E::missing_field("normalizers"));
            };
            for inner in list {
                collect(inner, steps, depth + 1)?;
            }
        }
        Some("Precompiled") => {
            let Some(text) = value["precompiled_charsmap"].as_str() else {
                return Err(E::missing_field("precompiled_charsmap"));
            };
            let bytes = BASE64_STANDARD.decode(text).map_err(E::custom)?;
            steps.push(Step::Charsmap(Charsmap::parse(&bytes).map_err(E::custom)?));
        }
        _ => steps.push(Step::Library(serde_json::from_value(value).map_err(E::custom)?)),
    }
    Ok(())
}

/// Returns the step of a `tokenizer.json` for a character map.
pub(crate) fn charsmap_json(map: &[u8]) -> Value {
    serde_json::json!({
        "type": "Precompiled", "precompiled_charsmap": BASE64_STANDARD.encode(map),
    })
}
