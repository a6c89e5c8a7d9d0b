//! `tritmill batch run --server`: answers a file through a server's HTTP API.

use std::{path::PathBuf, process::ExitCode, time::Instant};

use anyhow::{Context as _, bail};
use clap::Args;
use tokio::runtime::Runtime;
use tritmill_client::{
    http::{AddressPolicy, HttpClient},
    remote::{Api, Escalation, RemoteRun, RemoteRunError, RemoteSettings},
};

use super::{BatchRunArgs, EXIT_ERROR_LINES, Summary, display::Display, summarize};
use crate::{
    settings,
    signals::{EXIT_INTERRUPTED, Signals},
};

/// A server and the parameters of its batches.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Server")]
pub struct ServerOptions {
    /// URL of a Tritmill server to answer the lines; --redis and --database are ignored
    #[arg(long, value_name = "URL")]
    server: Option<String>,
    /// API key for --server; set TRITMILL_KEY instead to keep it out of the process list
    #[arg(long, value_name = "KEY", env = "TRITMILL_KEY", hide_env_values = true)]
    key: Option<String>,
    /// With --server: PEM file of more trusted certificates, besides the system's
    #[arg(long, value_name = "FILE")]
    ca: Option<PathBuf>,
    /// With --server: time limit of each batch [default: 30d]
    #[arg(long, value_name = "TIME")]
    window: Option<String>,
    /// With --server: priority of the lines [default: normal]
    #[arg(long, value_parser = ["normal", "low"])]
    priority: Option<String>,
    /// With --server: model of the lines that have not begun after --escalate-after
    #[arg(long, value_name = "MODEL", requires = "escalate_after")]
    escalate_to: Option<String>,
    /// With --server: time after the creation of a batch, less than --window, as `20h`
    #[arg(long, value_name = "TIME", requires = "escalate_to")]
    escalate_after: Option<String>,
}

impl ServerOptions {
    /// Returns URL and key of the server, if one is given.
    pub fn given(&self) -> anyhow::Result<Option<(&str, &str)>> {
        let Some(url) = self.server.as_deref() else {
            // The environment and the file may have them for other runs.
            let own = ["ca", "window", "priority", "escalate-to", "escalate-after"];
            let typed = own.into_iter().find(|name| settings::is_typed(name));
            return typed.map_or(Ok(None), |name| bail!("--{name} needs --server"));
        };
        let key = self.key.as_deref().filter(|key| !key.is_empty());
        let key = key.context("--server needs --key (or TRITMILL_KEY)")?;
        Ok(Some((url, key)))
    }
}

/// Runs the command.
pub fn run(
    args: &BatchRunArgs,
    (url, key): (&str, &str),
    mut display: Display,
    runtime: &Runtime,
    summary: Summary,
) -> anyhow::Result<ExitCode> {
    if args.retry_failed {
        bail!("--retry-failed does not work with --server: the server retries failed lines itself");
    }
    let started = Instant::now();
    let ServerOptions { ca, window, priority, escalate_to, escalate_after, .. } =
        args.server.clone();
    // Those of the file are defaults, which do not require each other.
    let escalation = match (escalate_to, escalate_after) {
        (Some(model), Some(after)) => Some(Escalation { model, after }),
        (None, None) => None,
        _ => bail!("--escalate-to and --escalate-after need each other"),
    };
    let client = HttpClient::new(AddressPolicy::Any, ca.as_deref()).context("--ca")?;
    let api = Api::new(client, url, key)?;
    let settings = RemoteSettings {
        input: args.input.clone(),
        output: args.output.clone(),
        state: args.state.clone(),
        model: args.name.clone().unwrap_or_else(|| args.model.clone()),
        window: window.unwrap_or_else(|| "30d".to_owned()),
        priority: priority.unwrap_or_else(|| "normal".to_owned()),
        escalation,
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
        note!("stopped: the server continues its batches; run the same command to get the answers");
        // Returning would wait for a thread that may be reading from a terminal.
        std::process::exit(i32::from(EXIT_INTERRUPTED));
    };
    let progress = match ended {
        Err(RemoteRunError::File(error)) if error.is_closed_pipe() => return Ok(ExitCode::SUCCESS),
        ended => ended?,
    };
    summarize(&progress, started.elapsed(), summary)?;
    Ok(match progress.failed {
        0 => ExitCode::SUCCESS,
        _ => ExitCode::from(EXIT_ERROR_LINES),
    })
}
