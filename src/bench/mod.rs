//! `tritmill bench`: how fast this machine is.

mod engine;

use std::process::ExitCode;

use clap::Subcommand;

/// What can be measured.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Steps of a model: prefill and decode at several batch sizes
    Engine(engine::Arguments),
}

/// Runs one of them.
pub fn run(command: Command) -> anyhow::Result<ExitCode> {
    match command {
        Command::Engine(arguments) => engine::run(&arguments),
    }
}
