//! `tritmill submit`: submits batch lines to a queue.

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
use tritmill_engine::formats::Format;
use tritmill_queue::{
    Job, JobId, Priority, QueueName, StoreError, Tenant, Timestamp, TraceParent,
    store::{PostgresStore, Workers as _, workers::Worker},
};

use crate::{
    block_on, demo_model,
    options::{self, one_of},
    output,
    servers::Servers,
};

/// Jobs submitted in one call.
const CHUNK: usize = 1000;
/// Exit code: some lines were refused.
const EXIT_INCOMPLETE: u8 = 2;
/// Tries of a call that the database does not answer, and the time between them.
const TRIES: u32 = 5;
const RETRY: Duration = Duration::from_secs(1);

/// Submit jobs to a queue and return at once.
///
/// IN has batch lines, as for `batch run`; `-` reads standard input. Prints one line for each job, with
/// its id and custom_id. To turn a file of requests into a file of answers, use `batch run`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  tritmill submit in.jsonl --model bitnet-2b --redis redis://… --database postgres://…
  echo '{\"prompt\": \"Paid on the 3rd of March, 2024\"}' | tritmill submit - --priority high
  tritmill submit in.jsonl --idempotency-key 2024-03-03 --deadline 3600

Exit codes:
  0 all submitted, 2 some lines were refused, 1 could not run")]
pub struct Arguments {
    /// File of batch lines
    #[arg(value_name = "IN")]
    input: PathBuf,
    /// Name of a model that workers serve
    #[arg(long, value_name = "NAME", default_value = demo_model::NAME,
          value_parser = options::model_name)]
    model: String,
    /// Priority among the jobs of the queue
    #[arg(long, default_value = "normal", value_parser = ["high", "normal", "low"])]
    priority: String,
    /// Tenant that owns the jobs; tenants share a queue fairly
    #[arg(long, value_name = "NAME")]
    tenant: Option<String>,
    /// Seconds after which an unfinished job expires
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..))]
    deadline: Option<u64>,
    /// Idempotency key: submitting the same lines with the same key again returns the first jobs
    #[arg(long, value_name = "KEY")]
    idempotency_key: Option<String>,
    /// Publish the text while it is generated, for `watch --follow`
    #[arg(long)]
    stream: bool,
    /// Trace of the jobs for the workers' logs, a W3C traceparent
    #[arg(long, value_name = "TRACEPARENT")]
    traceparent: Option<TraceParent>,
    /// Packing of the weights of the workers, the second part of the queue's name
    #[arg(long, default_value = "i2_s", value_parser = one_of::<Format>(&["i2_s", "tl1", "tl2"]))]
    format: Format,
    #[command(flatten)]
    servers: Servers,
}

/// Runs the command.
pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let servers = arguments.servers.needed()?;
    let input = open(&arguments.input)?;
    block_on(async {
        let format = arguments.format.to_string();
        let queue = QueueName { model: arguments.model.clone(), format };
        let store = servers.store().await?;
        let client = Client::from_servers(store.clone(), servers.dispatcher().await?);
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
        warn_without_workers(&store, &submission.queue).await?;
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
    note!("workers: {serving}");
    if serving == 0 {
        note!("no worker serves {queue}: jobs wait for one");
    }
    Ok(())
}

/// Lines that are being submitted.
struct Submission<'a> {
    client: &'a Client,
    queue: QueueName,
    priority: Priority,
    tenant: Tenant,
    expires_at: Option<Timestamp>,
    stream: bool,
    traceparent: Option<TraceParent>,
    key: Option<&'a str>,
    /// Keys of this chunk's lines: the request for the idempotency key.
    request: Vec<u8>,
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
            request: Vec::new(),
            chunks: 0,
            jobs: Vec::new(),
            custom_ids: Vec::new(),
            refused: 0,
        })
    }

    /// Adds a line to the chunk, or prints its refusal.
    fn add(&mut self, line: &RawLine) {
        let parsed = parse_line(line, &self.queue);
        match parsed.content {
            Ok(job) => {
                self.request.extend(parsed.key);
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
                note!("refused: {}", refusal["message"].as_str().unwrap_or_default());
            }
        }
    }

    /// Submits the chunk, waiting while the queue is full, and prints the ids.
    async fn send(&mut self) -> anyhow::Result<()> {
        let jobs = std::mem::take(&mut self.jobs);
        let custom_ids = std::mem::take(&mut self.custom_ids);
        let request = std::mem::take(&mut self.request);
        if jobs.is_empty() && self.key.is_some() {
            return Ok(());
        }
        // Each chunk has its own key: the same file has the same chunks.
        let key = self.key.map(|key| format!("{key}/{}", self.chunks));
        self.chunks += 1;
        let ids = match self.submit(key.as_deref(), &request, &jobs).await {
            Ok(ids) => ids.into_iter().map(Some).collect(),
            Err(error) if key.is_none() && is_refused_value(&error) => {
                self.submit_each(&jobs, &custom_ids).await?
            }
            Err(error) => return Err(error),
        };
        for (id, custom_id) in ids.iter().zip(custom_ids) {
            let Some(id) = id else { continue };
            output::json(json!({ "id": id.to_string(), "custom_id": custom_id }))?;
        }
        Ok(())
    }

    /// Submits jobs one by one, of which the database refuses some; returns the ids of the others.
    async fn submit_each(
        &mut self,
        jobs: &[Job],
        custom_ids: &[Option<String>],
    ) -> anyhow::Result<Vec<Option<JobId>>> {
        let mut ids = Vec::with_capacity(jobs.len());
        for (job, custom_id) in jobs.iter().zip(custom_ids) {
            match self.submit(None, &[], std::slice::from_ref(job)).await {
                Ok(_) => ids.push(Some(job.id)),
                Err(error) if is_refused_value(&error) => {
                    self.refused += 1;
                    let line = custom_id.as_deref().unwrap_or("a line without custom_id");
                    note!("refused: {line}: {error:#}");
                    ids.push(None);
                }
                Err(error) => return Err(error),
            }
        }
        Ok(ids)
    }

    /// Submits jobs, only once if there is a key, and returns their ids.
    async fn submit(
        &self,
        key: Option<&str>,
        request: &[u8],
        jobs: &[Job],
    ) -> anyhow::Result<Vec<JobId>> {
        let (mut left, mut failures) = (jobs, 0);
        loop {
            let submitted = match key {
                Some(key) => self.client.submit_once(key, request, jobs).await,
                None => {
                    let submitted = self.client.submit_many(left).await;
                    submitted.map(|()| jobs.iter().map(|job| job.id).collect())
                }
            };
            match submitted {
                Ok(ids) => return Ok(ids),
                Err(ClientError::Busy { limit, cause, accepted, retry_after }) => {
                    let seconds = retry_after.as_secs_f32();
                    note!("queue is full at {limit}: {cause}: waiting {seconds:.1} s");
                    left = left.get(accepted..).unwrap_or_default();
                    tokio::time::sleep(retry_after).await;
                }
                Err(error) => retry(error, &mut failures).await?,
            }
        }
    }
}

/// Returns whether the database refuses a value of a job.
fn is_refused_value(error: &anyhow::Error) -> bool {
    let cause = error.downcast_ref::<ClientError>();
    matches!(cause, Some(ClientError::Store(StoreError::InvalidValue { .. })))
}

/// Waits before the same jobs are submitted again, which adds no job twice. Returns the error after the
/// last try.
async fn retry(error: ClientError, failures: &mut u32) -> anyhow::Result<()> {
    *failures += 1;
    let may_pass = matches!(&error, ClientError::Store(error) if !error.is_permanent());
    if *failures >= TRIES || !may_pass {
        return Err(error).context("not submitted, or submitted without an answer");
    }
    note!("{error}: trying again");
    tokio::time::sleep(RETRY).await;
    Ok(())
}
