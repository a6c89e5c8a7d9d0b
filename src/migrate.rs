//! `tritmill migrate`: brings the database's schema up to date.

use std::process::ExitCode;

use anyhow::Context as _;
use clap::Args;
use tritmill_queue::store::PostgresStore;

use crate::servers::Servers;

/// Create the database's tables, or bring them up to date.
///
/// Safe to run from several places at once, and while workers of the last release run.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  tritmill migrate --database postgres://tritmill@localhost/tritmill
  DATABASE_URL=postgres://tritmill@localhost/tritmill tritmill migrate")]
pub struct Arguments {
    #[command(flatten)]
    servers: Servers,
}

/// Runs the command.
pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    up(arguments.servers.database()?)?;
    Ok(ExitCode::SUCCESS)
}

/// Brings a database up to date.
pub fn up(url: &str) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Runtime::new().context("cannot start the async runtime")?;
    runtime.block_on(PostgresStore::migrate(url)).context("cannot migrate the database")?;
    eprintln!("the database is up to date");
    Ok(())
}
