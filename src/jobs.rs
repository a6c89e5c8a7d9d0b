//! `tritmill watch | results | cancel`: jobs by hand and from scripts.

use std::{io::IsTerminal as _, process::ExitCode, time::Duration};

use anyhow::Context as _;
use clap::Args;
use futures_util::StreamExt as _;
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::{Value, json};
use tritmill_producer::{Client, ClientError};
use tritmill_queue::{JobEvent, JobId, JobState, Outcome, store::JobRecord};

use crate::{output, servers::Servers};

/// Some jobs or lines had no answer.
const EXIT_INCOMPLETE: u8 = 2;

/// Which jobs.
#[derive(Debug, Args)]
pub struct JobArguments {
    /// Ids, as `submit` prints them
    #[arg(value_name = "ID", required = true)]
    ids: Vec<JobId>,
    #[command(flatten)]
    servers: Servers,
}

impl JobArguments {
    fn with_client<T>(
        &self,
        work: impl AsyncFnOnce(Client) -> anyhow::Result<T>,
    ) -> anyhow::Result<T> {
        let servers = self.servers.needed()?;
        let runtime = tokio::runtime::Runtime::new().context("cannot start the async runtime")?;
        runtime.block_on(async { work(servers.client().await?).await })
    }
}

/// Wait until jobs are over, with progress, and print them.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  tritmill watch 0199f3c2-… --timeout 60

Exit codes:
  0 all completed, 2 some failed or are not over, 1 could not run")]
pub struct WatchArguments {
    #[command(flatten)]
    jobs: JobArguments,
    /// Show the text of jobs that stream while it is generated, one job after the other
    #[arg(long)]
    follow: bool,
    /// Seconds to wait at most
    #[arg(long, value_name = "SECONDS", default_value_t = 86_400)]
    timeout: u64,
}

/// Shows a job's text on standard error as it comes; standard output has the results.
async fn follow(client: &Client, id: JobId) {
    let mut events = std::pin::pin!(client.subscribe(id));
    while let Some(event) = events.next().await {
        match event {
            Ok(JobEvent::Started) => eprintln!("{id} runs"),
            Ok(JobEvent::Delta { text, .. }) => eprint!("{text}"),
            Ok(JobEvent::Finished { state }) => eprintln!("\n{id} is {}", state.as_str()),
            Ok(_) => {}
            Err(error) => tracing::warn!(%error, "following {id}"),
        }
    }
}

/// Runs `watch`.
pub fn watch(arguments: &WatchArguments) -> anyhow::Result<ExitCode> {
    let jobs = &arguments.jobs;
    jobs.with_client(async |client| {
        let bar = ProgressBar::new(jobs.ids.len() as u64);
        bar.set_style(ProgressStyle::with_template("{bar:32} {pos}/{len} {msg}")?);
        let terminal = std::io::stderr().is_terminal();
        let limit = Duration::from_secs(arguments.timeout);
        if arguments.follow {
            let all = async {
                for id in &jobs.ids {
                    follow(&client, *id).await;
                }
            };
            // What is not over by then is said below.
            let _ = tokio::time::timeout(limit, all).await;
        }
        let waited = client.wait_all(&jobs.ids, limit, |waited| {
            bar.set_position(waited.done() as u64);
            bar.set_message(format!("{} failed", waited.failed));
            if !terminal {
                eprintln!("{}/{} over, {} failed", waited.done(), waited.total, waited.failed);
            }
        });
        let waited = waited.await;
        bar.finish_and_clear();
        print_all(&client, &jobs.ids).await?;
        let all = waited.completed == jobs.ids.len();
        Ok(if all { ExitCode::SUCCESS } else { ExitCode::from(EXIT_INCOMPLETE) })
    })
}

/// Runs `results`.
pub fn results(arguments: &JobArguments) -> anyhow::Result<ExitCode> {
    arguments.with_client(async |client| {
        print_all(&client, &arguments.ids).await?;
        Ok(ExitCode::SUCCESS)
    })
}

/// Runs `cancel`.
pub fn cancel(arguments: &JobArguments) -> anyhow::Result<ExitCode> {
    arguments.with_client(async |client| {
        let cancelled = client.cancel(&arguments.ids).await?;
        for id in &arguments.ids {
            let done =
                if cancelled.contains(id) { "cancelled" } else { "over already, or unknown" };
            output::line(json!({ "id": id.to_string(), "cancelled": cancelled.contains(id) }))?;
            eprintln!("{id}: {done}");
        }
        Ok(ExitCode::SUCCESS)
    })
}

async fn print_all(client: &Client, ids: &[JobId]) -> anyhow::Result<()> {
    for id in ids {
        match client.result(*id).await {
            Ok(record) => output::line(story(&record))?,
            Err(ClientError::Unknown(id)) => {
                output::line(json!({ "id": id.to_string(), "state": Value::Null }))?;
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// A job as JSON for people and scripts: without its prompt, which may be nobody's business.
pub fn story(record: &JobRecord) -> Value {
    let mut story = json!({
        "id": record.job.id.to_string(),
        "queue": record.job.queue.to_string(),
        "priority": record.job.priority.as_str(),
        "state": record.state.as_str(),
        "attempts": record.attempts,
        "errors": record.errors,
    });
    match &record.outcome {
        Some(Outcome::Completed(completion)) => {
            story["choices"] = json!(completion.choices);
            story["usage"] = json!(completion.usage);
        }
        Some(Outcome::Error(error)) => story["error"] = json!(error),
        Some(Outcome::Expired) | None => {}
    }
    if record.state == JobState::Expired {
        story["error"] = json!({ "code": "expired", "message": "the deadline passed" });
    }
    story
}
