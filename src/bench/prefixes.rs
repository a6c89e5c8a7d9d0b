//! `tritmill bench prefixes`: jobs that share long system prompts, on several workers: in the order of their prompts
//! and with KV blocks on disk, and without both.

use std::{
    num::NonZeroUsize,
    path::Path,
    process::ExitCode,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail, ensure};
use clap::Args;
use serde_json::json;
use tokio::{
    sync::{mpsc, watch},
    task::JoinSet,
};
use tritmill_client::JobBuilder;
use tritmill_engine::{
    files::Model,
    kv::{
        BLOCK_TOKENS,
        disk::{BlockTiers, FolderLimits, TierOptions},
    },
    load::{self, EngineOptions},
};
use tritmill_queue::{Job, JobId, Sampling, Usage};
use tritmill_worker::{
    Committed, Device, Metrics, Mode, ServedModel, Stop, Worker, WorkerConfig, WorkerError,
};

use super::queue::Bench;
use crate::{
    options::{ModelOption, RunOptions},
    output,
    servers::Servers,
};

const EXAMPLES: &str = "\
Examples:
  tritmill bench prefixes --redis redis://localhost?shards=16 --database postgres://tritmill@localhost/tritmill
  tritmill bench prefixes --prompts 10 --jobs 400 --workers 2 --threads 1 --json

Submits jobs with random system prompts, one at a time without shards of the queue (plain), then other ones all at
once, with the shards of --redis and a folder of KV blocks that the workers share (ordered). Prints the tokens of the
system prompts that were not computed, and jobs per second. Needs a migrated database, and deletes what it added.";

/// Tokens of a job's own part of its prompt.
const OWN_TOKENS: usize = 16;
/// The folder of a run has few files.
const LIMITS: FolderLimits = FolderLimits { bytes_max: u64::MAX, free_min: 1 << 30 };

/// Arguments of `bench prefixes`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct Arguments {
    #[command(flatten)]
    model: ModelOption,
    /// Number of system prompts
    #[arg(long, value_name = "N", default_value = "50")]
    prompts: NonZeroUsize,
    /// Tokens of each system prompt
    #[arg(long, value_name = "N", default_value = "1000")]
    tokens: NonZeroUsize,
    /// Number of jobs; each has one of the system prompts and 16 tokens of its own
    #[arg(long, value_name = "N", default_value = "2000")]
    jobs: NonZeroUsize,
    /// Tokens to generate per job
    #[arg(long, value_name = "N", default_value = "16")]
    generate: u32,
    /// Workers
    #[arg(long, value_name = "N", default_value = "4")]
    workers: NonZeroUsize,
    /// Concurrent sequences of a worker
    #[arg(long, value_name = "N", default_value = "64")]
    batch: NonZeroUsize,
    /// Memory of the KV cache of a worker in MiB [default: as `tritmill worker`]
    #[arg(long, value_name = "MIB")]
    kv_memory: Option<u64>,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    run: RunOptions,
    #[command(flatten)]
    servers: Servers,
}

/// A way to run the jobs.
struct Variant<'a> {
    /// Whether all jobs are submitted together.
    together: bool,
    /// Folder of KV blocks.
    folder: Option<&'a Path>,
    servers: Servers,
    /// Makes the prompts differ from those of the other way.
    seed: u64,
}

/// Measurements of one way.
struct Figures {
    time: Duration,
    usage: Usage,
}

/// Measures and prints.
pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let model = arguments.model.open()?;
    let longest = arguments.tokens.get() + OWN_TOKENS + arguments.generate as usize;
    let context = model.config().context_length;
    ensure!(longest <= context, "{longest} tokens are more than the model's context of {context}");
    let options = EngineOptions {
        max_sequences: arguments.batch.get(),
        kv_bytes: arguments.kv_memory.map(|mib| mib.saturating_mul(1 << 20)),
        ..arguments.run.engine_on_one()?
    };
    let place = tempfile::tempdir().context("cannot make a temporary folder")?;
    let mut plain_servers = arguments.servers.clone();
    let redis = plain_servers.redis.as_deref();
    plain_servers.redis = redis.map(without_shards);
    let servers = arguments.servers.clone();
    let plain = Variant { together: false, folder: None, servers: plain_servers, seed: 1 };
    let ordered = Variant { together: true, folder: Some(place.path()), servers, seed: 2 };
    let runtime = tokio::runtime::Runtime::new().context("cannot start the async runtime")?;
    let (plain, ordered) = runtime.block_on(async {
        let plain = measure(arguments, &model, &options, &plain).await?;
        anyhow::Ok((plain, measure(arguments, &model, &options, &ordered).await?))
    })?;
    print(arguments, &plain, &ordered)
}

/// Returns a URL of Redis without the number of shards among its parameters.
fn without_shards(url: &str) -> String {
    let Some((address, parameters)) = url.split_once('?') else { return url.to_owned() };
    let others: Vec<&str> =
        parameters.split('&').filter(|parameter| !parameter.starts_with("shards=")).collect();
    if others.is_empty() { address.to_owned() } else { format!("{address}?{}", others.join("&")) }
}

/// Runs all jobs on new workers.
async fn measure(
    arguments: &Arguments,
    model: &Arc<Model>,
    options: &EngineOptions,
    way: &Variant<'_>,
) -> anyhow::Result<Figures> {
    let bench = Bench::open(way.servers.needed()?, &options.format.to_string()).await?;
    let vocab_size = model.config().vocab_size as u64;
    let jobs = jobs(arguments, &bench.queue.to_string(), way.seed, vocab_size)?;
    let ids: Vec<JobId> = jobs.iter().map(|job| job.id).collect();
    let measured = tokio::select! {
        figures = answer(arguments, model, options, way, &bench, &jobs) => figures,
        _ = tokio::signal::ctrl_c() => Err(anyhow::anyhow!("interrupted")),
    };
    let cleaned = bench.clean_up(&ids).await;
    let figures = measured?;
    cleaned.map(|()| figures)
}

async fn answer(
    arguments: &Arguments,
    model: &Arc<Model>,
    options: &EngineOptions,
    way: &Variant<'_>,
    bench: &Bench,
    jobs: &[Job],
) -> anyhow::Result<Figures> {
    let client = bench.client();
    match way.together {
        true => client.submit_many(jobs).await?,
        false => {
            for job in jobs {
                client.submit(job.clone()).await?;
            }
        }
    }
    let (committed, mut commits) = mpsc::channel(1024);
    let (stop, stopped) = watch::channel(Stop::No);
    let mut working = JoinSet::new();
    for number in 0..arguments.workers.get() {
        let (worker, device) = worker(number, model, options, way, bench, committed.clone())?;
        working.spawn(worker.run(vec![device], stopped.clone()));
    }
    drop(committed);
    let (started, mut usage, mut ended) = (Instant::now(), Usage::default(), 0);
    while ended < jobs.len() {
        let Some(Committed { settled, usage: of_commit }) = commits.recv().await else {
            bail!("the workers ended")
        };
        ended += settled.len();
        usage.add(of_commit);
        output::note_part(&format!("\r{ended} of {} jobs", jobs.len()));
    }
    note!("");
    let time = started.elapsed();
    // Fails if the workers have ended; their results have the reason.
    let _ = stop.send(Stop::Drain);
    drop(commits);
    while let Some(ended) = working.join_next().await {
        let ended: Result<(), WorkerError> = ended.context("a worker panicked")?;
        ended?;
    }
    let expected = jobs.len() as u64 * u64::from(arguments.generate);
    let tokens = usage.completion_tokens;
    ensure!(tokens == expected, "{tokens} tokens were generated, not {expected}");
    Ok(Figures { time, usage })
}

/// Returns a worker and its device.
fn worker(
    number: usize,
    model: &Arc<Model>,
    options: &EngineOptions,
    way: &Variant<'_>,
    bench: &Bench,
    committed: mpsc::Sender<Committed>,
) -> anyhow::Result<(Worker, Device)> {
    let mut engine = load::engine(model, options)?;
    if let Some(folder) = way.folder {
        engine.use_disk(BlockTiers::open(TierOptions::folder(folder, LIMITS))?);
    }
    let class = engine.backend().numerics_class().to_owned();
    let config = WorkerConfig {
        isa: String::new(),
        queue: bench.queue.clone(),
        owner: format!("bench-{}-{number}", std::process::id()),
        // As in `tritmill worker`.
        slots: options.max_sequences + options.max_sequences.div_ceil(4),
        lease: Duration::from_secs(60),
        drain: Duration::from_secs(1),
        step_limit: Duration::from_secs(600),
        mode: Mode::Service,
    };
    let worker = Worker {
        store: bench.store.clone(),
        dispatcher: bench.dispatcher.clone(),
        operations: None,
        events: None,
        served: Arc::new(ServedModel::new(Arc::clone(model), bench.queue.model.clone(), class)),
        config,
        committed: Some(committed),
        metrics: Arc::new(Metrics::default()),
    };
    Ok((worker, Device { name: options.device.to_string(), engine }))
}

/// Returns the jobs, each with a random system prompt.
fn jobs(
    arguments: &Arguments,
    queue: &str,
    seed: u64,
    vocab_size: u64,
) -> anyhow::Result<Vec<Job>> {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut some = |count: usize| -> Vec<u32> {
        (0..count).map(|_| random.u64(..vocab_size) as u32).collect()
    };
    let prompts: Vec<_> =
        (0..arguments.prompts.get()).map(|_| some(arguments.tokens.get())).collect();
    let own: Vec<_> = (0..arguments.jobs.get()).map(|_| some(OWN_TOKENS)).collect();
    let greedy = Sampling {
        max_tokens: Some(arguments.generate),
        temperature: 0.0,
        ignore_eos: true,
        ..Sampling::default()
    };
    let job = |own: Vec<u32>| {
        let prompt = [prompts[random.usize(..prompts.len())].clone(), own].concat();
        JobBuilder::tokens(queue, prompt).sampling(greedy.clone()).build()
    };
    own.into_iter().map(job).collect::<Result<_, _>>().context("cannot make a job")
}

fn print(arguments: &Arguments, plain: &Figures, ordered: &Figures) -> anyhow::Result<ExitCode> {
    let blocks = arguments.tokens.get() / BLOCK_TOKENS;
    let shared = (arguments.jobs.get() * blocks * BLOCK_TOKENS) as f64;
    let spared = |figures: &Figures| figures.usage.cached_tokens as f64 / shared;
    let rate = |figures: &Figures| arguments.jobs.get() as f64 / figures.time.as_secs_f64();
    // One computation of each is needed.
    let most = 1.0 - arguments.prompts.get() as f64 / arguments.jobs.get() as f64;
    let ratio = rate(ordered) / rate(plain);
    if arguments.json {
        let of =
            |figures: &Figures| json!({ "jobs_per_s": rate(figures), "spared": spared(figures) });
        let json = json!({ "plain": of(plain), "ordered": of(ordered), "ratio": ratio, "spared_max": most });
        output::line(json)?;
        return Ok(ExitCode::SUCCESS);
    }
    output::line(format_args!(
        "{} jobs with {} system prompts of {} tokens, {} workers; at most {:.1} % can be spared",
        arguments.jobs,
        arguments.prompts,
        arguments.tokens,
        arguments.workers,
        100.0 * most
    ))?;
    for (name, figures) in [("plain", plain), ("ordered", ordered)] {
        let (rate, spared) = (rate(figures), 100.0 * spared(figures));
        output::line(format_args!("{name:<8} {rate:8.1} jobs/s  spared {spared:5.1} %"))?;
    }
    output::line(format_args!("ratio    {ratio:8.2}"))?;
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shards_are_taken_out_of_a_url() {
        for (url, expected) in [
            ("redis://host/1", "redis://host/1"),
            ("redis://host?shards=16", "redis://host"),
            ("redis://host/1?shards=16&protocol=resp3", "redis://host/1?protocol=resp3"),
            ("redis://host?a=1&shards=16&b=shards=2", "redis://host?a=1&b=shards=2"),
        ] {
            assert_eq!(without_shards(url), expected);
        }
    }
}
