//! Writes instances of JSON schemas, drawn at random among the allowed tokens, for another program to judge:
//!
//! ```text
//! cargo run --release --package tritmill-grammar --example walks -- FOLDER… | python3 engine/grammar/examples/validate.py
//! ```
//!
//! Reads every `*.json` below the folders: a schema, a list of objects with a `schema` (as in the JSON Schema Test Suite), or an object with
//! a `json_schema`. Writes a line of JSON for each schema: `refused`, or `instances`.

use std::{
    fs,
    io::{self, Write as _},
    path::{Path, PathBuf},
};

use serde_json::{Value, json};
use tritmill_grammar::{Compiler, Constraint, Grammar, Word};

/// The end of an answer; the tokens before it are the bytes.
const END: u32 = 256;
/// Instances of a schema.
const INSTANCES: usize = 8;
/// Longest instance in bytes.
const BYTES_MAX: usize = 4000;

fn main() -> io::Result<()> {
    let mut files = Vec::new();
    for folder in std::env::args().skip(1) {
        list(Path::new(&folder), &mut files)?;
    }
    files.sort();
    let bytes: Vec<[u8; 1]> = (0..=255).map(|byte| [byte]).collect();
    let words = bytes.iter().map(|byte| Word::Text(byte)).chain([Word::Special]);
    let compiler = Compiler::new(words, &[END]).map_err(io::Error::other)?;
    let (mut random, mut out) = (fastrand::Rng::with_seed(1), io::stdout().lock());
    for file in files {
        let Ok(value) = serde_json::from_str::<Value>(&fs::read_to_string(&file)?) else {
            continue;
        };
        for schema in schemas(value) {
            let (file, grammar) = (file.display().to_string(), Grammar::of_schema(&schema));
            let line = match grammar.check() {
                Err(error) => {
                    json!({ "file": file, "schema": schema, "refused": error.to_string() })
                }
                Ok(()) => {
                    let walks = (0..INSTANCES).map(|_| walk(&compiler, &grammar, &mut random));
                    let walks: Vec<Value> = walks.collect();
                    json!({ "file": file, "schema": schema, "instances": walks })
                }
            };
            writeln!(out, "{line}")?;
        }
    }
    Ok(())
}

fn list(folder: &Path, files: &mut Vec<PathBuf>) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            list(&path, files)?;
        } else if path.extension().is_some_and(|extension| extension == "json") {
            files.push(path);
        }
    }
    Ok(())
}

fn schemas(value: Value) -> Vec<Value> {
    match value {
        Value::Array(items) => {
            items.into_iter().filter_map(|item| item.get("schema").cloned()).collect()
        }
        Value::Object(mut object) if object.contains_key("json_schema") => {
            object.remove("json_schema").into_iter().collect()
        }
        schema => vec![schema],
    }
}

/// Draws an instance; what ends a part is as likely as everything else together. An error or an instance that is too long is an
/// object of its own.
fn walk(compiler: &Compiler, grammar: &Grammar, random: &mut fastrand::Rng) -> Value {
    let (mut text, mut next) = (Vec::new(), compiler.compile(grammar));
    loop {
        let mut constraint = match next {
            Ok(constraint) => constraint,
            Err(error) => return json!({ "error": error.to_string() }),
        };
        if constraint.has_ended() {
            break;
        }
        if text.len() > BYTES_MAX {
            return json!({ "long": text.len() });
        }
        let token = choose(&constraint, random);
        if token == END {
            break;
        }
        text.push(token as u8);
        next =
            constraint.advance(token).and_then(|()| constraint.find_allowed()).map(|()| constraint);
    }
    json!({ "text": String::from_utf8_lossy(&text) })
}

fn choose(constraint: &Constraint, random: &mut fastrand::Rng) -> u32 {
    let is_allowed =
        |token: &u32| constraint.allowed()[*token as usize / 32] >> (token % 32) & 1 == 1;
    let all: Vec<u32> = (0..=END).filter(is_allowed).collect();
    let ends = |token: &u32| *token == END || b"\"]}".contains(&(*token as u8));
    let closing: Vec<u32> = all.iter().copied().filter(ends).collect();
    let from = if !closing.is_empty() && random.bool() { &closing } else { &all };
    from[random.usize(..from.len())]
}
