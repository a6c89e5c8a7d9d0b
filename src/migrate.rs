//! `tritmill migrate`: updates the schema of the database.

use std::{process::ExitCode, time::Duration};

use anyhow::Context as _;
use clap::Args;
use tritmill_queue::{StoreError, store::Databases};

use crate::servers::Servers;

const DAY: Duration = Duration::from_secs(86_400);

/// Create or update the tables of the database.
///
/// Several processes may run it at once, also while workers of the previous release run.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  tritmill migrate --database postgres://tritmill@localhost/tritmill
  DATABASE_URL=postgres://tritmill@localhost/tritmill tritmill migrate --retention 90
  tritmill migrate --database \"postgres://db1/tritmill postgres://db2/tritmill\"   # jobs in both

A rolling upgrade: run `tritmill migrate`, replace the processes one by one, and then run
`tritmill migrate --finish`.")]
pub struct Arguments {
    #[command(flatten)]
    servers: Servers,
    /// Days to keep finished jobs and results, for the whole database, until it is set again; initially
    /// 365. Jobs are deleted by whole days, when the last job of a day is old enough
    #[arg(long, value_name = "DAYS", value_parser = clap::value_parser!(u32).range(1..))]
    retention: Option<u32>,
    /// End a rolling upgrade: no process of the previous release runs any more. Jobs of a queue are then
    /// kept apart from those that ended, which is faster. Refused while a worker of that release is alive
    #[arg(long)]
    finish: bool,
}

/// Runs the command.
pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let url = arguments.servers.database()?;
    up(url, arguments.retention)?;
    if arguments.finish {
        finish(url)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Updates a database and sets its retention in days, if given.
pub fn up(url: &str, retention: Option<u32>) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Runtime::new().context("cannot start the async runtime")?;
    runtime.block_on(Databases::migrate(url)).context("cannot migrate the database")?;
    let migrated = runtime.block_on(async {
        let store = Databases::connect(url).await?;
        if let Some(days) = retention {
            store.set_retention(DAY * days).await?;
        }
        Ok::<_, StoreError>((store.count(), store.retention().await?))
    });
    let (count, kept) = migrated.context("cannot use the database")?;
    let days = kept.as_secs() / DAY.as_secs();
    match count {
        1 => eprintln!("the database is up to date; it keeps finished jobs for {days} days"),
        _ => eprintln!("{count} databases are up to date; they keep finished jobs for {days} days"),
    }
    Ok(())
}

/// Ends a rolling upgrade.
fn finish(url: &str) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Runtime::new().context("cannot start the async runtime")?;
    let alive = runtime.block_on(async { Databases::connect(url).await?.finish_upgrade().await });
    let alive = alive.context("cannot use the database")?;
    anyhow::ensure!(
        alive.is_empty(),
        "workers of the previous release are alive: {}; stop them first",
        alive.join(", ")
    );
    eprintln!("the upgrade is finished");
    Ok(())
}
