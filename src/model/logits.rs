//! `tritmill model logits`: logits, for comparison with another implementation.

use std::{
    fs::File,
    io::{BufWriter, Write as _},
    path::PathBuf,
    process::ExitCode,
};

use anyhow::{Context as _, ensure};
use clap::Args;
use serde_json::json;
use tritmill_engine::{kv::blocks_for, load, logits};

use crate::{
    options::{ModelOption, RunOptions},
    output,
};

const EXAMPLES: &str = "\
Examples:
  tritmill model logits --model ./bitnet-2b --tokens 128000,791,6864 --top 5
  tritmill model logits --model model.gguf --tokens 1,2,3 --kv f32 -o logits.f32 --json

FILE has little-endian f32 values, one row of the vocabulary for each position.";

/// Arguments of `model logits`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct Arguments {
    #[command(flatten)]
    model: ModelOption,
    /// Token ids, separated by commas
    #[arg(long, value_name = "IDS", value_delimiter = ',', required = true)]
    tokens: Vec<u32>,
    /// Number of largest logits of the last position to print
    #[arg(long, value_name = "K", default_value_t = 10)]
    top: usize,
    /// File for the logits of every position
    #[arg(short, long, alias = "out", value_name = "FILE")]
    output: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    run: RunOptions,
}

/// Computes and prints logits.
pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let model = arguments.model.open()?;
    let (positions, limit) = (arguments.tokens.len(), model.config().context_length);
    ensure!(positions <= limit, "{positions} tokens are more than the model's context of {limit}");
    let mut backend =
        load::backend(&model, &arguments.run.engine_on_one()?, blocks_for(positions))?;
    let vocab = backend.vocab_size();
    let path = arguments.output.clone().unwrap_or_default();
    let failed = || format!("cannot write {}", path.display());
    let create = |path: &PathBuf| File::create(path).map(BufWriter::new).with_context(failed);
    let mut file = arguments.output.as_ref().map(create).transpose()?;
    let mut last = Vec::new();
    logits::each_position(backend.as_mut(), &arguments.tokens, |logits| {
        last = logits[logits.len() - vocab..].to_vec();
        let Some(file) = &mut file else { return Ok(()) };
        for logit in logits {
            file.write_all(&logit.to_le_bytes()).with_context(failed)?;
        }
        anyhow::Ok(())
    })?;
    if let Some(mut file) = file {
        file.flush().with_context(failed)?;
    }
    let top = logits::top(&last, arguments.top);
    if arguments.json {
        let top: Vec<_> =
            top.iter().map(|token| json!({ "id": token.id, "logit": token.logit })).collect();
        output::json(json!({ "positions": positions, "vocab": vocab, "top": top }))?;
    } else {
        output::line(format_args!("{positions} positions, vocabulary of {vocab}; at the last:"))?;
        for token in top {
            let bytes = model.tokenizer().token_bytes(token.id).unwrap_or_default();
            let text = String::from_utf8_lossy(bytes);
            output::line(format_args!("{:>8}  {:>12.5}  {text:?}", token.id, token.logit))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}
