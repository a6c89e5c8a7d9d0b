//! `tritmill bench`: how fast this machine is.

mod e2e;
mod engine;
mod kernels;
mod queue;
mod tuning;

use std::process::ExitCode;

use clap::Subcommand;

/// What can be measured.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Steps of a model: prefill and decode at several batch sizes
    Engine(engine::Arguments),
    /// Each kernel of a GPU's steps, beside what the device can do at most
    Kernels(kernels::Arguments),
    /// Steps of a model on a GPU with other values of the constants that choose its kernels
    Tuning(tuning::Arguments),
    /// The way of a job through Redis and Postgres, without a model
    Queue(queue::Arguments),
    /// A model through the queue, beside the same engine alone
    E2e(e2e::Arguments),
}

/// Runs one of them.
pub fn run(command: Command) -> anyhow::Result<ExitCode> {
    match command {
        Command::Engine(arguments) => engine::run(&arguments),
        Command::Kernels(arguments) => kernels::run(&arguments),
        Command::Tuning(arguments) => tuning::run(&arguments),
        Command::Queue(arguments) => queue::run(&arguments),
        Command::E2e(arguments) => e2e::run(&arguments),
    }
}
