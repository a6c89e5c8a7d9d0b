//! `tritmill model`: everything about one model file.

mod convert;
mod generate;
mod inspect;
mod logits;
mod synth;

use std::process::ExitCode;

use clap::Subcommand;

/// The commands about models.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Show what is in a model: shape, tensors, fingerprint
    Inspect(inspect::Arguments),
    /// Compute the logits of a token sequence
    Logits(logits::Arguments),
    /// Continue one prompt
    Generate(generate::Arguments),
    /// Make a model with random weights in a real model's shape, for measuring
    Synth(synth::Arguments),
    /// Write a model in another container
    Convert(convert::Arguments),
}

/// Runs one of them.
pub fn run(command: Command) -> anyhow::Result<ExitCode> {
    match command {
        Command::Inspect(arguments) => inspect::run(&arguments),
        Command::Logits(arguments) => logits::run(&arguments),
        Command::Generate(arguments) => generate::run(arguments),
        Command::Synth(arguments) => synth::run(&arguments),
        Command::Convert(arguments) => convert::run(&arguments),
    }
}
