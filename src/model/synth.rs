//! `tritmill model synth`: a model with random weights and the costs of a real one.

use std::{num::NonZeroUsize, path::PathBuf, process::ExitCode};

use anyhow::Context as _;
use clap::{Args, builder::PossibleValuesParser};
use serde_json::json;
use tritmill_engine::files;

use crate::{options::up_to, output};

const EXAMPLES: &str = "\
Examples:
  tritmill model synth --shape bitnet-2b -o /tmp/bitnet-2b
  tritmill bench engine --model /tmp/bitnet-2b
  tritmill model synth --shape bonsai-1.7b -o /tmp/bonsai-1.7b.gguf

The same shape and seed always give the same weights.";

/// Arguments of `model synth`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct Arguments {
    /// Real model to copy the shapes of
    #[arg(long, value_name = "NAME", value_parser = PossibleValuesParser::new(files::shape_names()))]
    shape: String,
    /// Folder to write; a .gguf file for bonsai, bitcpm, maple and embedding shapes
    #[arg(short, long, alias = "out", value_name = "PATH")]
    output: PathBuf,
    /// Transformer layers [default: as many as the real model has]
    #[arg(long, value_name = "N", value_parser = up_to::<4096>)]
    layers: Option<NonZeroUsize>,
    /// Seed of the random weights
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Writes a model and prints a summary.
pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let mut shape = files::shape(&arguments.shape).context("the parser allows known names only")?;
    if let Some(layers) = arguments.layers {
        shape.set_layer_count(layers.get());
    }
    let out = arguments.output.display();
    files::synth(&shape, &arguments.output, arguments.seed)
        .with_context(|| format!("cannot write {out}"))?;
    if arguments.json {
        output::json(json!({
            "path": arguments.output,
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
