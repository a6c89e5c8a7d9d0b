//! `tritmill model pull`: a model of the Hugging Face Hub into the cache.

use std::process::ExitCode;

use clap::Args;
use serde_json::{Value, json};
use tritmill_hub::{Pulled, Reference, ReferenceError, Settings};

use crate::{output, pulling};

const EXAMPLES: &str = "\
Examples:
  tritmill model pull microsoft/bitnet-b1.58-2B-4T-gguf
  tritmill model pull microsoft/bitnet-b1.58-2B-4T --revision main --json | jq -r .path
  tritmill model pull ORG/NAME --file model-TQ2_0.gguf
  HF_ENDPOINT=https://hub.internal tritmill model pull ORG/NAME

Of a repository with GGUF files, the ternary one is pulled. If one model has several, that is the one
which runs fastest (I2_S, TQ2_0, PQ2_0, Q2_0, Q2_0_g64, PTQ1_0, TQ1_0, in this order), and a note says
why not the others; --file chooses. Of one with safetensors, config, tokenizer and weights are pulled. Run it again after an interruption: it
goes on where it was. Every file is checked against the hash that the hub states. The cache is the
one of Hugging Face's own tools.

Environment: HF_TOKEN, or the token file of `hf auth login`, for gated repositories; HF_HOME and
HF_HUB_CACHE for the cache; HF_ENDPOINT for a mirror; HF_HUB_OFFLINE=1 to use the cache alone;
HTTPS_PROXY.";

/// Arguments of `model pull`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct Arguments {
    /// Repository
    #[arg(value_name = "ORG/NAME")]
    model: Reference,
    /// GGUF file, of a repository with several
    #[arg(long, value_name = "FILE")]
    file: Option<String>,
    /// Branch, tag or commit [default: main]
    #[arg(long, value_name = "REVISION")]
    revision: Option<String>,
    /// Print JSON, and no progress
    #[arg(long)]
    json: bool,
}

impl Arguments {
    fn reference(&self) -> Result<Reference, ReferenceError> {
        let mut reference = self.model.clone();
        if let Some(revision) = &self.revision {
            reference = reference.at(revision)?;
        }
        match &self.file {
            Some(file) => reference.with_file(file),
            None => Ok(reference),
        }
    }
}

/// Pulls a model and prints where it is.
pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let reference = arguments.reference()?;
    let pulled = pulling::with_progress(&Settings::from_env()?, &reference, !arguments.json)?;
    let command = format!("tritmill batch run in.jsonl -o out.jsonl --model {reference}");
    if arguments.json {
        output::json(summary(&reference, &pulled, &command))?;
    } else {
        output::line(pulled.path.display())?;
        note!("next: {command}");
    }
    Ok(ExitCode::SUCCESS)
}

fn summary(reference: &Reference, pulled: &Pulled, command: &str) -> Value {
    let sizes = pulled.files.iter().filter_map(|file| file.size);
    let files: Vec<Value> = pulled
        .files
        .iter()
        .map(|file| json!({ "name": file.name, "size_bytes": file.size }))
        .collect();
    let passed_over: Vec<Value> = pulled
        .passed_over
        .iter()
        .map(|other| json!({ "name": other.file, "why": other.why.to_string() }))
        .collect();
    json!({
        "path": pulled.path,
        "model": reference.to_string(),
        "repository": reference.repository(),
        "revision": reference.revision(),
        "commit": pulled.commit,
        "files": files,
        "passed_over": passed_over,
        "size_bytes": sizes.sum::<u64>(),
        "downloaded_bytes": pulled.downloaded_bytes,
        "command": command,
    })
}
