//! `tritmill model convert`: the same weights in another container.

use std::{path::PathBuf, process::ExitCode};

use anyhow::Context as _;
use clap::{
    Args,
    builder::{PossibleValuesParser, TypedValueParser},
};
use serde_json::json;
use tritmill_engine::files::{self, Target};

use crate::{options, output};

const EXAMPLES: &str = "\
Examples:
  tritmill model convert ./bitnet-2b --to gguf-i2_s --out bitnet-2b.gguf
  tritmill model convert bitnet-2b.gguf --to hf --out ./bitnet-2b

A tensor that the target cannot hold is refused by its name.";

/// Arguments of `model convert`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct Arguments {
    /// A Hugging Face folder, or a .gguf file
    #[arg(value_name = "IN")]
    model: String,
    /// What to write: a GGUF file of bitnet.cpp's or llama.cpp's type, or a Hugging Face folder
    #[arg(long, value_name = "CONTAINER", value_parser = target())]
    to: Target,
    /// File or folder to write
    #[arg(long, value_name = "PATH")]
    out: PathBuf,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

fn target() -> impl TypedValueParser<Value = Target> {
    let names = PossibleValuesParser::new(["gguf-i2_s", "gguf-tq2_0", "hf"]);
    names.map(|name| match name.as_str() {
        "gguf-i2_s" => Target::GgufI2S,
        "gguf-tq2_0" => Target::GgufTq2_0,
        _ => Target::Folder,
    })
}

/// Converts and prints.
pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let model = options::open(&arguments.model)?;
    let out = arguments.out.display();
    let report = files::convert(&model, arguments.to, &arguments.out)
        .with_context(|| format!("cannot convert {} to {out}", arguments.model))?;
    let (tensors, inexact) = (report.tensor_count, report.inexact_scale_count);
    if arguments.json {
        output::line(json!({
            "path": arguments.out,
            "tensors": tensors,
            "inexact_scales": inexact,
        }))?;
        return Ok(ExitCode::SUCCESS);
    }
    output::line(format_args!("wrote {out}: {tensors} tensors"))?;
    if inexact > 0 {
        output::line(format_args!(
            "{inexact} scales are rounded to what the target holds: answers may differ slightly"
        ))?;
    }
    Ok(ExitCode::SUCCESS)
}
