//! `tritmill standalone`: a whole service in one process, beside Redis and Postgres.

use std::process::ExitCode;

use clap::Args;

use crate::{migrate, worker};

/// Bring the database up to date, then answer the jobs of a queue: `migrate` and `worker` in one.
///
/// For one machine, or the first of many: more workers may join at any time.
#[derive(Debug, Args)]
#[group(id = "standalone")]
#[command(after_help = "\
Examples:
  tritmill standalone --redis redis://localhost --database postgres://tritmill@localhost/tritmill
  tritmill standalone --model ./bitnet-2b --format tl2 --listen 0.0.0.0:9100

Exit codes:
  0 drained, 1 could not start, or the engine failed")]
pub struct Arguments {
    #[command(flatten)]
    worker: worker::Arguments,
}

/// Runs the command.
pub fn run(arguments: Arguments) -> anyhow::Result<ExitCode> {
    migrate::up(arguments.worker.servers()?.database_url(), None)?;
    worker::run(arguments.worker)
}
