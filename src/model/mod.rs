//! `tritmill model`: commands that get a model, and commands on one.

mod convert;
mod embed;
mod generate;
mod inspect;
mod list;
mod logits;
mod prompt;
mod pull;
mod synth;

use std::process::ExitCode;

use clap::Subcommand;

/// Commands on models.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// List published models that this build can load
    List(list::Arguments),
    /// Download a model of the Hugging Face Hub
    Pull(pull::Arguments),
    /// Show the shape, tensors and fingerprint of a model
    Inspect(inspect::Arguments),
    /// Compute the logits of a token sequence
    Logits(logits::Arguments),
    /// Turn texts into vectors, with an embedding model
    Embed(embed::Arguments),
    /// Show the prompt that a conversation becomes: its text and tokens
    Prompt(prompt::Arguments),
    /// Generate an answer to one prompt
    Generate(Box<generate::Arguments>),
    /// Write a model with random weights in the shape of a real model, for benchmarks
    Synth(synth::Arguments),
    /// Write a model in another container
    Convert(convert::Arguments),
}

/// Runs a command.
pub fn run(command: Command) -> anyhow::Result<ExitCode> {
    match command {
        Command::List(arguments) => list::run(&arguments),
        Command::Pull(arguments) => pull::run(&arguments),
        Command::Inspect(arguments) => inspect::run(&arguments),
        Command::Logits(arguments) => logits::run(&arguments),
        Command::Embed(arguments) => embed::run(&arguments),
        Command::Prompt(arguments) => prompt::run(&arguments),
        Command::Generate(arguments) => generate::run(*arguments),
        Command::Synth(arguments) => synth::run(&arguments),
        Command::Convert(arguments) => convert::run(&arguments),
    }
}
