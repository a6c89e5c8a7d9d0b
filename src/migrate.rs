//! `tritmill migrate`: brings the database's schema up to date.

use std::{process::ExitCode, time::Duration};

use anyhow::Context as _;
use clap::Args;
use tritmill_queue::store::PostgresStore;

use crate::servers::Servers;

const DAY: Duration = Duration::from_secs(86_400);

/// Create the database's tables, or bring them up to date.
///
/// Safe to run from several places at once, and while workers of the last release run.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  tritmill migrate --database postgres://tritmill@localhost/tritmill
  DATABASE_URL=postgres://tritmill@localhost/tritmill tritmill migrate --retention 90")]
pub struct Arguments {
    #[command(flatten)]
    servers: Servers,
    /// Days that jobs and results are kept after they are over. Holds for the whole database, all
    /// queues and workers, until it is set again; at first it is 365. Jobs go by whole days, a day
    /// when the last of its jobs is that long over
    #[arg(long, value_name = "DAYS", value_parser = clap::value_parser!(u32).range(1..))]
    retention: Option<u32>,
}

/// Runs the command.
pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    up(arguments.servers.database()?, arguments.retention)?;
    Ok(ExitCode::SUCCESS)
}

/// Brings a database up to date; it keeps jobs for `retention` days from now on, or as before.
pub fn up(url: &str, retention: Option<u32>) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Runtime::new().context("cannot start the async runtime")?;
    runtime.block_on(PostgresStore::migrate(url)).context("cannot migrate the database")?;
    let kept = runtime.block_on(async {
        let store = PostgresStore::connect(url).await?;
        if let Some(days) = retention {
            store.set_retention(DAY * days).await?;
        }
        store.retention().await
    });
    let days = kept.context("cannot use the database")?.as_secs() / DAY.as_secs();
    eprintln!("the database is up to date; it keeps jobs for {days} days after they are over");
    Ok(())
}
