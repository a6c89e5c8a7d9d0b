//! The `tritmill` command line: one file per command, which parses its arguments, calls the crates
//! that do the work and prints the results.
//!
//! Results go to standard output, everything else to standard error. Exit codes: 0 success, 1 failure
//! (with one line of error message), and others that the help of a command names.

#![warn(clippy::print_stderr, reason = "it panics if standard error is closed: use `note`")]

#[macro_use]
mod output;

mod admin;
mod answering;
mod batch_run;
mod bench;
mod byte_sizes;
mod costs;
mod demo;
mod demo_model;
#[cfg(test)]
mod deployments;
mod descriptors;
mod doctor;
mod engines;
mod jobs;
mod keys;
mod kv;
mod kv_tiers;
mod mail;
mod memory;
mod migrate;
mod model;
mod operate;
mod options;
mod pulling;
mod servers;
mod settings;
mod sign_on;
mod signals;
mod standalone;
mod submit;
mod tenants;
mod traces;
mod units;
mod worker;

use std::process::ExitCode;

use anyhow::Context as _;
use clap::{CommandFactory as _, FromArgMatches as _, Parser, Subcommand};

use self::traces::Traces;

/// Batch text generation on ternary (BitNet b1.58) language models.
#[derive(Debug, Parser)]
#[command(name = "tritmill", version, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Answer 1000 lines with the built-in model, to check and time the installation
    Demo(demo::Arguments),
    /// Answer files of requests
    #[command(subcommand)]
    Batch(Batch),
    /// Run a worker that answers the jobs of a queue
    Worker(Box<worker::Arguments>),
    /// Serve the OpenAI-compatible API
    Admin(Box<admin::Arguments>),
    /// Create, list and revoke API keys
    #[command(subcommand)]
    Keys(keys::Command),
    /// Set prices and budgets, and sum what answers cost
    #[command(subcommand)]
    Costs(costs::Command),
    /// Limit what tenants may have
    #[command(subcommand)]
    Tenants(tenants::Command),
    /// Run API and worker in one process, with Redis and Postgres or without
    Standalone(Box<standalone::Arguments>),
    /// Create or update the tables of the database
    Migrate(migrate::Arguments),
    /// Submit jobs to a queue
    Submit(submit::Arguments),
    /// Wait for jobs and print them
    Watch(jobs::WatchArguments),
    /// Print the states and results of jobs
    #[command(after_help = jobs::RESULTS_HELP)]
    Results(jobs::JobArguments),
    /// Cancel jobs
    #[command(after_help = jobs::CANCEL_HELP)]
    Cancel(jobs::JobArguments),
    /// List, pause, resume and limit queues
    #[command(subcommand)]
    Queue(operate::QueueCommand),
    /// List workers and drain them
    #[command(subcommand)]
    Workers(operate::workers::WorkersCommand),
    /// Create, list, pause, retry, read and delete batches of the HTTP API, of all tenants
    #[command(subcommand)]
    Batches(operate::batches::BatchesCommand),
    /// List dead letters (jobs that failed permanently), replay or delete them
    #[command(subcommand)]
    Dlq(operate::DlqCommand),
    /// Get, inspect, run, create and convert models
    #[command(subcommand)]
    Model(model::Command),
    /// Inspect, prune and verify KV blocks on disk
    #[command(subcommand)]
    Kv(kv::Command),
    /// Benchmark this machine
    #[command(subcommand)]
    Bench(bench::Command),
    /// Check what this machine has and what is missing
    Doctor(doctor::Arguments),
}

impl Command {
    /// Whether it runs until it is stopped.
    fn is_service(&self) -> bool {
        matches!(self, Self::Worker(_) | Self::Admin(_) | Self::Standalone(_))
    }
}

#[derive(Debug, Subcommand)]
enum Batch {
    Run(Box<batch_run::BatchRunArgs>),
}

/// Runs a future on a new runtime.
fn block_on<T>(work: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    tokio::runtime::Runtime::new().context("cannot start the async runtime")?.block_on(work)
}

fn main() -> ExitCode {
    let mut command = match settings::apply(Cli::command()) {
        Ok(command) => command,
        Err(error) => {
            note!("error: {}", output::one_line(&error));
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
            // Printing fails only if the output is closed.
            let _ = error.print();
            if let Some(origin) = settings::origin(&Cli::command(), &command, &error) {
                note!("The value comes from {origin}.");
            }
            return ExitCode::from(u8::from(error.use_stderr()));
        }
    };
    let traces = if cli.command.is_service() { Traces::start() } else { Ok(None) };
    output::start_log(traces.as_ref().ok().and_then(Option::as_ref));
    let traces = traces.unwrap_or_else(|error| {
        // A service does not depend on its traces.
        tracing::warn!(error = %output::one_line(&error), "traces are not exported");
        None
    });
    let result = match cli.command {
        Command::Demo(arguments) => demo::run(&arguments),
        Command::Batch(Batch::Run(arguments)) => batch_run::run(*arguments),
        Command::Worker(arguments) => worker::run(*arguments),
        Command::Admin(arguments) => admin::run(*arguments),
        Command::Keys(command) => keys::run(command),
        Command::Costs(command) => costs::run(command),
        Command::Tenants(command) => tenants::run(command),
        Command::Standalone(arguments) => standalone::run(*arguments),
        Command::Kv(command) => kv::run(&command),
        Command::Migrate(arguments) => migrate::run(&arguments),
        Command::Submit(arguments) => submit::run(&arguments),
        Command::Watch(arguments) => jobs::watch(&arguments),
        Command::Results(arguments) => jobs::results(&arguments),
        Command::Cancel(arguments) => jobs::cancel(&arguments),
        Command::Queue(command) => operate::queue(command),
        Command::Workers(command) => operate::workers::run(command),
        Command::Batches(command) => operate::batches::run(command),
        Command::Dlq(command) => operate::dlq(command),
        Command::Model(command) => model::run(command),
        Command::Bench(command) => bench::run(command),
        Command::Doctor(arguments) => doctor::run(&arguments),
    };
    let code = match result {
        Ok(code) => code,
        Err(error) if output::is_closed_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            note!("error: {}", output::one_line(&error));
            ExitCode::FAILURE
        }
    };
    // May take seconds; the error is already visible.
    if let Some(traces) = traces {
        traces.flush();
    }
    code
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_command_is_well_formed() {
        settings::apply(Cli::command()).expect("no settings file is here").debug_assert();
    }

    /// Adds what the help of a command and its subcommands lacks to `missing`.
    fn check_help(command: &clap::Command, path: &str, missing: &mut Vec<String>) {
        if command.get_about().is_none() {
            missing.push(format!("{path}: description"));
        }
        for argument in command.get_arguments().filter(|argument| argument.get_help().is_none()) {
            missing.push(format!("{path}: help of {}", argument.get_id()));
        }
        let after = command.get_after_help().map(ToString::to_string).unwrap_or_default();
        let has_examples = after.contains("Examples:") && after.contains(path);
        if !command.has_subcommands() && !has_examples {
            missing.push(format!("{path}: an example"));
        }
        for sub in command.get_subcommands() {
            check_help(sub, &format!("{path} {}", sub.get_name()), missing);
        }
    }

    #[test]
    fn every_command_has_a_description_examples_and_help_for_its_arguments() {
        let mut missing = Vec::new();
        check_help(&Cli::command(), "tritmill", &mut missing);
        assert!(missing.is_empty(), "{missing:#?}");
    }
}
