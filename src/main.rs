//! The `tritmill` command line: one file per command, which parses its arguments, calls the crates
//! that do the work and prints what they return.
//!
//! Results go to standard output, everything else to standard error. Exit codes: 0 it worked,
//! 1 it could not (one line says why), and those that a command's help names.

mod admin;
mod answering;
mod batch_run;
mod bench;
mod demo;
mod demo_model;
mod doctor;
mod engines;
mod jobs;
mod keys;
mod migrate;
mod model;
mod operate;
mod options;
mod output;
mod servers;
mod settings;
mod signals;
mod standalone;
mod submit;
mod worker;

use std::process::ExitCode;

use clap::{CommandFactory as _, FromArgMatches as _, Parser, Subcommand};

/// Batch text generation on ternary (BitNet b1.58) language models.
#[derive(Debug, Parser)]
#[command(name = "tritmill", version, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Answer 1000 lines with the built-in model: shows that everything works, and how fast
    Demo(demo::Arguments),
    /// Answer files of requests
    #[command(subcommand)]
    Batch(Batch),
    /// Answer the jobs of a queue
    Worker(Box<worker::Arguments>),
    /// Serve the OpenAI-compatible API
    Admin(Box<admin::Arguments>),
    /// Make, list and revoke API keys
    #[command(subcommand)]
    Keys(keys::Command),
    /// Serve the API and answer its requests, in one process, with servers or without
    Standalone(Box<standalone::Arguments>),
    /// Bring the database's tables up to date
    Migrate(migrate::Arguments),
    /// Put jobs into a queue
    Submit(submit::Arguments),
    /// Wait for jobs and print them
    Watch(jobs::WatchArguments),
    /// Print jobs as they are now
    Results(jobs::JobArguments),
    /// Withdraw jobs
    Cancel(jobs::JobArguments),
    /// List, pause, resume and bound queues
    #[command(subcommand)]
    Queue(operate::QueueCommand),
    /// List workers, ask them to drain
    #[command(subcommand)]
    Workers(operate::WorkersCommand),
    /// Look at jobs that failed for good, replay or delete them
    #[command(subcommand)]
    Dlq(operate::DlqCommand),
    /// Look into models, run them once, make and convert them
    #[command(subcommand)]
    Model(model::Command),
    /// Measure speed on this machine
    #[command(subcommand)]
    Bench(bench::Command),
    /// Say what this machine has, what is missing and how to get it
    Doctor(doctor::Arguments),
}

#[derive(Debug, Subcommand)]
enum Batch {
    Run(Box<batch_run::BatchRunArgs>),
}

fn main() -> ExitCode {
    let mut command = match settings::apply(Cli::command()) {
        Ok(command) => command,
        Err(error) => {
            eprintln!("error: {}", output::one_line(&error));
            return ExitCode::FAILURE;
        }
    };
    let parsed = command
        .try_get_matches_from_mut(std::env::args_os())
        .and_then(|matches| Cli::from_arg_matches(&matches))
        .map_err(|error| error.format(&mut command));
    let cli = match parsed {
        Ok(cli) => cli,
        Err(error) => {
            // Printing fails only when nobody listens.
            let _ = error.print();
            return ExitCode::from(u8::from(error.use_stderr()));
        }
    };
    output::start_log();
    let result = match cli.command {
        Command::Demo(arguments) => demo::run(&arguments),
        Command::Batch(Batch::Run(arguments)) => batch_run::run(*arguments),
        Command::Worker(arguments) => worker::run(*arguments),
        Command::Admin(arguments) => admin::run(*arguments),
        Command::Keys(command) => keys::run(command),
        Command::Standalone(arguments) => standalone::run(*arguments),
        Command::Migrate(arguments) => migrate::run(&arguments),
        Command::Submit(arguments) => submit::run(&arguments),
        Command::Watch(arguments) => jobs::watch(&arguments),
        Command::Results(arguments) => jobs::results(&arguments),
        Command::Cancel(arguments) => jobs::cancel(&arguments),
        Command::Queue(command) => operate::queue(command),
        Command::Workers(command) => operate::workers(command),
        Command::Dlq(command) => operate::dlq(command),
        Command::Model(command) => model::run(command),
        Command::Bench(command) => bench::run(command),
        Command::Doctor(arguments) => doctor::run(&arguments),
    };
    match result {
        Ok(code) => code,
        Err(error) if output::is_closed_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {}", output::one_line(&error));
            ExitCode::FAILURE
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_command_is_well_formed() {
        settings::apply(Cli::command()).expect("no file is here").debug_assert();
    }
}
