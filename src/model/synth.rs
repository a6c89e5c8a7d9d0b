//! `tritmill model synth`: a model that knows nothing but costs what a real one costs.

use std::{path::PathBuf, process::ExitCode};

use anyhow::Context as _;
use clap::{Args, builder::PossibleValuesParser};
use serde_json::json;
use tritmill_engine::files;

use crate::output;

const EXAMPLES: &str = "\
Examples:
  tritmill model synth --shape bitnet-2b --out /tmp/bitnet-2b
  tritmill bench engine --model /tmp/bitnet-2b

The same shape and seed always give the same weights.";

/// Arguments of `model synth`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct Arguments {
    /// Model whose shapes to take
    #[arg(long, value_name = "NAME", value_parser = PossibleValuesParser::new(files::shape_names()))]
    shape: String,
    /// Folder to make
    #[arg(long, value_name = "PATH")]
    out: PathBuf,
    /// Transformer layers [default: as many as the real model has]
    #[arg(long, value_name = "N")]
    layers: Option<usize>,
    /// Key of the random weights
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Makes and prints.
pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let mut shape = files::shape(&arguments.shape).context("the parser allows known names only")?;
    shape.layer_count = arguments.layers.unwrap_or(shape.layer_count);
    let out = arguments.out.display();
    files::synth(&shape, &arguments.out, arguments.seed)
        .with_context(|| format!("cannot make {out}"))?;
    if arguments.json {
        output::line(json!({
            "path": arguments.out,
            "shape": arguments.shape,
            "layer_count": shape.layer_count,
            "seed": arguments.seed,
        }))?;
    } else {
        let (name, layers) = (&arguments.shape, shape.layer_count);
        output::line(format_args!("wrote {out}: {name} with {layers} layers and random weights"))?;
    }
    Ok(ExitCode::SUCCESS)
}
