//! `tritmill migrate`: updates the schema of the database.

use std::{process::ExitCode, time::Duration};

use anyhow::Context as _;
use clap::Args;
use tritmill_queue::store::PostgresStore;

use crate::servers::Servers;

const DAY: Duration = Duration::from_secs(86_400);

/// Create or update the tables of the database.
///
/// Several processes may run it at once.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  tritmill migrate --database postgres://tritmill@localhost/tritmill
  DATABASE_URL=postgres://tritmill@localhost/tritmill tritmill migrate --retention 90")]
pub struct Arguments {
    #[command(flatten)]
    servers: Servers,
    /// Days to keep finished jobs and results, for the whole database, until it is set again; initially
    /// 365. Jobs are deleted by whole days, when the last job of a day is old enough
    #[arg(long, value_name = "DAYS", value_parser = clap::value_parser!(u32).range(1..))]
    retention: Option<u32>,
}

/// Runs the command.
pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let url = arguments.servers.database()?;
    up(url, arguments.retention)?;
    Ok(ExitCode::SUCCESS)
}

/// Updates a database and sets its retention in days, if given.
pub fn up(url: &str, retention: Option<u32>) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Runtime::new().context("cannot start the async runtime")?;
    runtime.block_on(PostgresStore::migrate(url)).context("cannot migrate the database")?;
    let migrated = runtime.block_on(async {
        let store = PostgresStore::connect(url).await?;
        if let Some(days) = retention {
            store.set_retention(DAY * days).await?;
        }
        store.retention().await
    });
    let days = migrated.context("cannot use the database")?.as_secs() / DAY.as_secs();
    note!("the database is up to date; it keeps finished jobs for {days} days");
    Ok(())
}
