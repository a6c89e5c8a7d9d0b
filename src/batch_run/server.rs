//! `tritmill batch run --server`: the same, answered by a server's HTTP API.

use std::{path::PathBuf, process::ExitCode, time::Instant};

use anyhow::{Context as _, bail};
use clap::Args;
use tokio::runtime::Runtime;
use tritmill_client::{
    http::{AddressPolicy, HttpClient},
    remote::{Api, RemoteRun, RemoteSettings},
};

use super::{BatchRunArgs, EXIT_ERROR_LINES, display::Display, summarize};
use crate::signals::{EXIT_INTERRUPTED, Signals};

/// A server, and how it is to answer.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Server")]
pub struct ServerOptions {
    /// Have the lines answered by the Tritmill server at this address; leaves other servers aside
    #[arg(long, value_name = "URL")]
    server: Option<String>,
    /// API key for --server, best given as TRITMILL_KEY
    #[arg(long, value_name = "KEY", env = "TRITMILL_KEY", hide_env_values = true)]
    key: Option<String>,
    /// With --server: PEM file of certificates to trust besides the system's
    #[arg(long, value_name = "FILE")]
    ca: Option<PathBuf>,
    /// With --server: how long each batch may take
    #[arg(long, value_name = "TIME", default_value = "30d")]
    window: String,
    /// With --server: how urgent the lines are
    #[arg(long, default_value = "normal", value_parser = ["normal", "low"])]
    priority: String,
}

/// What is needed to reach a server.
pub struct Given<'a> {
    url: &'a str,
    key: &'a str,
    options: &'a ServerOptions,
}

impl ServerOptions {
    /// The server, if one is given.
    pub fn given(&self) -> anyhow::Result<Option<Given<'_>>> {
        let Some(url) = self.server.as_deref() else { return Ok(None) };
        let key = self.key.as_deref().filter(|key| !key.is_empty());
        let key = key.context("--server needs --key (or TRITMILL_KEY)")?;
        Ok(Some(Given { url, key, options: self }))
    }
}

/// Runs the command.
pub fn run(
    args: &BatchRunArgs,
    server: Given<'_>,
    mut display: Display,
    runtime: &Runtime,
) -> anyhow::Result<ExitCode> {
    if args.retry_failed {
        bail!(
            "--retry-failed is not for --server: its workers try failed lines again by themselves"
        );
    }
    let started = Instant::now();
    let ServerOptions { ca, window, priority, .. } = server.options.clone();
    let client = HttpClient::new(AddressPolicy::Any, ca.as_deref()).context("--ca")?;
    let api = Api::new(client, server.url, server.key)?;
    let settings = RemoteSettings {
        input: args.input.clone(),
        output: args.output.clone(),
        model: args.name.clone().unwrap_or_else(|| args.model.clone()),
        window,
        priority,
        restart: args.restart,
    };
    let ended = runtime.block_on(async {
        let mut signals = Signals::listen().context("cannot listen for signals")?;
        let run = RemoteRun::answer(settings, api, |update| display.show_remote(update));
        tokio::select! {
            ended = run => Ok::<_, anyhow::Error>(Some(ended)),
            () = signals.next() => Ok(None),
        }
    })?;
    display.finish();
    let Some(ended) = ended else {
        eprintln!("stopped: what was sent goes on at the server; run the same command to fetch it");
        // Not by returning, which would wait for a thread that reads from a terminal.
        std::process::exit(i32::from(EXIT_INTERRUPTED));
    };
    let progress = ended?;
    summarize(&progress, started.elapsed(), args.json)?;
    Ok(match progress.failed {
        0 => ExitCode::SUCCESS,
        _ => ExitCode::from(EXIT_ERROR_LINES),
    })
}
