//! `tritmill model embed`: the vectors of texts.

use std::{fs, path::PathBuf, process::ExitCode};

use anyhow::Context as _;
use clap::Args;
use serde_json::json;
use tritmill_engine::{embed, load};

use crate::{
    options::{ModelOption, RunOptions},
    output,
};

const EXAMPLES: &str = "\
Examples:
  tritmill model embed --model bitnet-embedding.gguf --text 'query: rivers in France' --json
  tritmill model embed --model bitnet-embedding.gguf --text one --text two -o vectors.f32
  tritmill model embed --model bitnet-embedding.gguf --tokens 1986,151643 -o vector.f32

The end token is appended to a --text, and not to --tokens. FILE has little-endian f32 values, one vector of length 1 after
the other.";

/// Elements of a vector to show.
const SHOWN: usize = 4;

/// Arguments of `model embed`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct Arguments {
    #[command(flatten)]
    model: ModelOption,
    /// Text; may be repeated
    #[arg(long, value_name = "TEXT", required_unless_present = "tokens")]
    text: Vec<String>,
    /// Token ids of one text, separated by commas
    #[arg(long, value_name = "IDS", value_delimiter = ',', conflicts_with = "text")]
    tokens: Vec<u32>,
    /// File for the vectors
    #[arg(short, long, alias = "out", value_name = "FILE")]
    output: Option<PathBuf>,
    /// Print the vectors as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    run: RunOptions,
}

/// Computes and prints vectors.
pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let model = arguments.model.open()?;
    let texts = match arguments.text.is_empty() {
        true => vec![arguments.tokens.clone()],
        false => {
            let tokens = arguments.text.iter().map(|text| embed::tokens(&model, text));
            tokens.collect::<Result<_, _>>().context("a text cannot be tokenized")?
        }
    };
    let mut engine = load::engine(&model, &arguments.run.engine_on_one()?)?;
    let vectors = embed::vectors(&mut engine, &texts)?;
    if let Some(path) = &arguments.output {
        let bytes: Vec<u8> = vectors.iter().flatten().flat_map(|x| x.to_le_bytes()).collect();
        fs::write(path, bytes).with_context(|| format!("cannot write {}", path.display()))?;
    }
    let tokens: Vec<usize> = texts.iter().map(Vec::len).collect();
    if arguments.json {
        let dimensions = model.config().hidden_size;
        let vectors = json!({ "dimensions": dimensions, "tokens": tokens, "vectors": vectors });
        output::json(vectors)?;
        return Ok(ExitCode::SUCCESS);
    }
    for (vector, tokens) in vectors.iter().zip(tokens) {
        let first: Vec<String> = vector.iter().take(SHOWN).map(|x| format!("{x:.5}")).collect();
        let (dimensions, first) = (vector.len(), first.join(", "));
        output::line(format_args!("{tokens} tokens, {dimensions} dimensions: {first}, …"))?;
    }
    Ok(ExitCode::SUCCESS)
}
