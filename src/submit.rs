//! `tritmill submit`: batch lines into a queue.

use std::{
    fs::File,
    io::{BufReader, Read},
    path::{Path, PathBuf},
    process::ExitCode,
    time::Duration,
};

use anyhow::Context as _;
use clap::Args;
use serde_json::{Value, json};
use tritmill_client::{Client, ClientError, LineReader, RawLine, parse_line};
use tritmill_queue::{
    Job, JobId, Priority, QueueName, Tenant, Timestamp, TraceParent,
    store::{FAST_RETENTION, PostgresStore, Workers as _, workers::Worker},
};

use crate::{
    demo_model,
    options::{self, RunOptions},
    output,
    servers::{Keeper, ModeOptions},
};

/// Jobs submitted in one call.
const CHUNK: usize = 1000;
/// Some lines were refused.
const EXIT_INCOMPLETE: u8 = 2;
/// How often a call is repeated that the database did not answer, and the wait in between.
const TRIES: u32 = 5;
const RETRY: Duration = Duration::from_secs(1);

/// Put jobs into a queue and return at once.
///
/// IN has batch lines, as for `batch run`; `-` reads them from standard input. Prints one line for
/// each job, its id and custom_id. For a file in and a file out use `batch run`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  tritmill submit in.jsonl --model bitnet-2b --redis redis://… --database postgres://…
  echo '{\"prompt\": \"Paid on the 3rd of March, 2024\"}' | tritmill submit - --priority high
  tritmill submit in.jsonl --idempotency-key 2024-03-03 --deadline 3600

Exit codes:
  0 all submitted, 2 some lines were refused, 1 could not run")]
pub struct Arguments {
    /// Batch lines
    #[arg(value_name = "IN")]
    input: PathBuf,
    /// Name of a model that workers serve
    #[arg(long, value_name = "NAME", default_value = demo_model::NAME,
          value_parser = options::model_name)]
    model: String,
    /// Before or behind other jobs of the queue
    #[arg(long, default_value = "normal", value_parser = ["high", "normal", "low"])]
    priority: String,
    /// Whose jobs they are: tenants share a queue fairly
    #[arg(long, value_name = "NAME")]
    tenant: Option<String>,
    /// Seconds after which a job that is not answered expires
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..))]
    deadline: Option<u64>,
    /// Submitting the same lines under the same key again returns the first jobs
    #[arg(long, value_name = "KEY")]
    idempotency_key: Option<String>,
    /// Let `watch --follow` show the text while it is generated
    #[arg(long)]
    stream: bool,
    /// The trace the jobs belong to, for the workers' logs: a W3C traceparent
    #[arg(long, value_name = "TRACEPARENT")]
    traceparent: Option<TraceParent>,
    #[command(flatten)]
    run: RunOptions,
    #[command(flatten)]
    servers: ModeOptions,
}

/// Runs the command.
pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let servers = arguments.servers.mode()?;
    let input = open(&arguments.input)?;
    let runtime = tokio::runtime::Runtime::new().context("cannot start the async runtime")?;
    runtime.block_on(async {
        let format = arguments.run.format.to_string();
        let queue = QueueName { model: arguments.model.clone(), format };
        let (store, dispatcher) = (servers.database().await?, servers.dispatcher()?);
        let keeper = Keeper::of(store.clone(), &dispatcher, &queue, FAST_RETENTION).await?;
        let client = keeper.client(dispatcher);
        let mut submission = Submission::new(arguments, queue, &client).await?;
        let mut lines = LineReader::new(BufReader::new(input));
        while let Some(line) = lines.next_line().context("cannot read the lines")? {
            submission.add(&line);
            if submission.jobs.len() >= CHUNK {
                submission.send().await?;
            }
        }
        submission.send().await?;
        let refused = submission.refused;
        if let Some(store) = store {
            warn_without_workers(&store, &submission.queue).await?;
        }
        Ok(if refused == 0 { ExitCode::SUCCESS } else { ExitCode::from(EXIT_INCOMPLETE) })
    })
}

fn open(input: &Path) -> anyhow::Result<Box<dyn Read>> {
    if input.as_os_str() == "-" {
        return Ok(Box::new(std::io::stdin()));
    }
    let file = File::open(input).with_context(|| format!("cannot read {}", input.display()))?;
    Ok(Box::new(file))
}

async fn warn_without_workers(store: &PostgresStore, queue: &QueueName) -> anyhow::Result<()> {
    let workers = store.workers().await?;
    let serves = |worker: &&Worker| worker.is_alive() && worker.heartbeat.queue == *queue;
    let serving = workers.iter().filter(serves).count();
    eprintln!("workers: {serving}");
    if serving == 0 {
        eprintln!("no worker serves {queue}: jobs wait until one does");
    }
    Ok(())
}

/// Lines on their way into the queue.
struct Submission<'a> {
    client: &'a Client,
    queue: QueueName,
    priority: Priority,
    tenant: Tenant,
    expires_at: Option<Timestamp>,
    stream: bool,
    traceparent: Option<TraceParent>,
    key: Option<&'a str>,
    /// What this chunk's lines ask, for the key.
    asked: Vec<u8>,
    chunks: usize,
    jobs: Vec<Job>,
    custom_ids: Vec<Option<String>>,
    refused: u64,
}

impl<'a> Submission<'a> {
    async fn new(
        arguments: &'a Arguments,
        queue: QueueName,
        client: &'a Client,
    ) -> anyhow::Result<Self> {
        let expires_at = match arguments.deadline {
            Some(seconds) => Some(client.now().await?.after(Duration::from_secs(seconds))),
            None => None,
        };
        Ok(Self {
            client,
            queue,
            priority: arguments.priority.parse()?,
            tenant: arguments.tenant.clone().map_or_else(Tenant::default, Tenant),
            expires_at,
            stream: arguments.stream,
            traceparent: arguments.traceparent.clone(),
            key: arguments.idempotency_key.as_deref(),
            asked: Vec::new(),
            chunks: 0,
            jobs: Vec::new(),
            custom_ids: Vec::new(),
            refused: 0,
        })
    }

    /// Takes a line into the chunk, or says why not.
    fn add(&mut self, line: &RawLine) {
        let parsed = parse_line(line, &self.queue);
        match parsed.content {
            Ok(job) => {
                self.asked.extend(parsed.key);
                self.custom_ids.push(parsed.custom_id);
                self.jobs.push(Job {
                    priority: self.priority,
                    tenant: self.tenant.clone(),
                    expires_at: self.expires_at,
                    stream: self.stream,
                    traceparent: self.traceparent.clone(),
                    ..*job
                });
            }
            Err(refusal) => {
                self.refused += 1;
                let refusal: Value = serde_json::from_str(&refusal).unwrap_or_default();
                eprintln!("refused: {}", refusal["message"].as_str().unwrap_or_default());
            }
        }
    }

    /// Submits the chunk, waiting while the queue is full, and prints the ids.
    async fn send(&mut self) -> anyhow::Result<()> {
        let jobs = std::mem::take(&mut self.jobs);
        let custom_ids = std::mem::take(&mut self.custom_ids);
        let asked = std::mem::take(&mut self.asked);
        let ids: Vec<JobId> = match self.key {
            None => {
                self.submit(&jobs).await?;
                jobs.iter().map(|job| job.id).collect()
            }
            Some(_) if jobs.is_empty() => Vec::new(),
            Some(key) => {
                // A key for each chunk: the same file falls into the same ones.
                let key = format!("{key}/{}", self.chunks);
                self.chunks += 1;
                self.submit_once(&key, &asked, &jobs).await?
            }
        };
        for (id, custom_id) in ids.iter().zip(custom_ids) {
            output::line(json!({ "id": id.to_string(), "custom_id": custom_id }))?;
        }
        Ok(())
    }

    async fn submit(&self, jobs: &[Job]) -> anyhow::Result<()> {
        let (mut left, mut failures) = (jobs, 0);
        loop {
            match self.client.submit_many(left).await {
                Ok(()) => return Ok(()),
                Err(ClientError::Busy { limit, accepted, retry_after }) => {
                    eprintln!("full at {limit}, waiting {:.1} s", retry_after.as_secs_f32());
                    left = left.get(accepted..).unwrap_or_default();
                    tokio::time::sleep(retry_after).await;
                }
                Err(error) => retry(error, &mut failures).await?,
            }
        }
    }

    async fn submit_once(
        &self,
        key: &str,
        asked: &[u8],
        jobs: &[Job],
    ) -> anyhow::Result<Vec<JobId>> {
        let mut failures = 0;
        loop {
            match self.client.submit_once(key, asked, jobs).await {
                Ok(ids) => return Ok(ids),
                Err(ClientError::Busy { limit, retry_after, .. }) => {
                    eprintln!("full at {limit}, waiting {:.1} s", retry_after.as_secs_f32());
                    tokio::time::sleep(retry_after).await;
                }
                Err(error) => retry(error, &mut failures).await?,
            }
        }
    }
}

/// Waits before the same jobs are submitted again, which adds none twice; after the last try the
/// error.
async fn retry(error: ClientError, failures: &mut u32) -> anyhow::Result<()> {
    *failures += 1;
    if *failures >= TRIES || !matches!(error, ClientError::Store(_)) {
        return Err(error).context("not submitted, or at least not known to be");
    }
    eprintln!("{error}: trying again");
    tokio::time::sleep(RETRY).await;
    Ok(())
}
