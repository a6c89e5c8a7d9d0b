//! `tritmill watch | results | cancel`: the state and results of single jobs.

use std::{collections::BTreeMap, io::IsTerminal as _, process::ExitCode, time::Duration};

use clap::Args;
use futures_util::StreamExt as _;
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::{Value, json};
use tritmill_client::{Client, ClientError};
use tritmill_queue::{
    JobEvent, JobId, JobState, Outcome, QueueName,
    store::{JobRecord, PostgresStore, Workers as _, workers::Worker},
};

use crate::{block_on, output, servers::Servers};

/// Help after the arguments of `results` and `cancel`.
pub const RESULTS_HELP: &str = "\
Examples:
  tritmill results 0199f3c2-…

Exit codes:
  0 done, 2 some jobs are unknown, 1 could not run";
pub const CANCEL_HELP: &str = "\
Examples:
  tritmill cancel 0199f3c2-… 0199f3c2-…

Exit codes:
  0 done, 2 some jobs are unknown, 1 could not run";

/// Exit code: some jobs have no answer or are unknown.
const EXIT_INCOMPLETE: u8 = 2;

/// Jobs, and where they are.
#[derive(Debug, Args)]
pub struct JobArguments {
    /// Job ids, as printed by `tritmill submit`
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
        block_on(async { work(servers.client().await?).await })
    }
}

/// Wait until jobs are finished, show progress, and print the jobs.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  tritmill watch 0199f3c2-… --timeout 60
  tritmill watch 0199f3c2-… --follow

Exit codes:
  0 all completed, 2 some failed, are unfinished or unknown, 1 could not run")]
pub struct WatchArguments {
    #[command(flatten)]
    jobs: JobArguments,
    /// Show the text of streaming jobs while it is generated, one job after the other
    #[arg(long)]
    follow: bool,
    /// Maximum seconds to wait
    #[arg(long, value_name = "SECONDS", default_value_t = 86_400,
          value_parser = clap::value_parser!(u64).range(..=31_536_000))]
    timeout: u64,
}

/// Shows a job's text on standard error while it is generated; results go to standard output.
async fn follow(client: &Client, id: JobId) {
    let mut events = std::pin::pin!(client.subscribe(id));
    while let Some(event) = events.next().await {
        match event {
            Ok(JobEvent::Started) => note!("{id} is running"),
            Ok(JobEvent::Delta { text, .. }) => output::note_part(&text),
            Ok(JobEvent::Finished { state }) => note!("\n{id} is {}", state.as_str()),
            Ok(_) => {}
            Err(error) => tracing::warn!(%error, "following {id}"),
        }
    }
}

/// Returns the known ids. Warns about unfinished jobs with a queue that has no workers.
async fn known(
    client: &Client,
    store: &PostgresStore,
    ids: &[JobId],
) -> anyhow::Result<Vec<JobId>> {
    let mut known = Vec::with_capacity(ids.len());
    let mut queues: BTreeMap<QueueName, usize> = BTreeMap::new();
    for id in ids {
        let Some(record) = found(client.result(*id).await)? else { continue };
        known.push(*id);
        if !record.state.is_terminal() {
            *queues.entry(record.job.queue).or_default() += 1;
        }
    }
    if queues.is_empty() {
        return Ok(known);
    }
    let workers = store.workers().await?;
    for (queue, count) in queues {
        let serves = |worker: &Worker| worker.is_alive() && worker.heartbeat.queue == queue;
        if !workers.iter().any(serves) {
            note!("no worker serves {queue}: {count} of these jobs wait until one does");
        }
    }
    Ok(known)
}

/// Runs `watch`.
pub fn watch(arguments: &WatchArguments) -> anyhow::Result<ExitCode> {
    let jobs = &arguments.jobs;
    jobs.with_client(async |client| {
        // Unknown jobs stay unknown: do not wait for them.
        let store = jobs.servers.needed()?.store().await?;
        let known = known(&client, &store, &jobs.ids).await?;
        let bar = ProgressBar::new(jobs.ids.len() as u64);
        bar.set_style(ProgressStyle::with_template("{bar:32} {pos}/{len} {msg}")?);
        let terminal = std::io::stderr().is_terminal();
        let limit = Duration::from_secs(arguments.timeout);
        if arguments.follow {
            let all = async {
                for id in &known {
                    follow(&client, *id).await;
                }
            };
            // Unfinished jobs are reported below.
            let _ = tokio::time::timeout(limit, all).await;
        }
        let waited = client.wait_all(&known, limit, |waited| {
            let (finished, total, failed) = (waited.finished(), waited.total, waited.failed);
            bar.set_position(finished as u64);
            bar.set_message(format!("{failed} failed"));
            if !terminal {
                note!("{finished}/{total} finished, {failed} failed");
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
        let unknown = print_all(&client, &arguments.ids).await?;
        Ok(if unknown == 0 { ExitCode::SUCCESS } else { ExitCode::from(EXIT_INCOMPLETE) })
    })
}

/// Runs `cancel`.
pub fn cancel(arguments: &JobArguments) -> anyhow::Result<ExitCode> {
    arguments.with_client(async |client| {
        let cancelled = client.cancel(&arguments.ids).await?;
        let mut unknown = 0;
        for id in &arguments.ids {
            let is_cancelled = cancelled.contains(id);
            let state = found(client.poll(*id).await)?.map(|state| state.as_str());
            let line = json!({ "id": id.to_string(), "cancelled": is_cancelled, "state": state });
            output::json(line)?;
            match state {
                Some(_) if is_cancelled => note!("{id}: cancelled"),
                Some(state) => note!("{id}: already finished, {state}"),
                None => {
                    unknown += 1;
                    report_unknown(*id);
                }
            }
        }
        Ok(if unknown == 0 { ExitCode::SUCCESS } else { ExitCode::from(EXIT_INCOMPLETE) })
    })
}

/// Returns an answer; `None` for an unknown job.
fn found<T>(answer: Result<T, ClientError>) -> anyhow::Result<Option<T>> {
    match answer {
        Ok(answer) => Ok(Some(answer)),
        Err(ClientError::Unknown(_)) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

fn report_unknown(id: JobId) {
    note!("no job {id}: it was never submitted to these servers, or was deleted");
}

/// Prints jobs and returns the number of unknown ones.
async fn print_all(client: &Client, ids: &[JobId]) -> anyhow::Result<usize> {
    let mut unknown = 0;
    for id in ids {
        match found(client.result(*id).await)? {
            Some(record) => output::json(as_json(&record))?,
            None => {
                output::json(json!({ "id": id.to_string(), "state": Value::Null }))?;
                unknown += 1;
                report_unknown(*id);
            }
        }
    }
    Ok(unknown)
}

/// Returns a job as JSON, without its prompt, which may be confidential.
pub fn as_json(record: &JobRecord) -> Value {
    let mut job = json!({
        "id": record.job.id.to_string(),
        "queue": record.job.queue.to_string(),
        "priority": record.job.priority.as_str(),
        "state": record.state.as_str(),
        "attempts": record.attempts,
        "errors": record.errors,
    });
    match &record.outcome {
        Some(Outcome::Completed(completion)) => {
            job["choices"] = json!(completion.choices);
            job["usage"] = json!(completion.usage);
            job["numerics_class"] = json!(completion.fingerprint);
        }
        Some(Outcome::Error(error)) => job["error"] = json!(error),
        Some(Outcome::Expired) | None => {}
    }
    if record.state == JobState::Expired {
        job["error"] = json!({ "code": "expired", "message": "the deadline passed" });
    }
    job
}
