//! `tritmill model`: everything about one model file.

mod generate;
mod inspect;
mod logits;

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
}

/// Runs one of them.
pub fn run(command: Command) -> anyhow::Result<ExitCode> {
    match command {
        Command::Inspect(arguments) => inspect::run(&arguments),
        Command::Logits(arguments) => logits::run(&arguments),
        Command::Generate(arguments) => generate::run(arguments),
    }
}
