//! `tritmill bench`: benchmarks of this machine.

mod drafts;
mod e2e;
mod engine;
mod fleet;
mod fork;
mod gpu;
mod kernels;
mod kv;
mod prefixes;
mod queue;
mod sampling;
mod tuning;

use std::process::ExitCode;

use clap::Subcommand;

/// Benchmarks.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Measure the engine: prefill and decode at several batch sizes
    Engine(engine::Arguments),
    /// Compare each kernel of a GPU's steps with the device's maximum
    Kernels(kernels::Arguments),
    /// Compare values of the constants that choose the kernels of a GPU's steps
    Tuning(tuning::Arguments),
    /// Compare long prompts that are computed with the same ones read from disk
    Kv(kv::Arguments),
    /// Compare jobs that share system prompts: in the order of their prompts with KV blocks on disk, and without both
    Prefixes(prefixes::Arguments),
    /// Measure forks of an engine and of its requests: time and memory
    Fork(fork::Arguments),
    /// Compare sampling with greedy decoding, by its parameters
    Sampling(sampling::Arguments),
    /// Compare decoding with and without drafts, by the kind of text
    Drafts(drafts::Arguments),
    /// Measure jobs through Redis and Postgres, without a model
    Queue(queue::Arguments),
    /// Measure a fleet of workers without a model: its idle cost, and how soon its jobs start
    Fleet(fleet::Arguments),
    /// Compare a model behind the queue with the same engine alone
    E2e(e2e::Arguments),
}

/// Runs a command.
pub fn run(command: Command) -> anyhow::Result<ExitCode> {
    match command {
        Command::Engine(arguments) => engine::run(&arguments),
        Command::Kernels(arguments) => kernels::run(&arguments),
        Command::Tuning(arguments) => tuning::run(&arguments),
        Command::Kv(arguments) => kv::run(&arguments),
        Command::Prefixes(arguments) => prefixes::run(&arguments),
        Command::Fork(arguments) => fork::run(&arguments),
        Command::Sampling(arguments) => sampling::run(&arguments),
        Command::Drafts(arguments) => drafts::run(&arguments),
        Command::Queue(arguments) => queue::run(&arguments),
        Command::Fleet(arguments) => fleet::run(&arguments),
        Command::E2e(arguments) => e2e::run(&arguments),
    }
}
