//! `tritmill model convert`: writes a model in another container.

use std::{path::PathBuf, process::ExitCode};

use anyhow::Context as _;
use clap::{
    Args,
    builder::{PossibleValuesParser, TypedValueParser},
};
use serde_json::json;
use tritmill_engine::files::{self, Target};

use crate::{options::ModelOption, output};

const EXAMPLES: &str = "\
Examples:
  tritmill model convert --model ./bitnet-2b --to gguf-i2_s -o bitnet-2b.gguf
  tritmill model convert --model bitnet-2b.gguf --to hf -o ./bitnet-2b

Fails, with the name of the tensor or file, if the target cannot hold it exactly: I2_S has one scale for a tensor, TQ2_0 one
for 256 inputs, and llama.cpp's SentencePiece vocabularies (bytes in BPE, none in Unigram) put a space after special
tokens, too.";

/// Arguments of `model convert`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct Arguments {
    #[command(flatten)]
    model: ModelOption,
    /// Container to write: a GGUF file with types of bitnet.cpp (I2_S) or llama.cpp (TQ2_0), or a
    /// Hugging Face folder; for models with a scale for each group of inputs, a GGUF file with groups of 64 (Q2_0),
    /// 128 (PQ2_0, and PTQ1_0 with 1.75 bits a weight) or 256 (TQ2_0)
    #[arg(long, value_name = "CONTAINER", value_parser = target())]
    to: Target,
    /// File or folder to write
    #[arg(short, long, alias = "out", value_name = "PATH")]
    output: PathBuf,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

fn target() -> impl TypedValueParser<Value = Target> {
    let names = PossibleValuesParser::new([
        "gguf-i2_s",
        "gguf-tq2_0",
        "gguf-q2_0",
        "gguf-pq2_0",
        "gguf-ptq1_0",
        "hf",
    ]);
    names.map(|name| match name.as_str() {
        "gguf-i2_s" => Target::GgufI2S,
        "gguf-tq2_0" => Target::GgufTq2_0,
        "gguf-q2_0" => Target::GgufQ2_0,
        "gguf-pq2_0" => Target::GgufPq2_0,
        "gguf-ptq1_0" => Target::GgufPtq1_0,
        _ => Target::Folder,
    })
}

/// Converts a model and prints a summary.
pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let model = arguments.model.open()?;
    let out = arguments.output.display();
    let report = files::convert(&model, arguments.to, &arguments.output)
        .with_context(|| format!("cannot convert {} to {out}", arguments.model.model))?;
    let (tensors, inexact) = (report.tensor_count, report.inexact_scale_count);
    if arguments.json {
        output::json(json!({
            "path": arguments.output,
            "tensors": tensors,
            "inexact_scales": inexact,
        }))?;
        return Ok(ExitCode::SUCCESS);
    }
    output::line(format_args!("wrote {out}: {tensors} tensors"))?;
    if inexact > 0 {
        output::line(format_args!(
            "{inexact} scales were rounded to the precision of the target: answers may differ slightly"
        ))?;
    }
    Ok(ExitCode::SUCCESS)
}
