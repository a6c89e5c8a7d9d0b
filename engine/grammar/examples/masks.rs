//! Times the masks of an answer: how long it takes to find the tokens that may come next.
//!
//! ```text
//! cargo run --release --package tritmill-grammar --example masks -- VOCABULARY [SCHEMA.json]
//! ```
//!
//! The vocabulary is a file of tiktoken: a token in base64 and its rank on each line. Without a schema, one of 30 fields is used. Answers
//! are random, with texts of ordinary length: a quote is drawn as soon as it may come in one of four cases.

use std::{
    fs, io,
    time::{Duration, Instant},
};

use serde_json::{Value, json};
use tritmill_grammar::{Compiler, Grammar, Word};

/// Answers that are timed.
const ANSWERS: usize = 40;
/// Longest answer in tokens.
const TOKENS_MAX: usize = 2000;

fn main() -> io::Result<()> {
    let mut arguments = std::env::args().skip(1);
    let file = arguments.next().ok_or_else(|| io::Error::other("give a vocabulary"))?;
    let mut words: Vec<Vec<u8>> = Vec::new();
    for line in fs::read_to_string(file)?.lines() {
        let text = line.split(' ').next().unwrap_or_default();
        words.push(decoded(text).ok_or_else(|| io::Error::other("not base64"))?);
    }
    let end = words.len() as u32;
    let schema = match arguments.next() {
        Some(file) => serde_json::from_str(&fs::read_to_string(file)?).map_err(io::Error::other)?,
        None => thirty_fields(),
    };
    let all = words.iter().map(|word| Word::Text(word)).chain([Word::Special]);
    let compiler = Compiler::new(all, &[end]).map_err(io::Error::other)?;
    let began = Instant::now();
    let first = compiler.compile(&Grammar::of_schema(&schema)).map_err(io::Error::other)?;
    println!("{} tokens; compiled in {:?}", words.len(), began.elapsed());
    let mut random = fastrand::Rng::with_seed(1);
    let mut times: Vec<(Duration, usize)> = Vec::new();
    for _ in 0..ANSWERS {
        let mut constraint = first.clone();
        for _ in 0..TOKENS_MAX {
            if constraint.has_ended() {
                break;
            }
            let allowed: Vec<u32> = tokens(constraint.allowed()).collect();
            let quotes = allowed.iter().filter(|token| {
                words.get(**token as usize).is_some_and(|word| word.starts_with(b"\""))
            });
            let quotes: Vec<u32> = quotes.copied().collect();
            let from = if !quotes.is_empty() && random.u8(..4) == 0 { &quotes } else { &allowed };
            let token = from[random.usize(..from.len())];
            if token == end {
                break;
            }
            let began = Instant::now();
            constraint.advance(token).map_err(io::Error::other)?;
            constraint.find_allowed().map_err(io::Error::other)?;
            times.push((began.elapsed(), allowed.len()));
        }
    }
    report(&mut times);
    Ok(())
}

fn report(times: &mut [(Duration, usize)]) {
    times.sort_unstable();
    let total: Duration = times.iter().map(|(time, _)| *time).sum();
    let rate = times.len() as f64 / total.as_secs_f64();
    println!("{} masks in {total:?}: {rate:.0} a second on one thread", times.len());
    for percent in [10, 50, 90, 99] {
        let (time, _) = times[(times.len() - 1) * percent / 100];
        println!("{percent:>3} % within {time:?}");
    }
}

/// Returns a schema of 30 fields of the usual kinds.
fn thirty_fields() -> Value {
    let kinds = [
        json!({ "type": "string" }),
        json!({ "type": "integer" }),
        json!({ "type": "boolean" }),
        json!({ "type": "number" }),
        json!({ "enum": ["low", "medium", "high"] }),
        json!({ "type": "array", "items": { "type": "string" }, "maxItems": 3 }),
    ];
    let fields =
        (0..30).map(|number| (format!("field_{number}"), kinds[number % kinds.len()].clone()));
    let fields: serde_json::Map<String, Value> = fields.collect();
    let required: Vec<&String> = fields.keys().collect();
    json!({ "type": "object", "required": required, "additionalProperties": false, "properties": fields })
}

/// Returns the tokens of a mask.
fn tokens(mask: &[u32]) -> impl Iterator<Item = u32> {
    (0..).zip(mask).flat_map(|(index, word): (u32, &u32)| {
        let word = *word;
        (0..u32::BITS)
            .filter(move |bit| word >> bit & 1 == 1)
            .map(move |bit| index * u32::BITS + bit)
    })
}

/// Decodes base64.
fn decoded(text: &str) -> Option<Vec<u8>> {
    let mut bytes = Vec::with_capacity(text.len() * 3 / 4);
    let (mut bits, mut count) = (0u32, 0);
    for letter in text.bytes().filter(|letter| *letter != b'=') {
        let value = match letter {
            b'A'..=b'Z' => letter - b'A',
            b'a'..=b'z' => letter - b'a' + 26,
            b'0'..=b'9' => letter - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            _ => return None,
        };
        bits = bits << 6 | u32::from(value);
        count += 6;
        if count >= 8 {
            count -= 8;
            bytes.push((bits >> count) as u8);
        }
    }
    Some(bytes)
}
