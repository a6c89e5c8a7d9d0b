//! `tritmill model`: commands on one model file.

mod convert;
mod generate;
mod inspect;
mod logits;
mod synth;

use std::process::ExitCode;

use clap::Subcommand;

/// Commands on models.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Show the shape, tensors and fingerprint of a model
    Inspect(inspect::Arguments),
    /// Compute the logits of a token sequence
    Logits(logits::Arguments),
    /// Generate an answer to one prompt
    Generate(generate::Arguments),
    /// Write a model with random weights in the shape of a real model, for benchmarks
    Synth(synth::Arguments),
    /// Write a model in another container
    Convert(convert::Arguments),
}

/// Runs a command.
pub fn run(command: Command) -> anyhow::Result<ExitCode> {
    match command {
        Command::Inspect(arguments) => inspect::run(&arguments),
        Command::Logits(arguments) => logits::run(&arguments),
        Command::Generate(arguments) => generate::run(arguments),
        Command::Synth(arguments) => synth::run(&arguments),
        Command::Convert(arguments) => convert::run(&arguments),
    }
}
