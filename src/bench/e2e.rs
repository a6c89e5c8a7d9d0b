//! `tritmill bench e2e`: the cost of the queue. Runs the same requests through the engine alone and
//! through Redis, Postgres and a worker with an engine of the same size, alternately. With `--http`: the
//! latency of HTTP requests during a batch. With `--overload`: what a service does with ten times its capacity. With
//! `--waves`: bursts of callers beside other work, in six scenarios.

mod counts;
mod gaps;
mod http;
mod overload;
mod service;
mod target;
mod waves;

use std::{
    num::{NonZeroU64, NonZeroUsize},
    process::ExitCode,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail, ensure};
use clap::Args;
use serde_json::json;
use tokio::sync::{mpsc, watch};
use tritmill_client::{Client, JobBuilder};
use tritmill_engine::{
    Engine, Request, SamplingParams,
    files::Model,
    load::{self, EngineOptions},
};
use tritmill_queue::{Job, JobId, QueueName, Sampling};
use tritmill_worker::{Committed, Device, Metrics, Mode, ServedModel, Stop, Worker, WorkerConfig};

use super::queue::Bench;
use crate::{
    kv_tiers::TierArguments,
    options::{BATCH_WAIT_MS, CapacityOptions, ModelOption, RunOptions},
    output,
    servers::Servers,
    worker::seconds,
};

const EXAMPLES: &str = "\
Examples:
  tritmill bench e2e --model /tmp/bitnet-2b --threads 2 --redis redis://… --database postgres://…
  tritmill bench e2e --batch 32 --prompt 64 --generate 128 --json
  tritmill bench e2e --http
  tritmill bench e2e --http --schema
  tritmill bench e2e --gaps --model /tmp/bitnet-2b
  tritmill bench e2e --waves --model /tmp/bitnet-2b
  tritmill bench e2e --waves --prompt 32 --generate 16 --batch-prompt 64 --phase-seconds 5
  tritmill bench e2e --overload --seconds 60
  tritmill bench e2e --overload --redis redis://… --database postgres://… --deadline 20 --json
  tritmill bench e2e --http --batch-lines 0 --batch 128 --kv-memory 2048 --model /tmp/bitnet-2b --device cuda:0

Prints generated tokens per second of the engine alone and of the same requests through the queue, and
their ratio: the median of the repetitions, which alternate.

With --http, it starts its own service without servers and sends bursts of requests during a batch at
priority low, or alone. It prints latencies, failures, the progress of the batch and the memory of the
service: GPU memory with --device cuda:N, else main memory.

With --gaps, it starts the same service and streams one answer after the other, alone and during a batch with
long prompts. It prints the times between tokens, and the tokens per second of the batch alone and beside them.

With --waves, callers come in bursts, and in idle phases between them, whether earlier ones are answered or not: alone,
beside requests of their own kind, and beside a batch of their own tier, without a step target, as usual, and with the window
background. After a phase, as long as it lasted, callers that are still waiting count as not answered. It prints the times to the
first token and between tokens, and what the other work gets done.

With --overload, it starts the same service, or one on the given servers, measures how many requests it answers,
and then offers ten times as many, each with a deadline. It prints the goodput (tokens of answers within the
deadline) beside the capacity, the share of accepted requests that were answered in time, refusals by cause,
and the memory of the service and of Redis. On servers it deletes its jobs at the end.";

/// Arguments of `bench e2e`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct Arguments {
    #[command(flatten)]
    model: ModelOption,
    /// Measure the HTTP API: interactive requests during a batch
    #[arg(long)]
    http: bool,
    /// Measure the HTTP API: times between the tokens of an answer during a batch
    #[arg(long, conflicts_with = "http")]
    gaps: bool,
    /// Measure the HTTP API: bursts of callers beside other work
    #[arg(long, conflicts_with_all = ["http", "gaps"])]
    waves: bool,
    /// With --waves: requests per second in a burst [default: 1.5 in the time of an answer]
    #[arg(long, value_name = "RATE", requires = "waves", value_parser = rate)]
    burst_rate: Option<f64>,
    /// With --waves: requests per second in an idle phase [default: 0.15 in the time of an answer]
    #[arg(long, value_name = "RATE", requires = "waves", value_parser = rate)]
    idle_rate: Option<f64>,
    /// With --waves: what runs beside the callers, separated by commas [default: all six]
    #[arg(long, value_enum, value_name = "NAMES", value_delimiter = ',', requires = "waves")]
    scenarios: Vec<waves::Scenario>,
    /// With --waves: length of a burst, and of an idle phase
    #[arg(long, value_name = "SECONDS", default_value = "20")]
    phase_seconds: NonZeroU64,
    /// With --waves: number of bursts
    #[arg(long, value_name = "N", default_value = "2")]
    cycles: NonZeroUsize,
    /// Measure the HTTP API: ten times as many requests as it can answer, with deadlines
    #[arg(long, conflicts_with_all = ["http", "gaps", "waves"])]
    overload: bool,
    /// With --overload: how long to offer requests
    #[arg(long, value_name = "SECONDS", default_value = "600")]
    seconds: NonZeroU64,
    /// With --overload: deadline of each request, in seconds [default: four times what an answer takes in a full
    /// worker, at least 2]
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    deadline: Option<f64>,
    /// With --gaps and --waves: tokens of each prompt of the batch; all prompts differ
    #[arg(long, value_name = "N", default_value = "1800")]
    batch_prompt: NonZeroUsize,
    /// With --http, --gaps, --waves and --overload: as of `tritmill worker`
    #[arg(long, value_name = "MS", default_value = "150")]
    step_target: u32,
    /// With --http: concurrent requests
    #[arg(long, value_name = "N", default_value = "100")]
    callers: NonZeroUsize,
    /// With --http: callers ask for JSON of a schema, which no answer of this length completes
    #[arg(long, requires = "http")]
    schema: bool,
    /// With --http, --gaps and --waves: lines of the batch; with --http 0 for no batch [default: 10000, with --gaps 60]
    #[arg(long, value_name = "N")]
    batch_lines: Option<usize>,
    /// Concurrent sequences [default: 16; with --http, --gaps, --waves and --overload 64]
    #[arg(long, value_name = "N")]
    batch: Option<NonZeroUsize>,
    /// Memory of the KV cache in MiB [default: as `tritmill worker`]
    #[arg(long, value_name = "MIB")]
    kv_memory: Option<u64>,
    /// Number of requests [default: four times --batch]
    #[arg(long, value_name = "N")]
    jobs: Option<NonZeroUsize>,
    /// Tokens of each prompt; all prompts differ
    #[arg(long, value_name = "N", default_value = "64")]
    prompt: NonZeroUsize,
    /// Tokens to generate per request [default: 64; with --http and --gaps 100, with --waves 24, with --overload 256]
    #[arg(long, value_name = "N")]
    generate: Option<NonZeroUsize>,
    /// Repetitions of both measurements
    #[arg(long, value_name = "N", default_value = "3")]
    repetitions: NonZeroUsize,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    run: RunOptions,
    #[command(flatten)]
    servers: Servers,
}

impl Arguments {
    fn batch(&self) -> NonZeroUsize {
        let is_http = self.http || self.gaps || self.waves || self.overload;
        self.batch.unwrap_or(if is_http { SIXTY_FOUR } else { SIXTEEN })
    }

    fn phase(&self) -> Duration {
        Duration::from_secs(self.phase_seconds.get())
    }

    fn scenarios(&self) -> Vec<waves::Scenario> {
        match self.scenarios.is_empty() {
            true => waves::Scenario::ALL.to_vec(),
            false => self.scenarios.clone(),
        }
    }

    fn batch_lines(&self) -> usize {
        self.batch_lines.unwrap_or(if self.gaps { 60 } else { 10_000 })
    }

    fn capacity(&self) -> CapacityOptions {
        CapacityOptions {
            answer_tokens_max: None,
            control_tokens: false,
            max_sequences: self.batch(),
            kv_memory: self.kv_memory,
            step_target: self.step_target,
            batch_wait: BATCH_WAIT_MS,
            draft_tokens: EngineOptions::default().draft_tokens as u16,
            tiers: TierArguments::default(),
        }
    }

    fn generate(&self) -> NonZeroUsize {
        self.generate.unwrap_or(match self {
            Self { overload: true, .. } => MANY,
            Self { waves: true, .. } => TWENTY_FOUR,
            Self { http: true, .. } | Self { gaps: true, .. } => HUNDRED,
            _ => SIXTY_FOUR,
        })
    }
}

/// Parses requests per second.
fn rate(text: &str) -> Result<f64, String> {
    let rate: f64 = text.parse().map_err(|_| format!("'{text}' is not a number"))?;
    let is_rate = (1e-3..=1e4).contains(&rate);
    is_rate.then_some(rate).ok_or_else(|| "must be between 0.001 and 10000".to_owned())
}

/// Measures and prints the results.
pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    if arguments.http {
        return http::run(arguments);
    }
    if arguments.gaps {
        return gaps::run(arguments);
    }
    if arguments.waves {
        return waves::run(arguments);
    }
    if arguments.overload {
        return overload::run(arguments);
    }
    let servers = arguments.servers.needed()?;
    let model = arguments.model.open()?;
    let context = model.config().context_length;
    let longest = arguments.prompt.get().saturating_add(arguments.generate().get());
    ensure!(longest <= context, "{longest} tokens are more than the model's context of {context}");
    let options = arguments.capacity().apply(arguments.run.engine_on_one()?);
    let work = Work {
        jobs: arguments.jobs.unwrap_or(arguments.batch().saturating_mul(FOUR)).get(),
        prompt: arguments.prompt.get(),
        generate: arguments.generate().get(),
        vocab_size: model.config().vocab_size,
    };
    let runtime = tokio::runtime::Runtime::new().context("cannot start the async runtime")?;
    let mut alone = load::engine(&model, &options)?;
    let (engine_rates, queue_rates) = runtime.block_on(async {
        let bench = Bench::open(servers, &options.format.to_string()).await?;
        let mut fleet = Fleet::start(&bench, &model, &options)?;
        let mut submitted = Vec::new();
        let measured = tokio::select! {
            rates = measure(&mut alone, &mut fleet, &work, arguments, &mut submitted) => rates,
            _ = tokio::signal::ctrl_c() => Err(anyhow::anyhow!("interrupted")),
        };
        let stopped = fleet.stop().await;
        let cleaned = bench.clean_up(&submitted).await;
        let rates = measured?;
        stopped.and(cleaned).map(|()| rates)
    })?;
    print(arguments, &work, engine_rates, queue_rates)
}

const FOUR: NonZeroUsize = NonZeroUsize::new(4).expect("four is not zero");
const SIXTEEN: NonZeroUsize = NonZeroUsize::new(16).expect("sixteen is not zero");
const TWENTY_FOUR: NonZeroUsize = NonZeroUsize::new(24).expect("twenty-four is not zero");
const SIXTY_FOUR: NonZeroUsize = NonZeroUsize::new(64).expect("sixty-four is not zero");
const MANY: NonZeroUsize = NonZeroUsize::new(256).expect("256 is not zero");
const HUNDRED: NonZeroUsize = NonZeroUsize::new(100).expect("a hundred is not zero");

/// The requests of one repetition.
struct Work {
    jobs: usize,
    prompt: usize,
    generate: usize,
    vocab_size: usize,
}

impl Work {
    /// Returns the tokens of prompt `index` of repetition `round`. All prompts differ from their first
    /// block on, so that the prefix cache never hits.
    fn prompt(&self, round: usize, index: usize) -> Vec<u32> {
        let first = (round * self.jobs + index) as u64;
        let token = |position: u64| {
            let mixed = (first << 20 | position).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 33;
            (mixed % self.vocab_size as u64) as u32
        };
        (0..self.prompt as u64).map(token).collect()
    }

    fn rate(&self, time: Duration) -> f64 {
        (self.jobs * self.generate) as f64 / time.as_secs_f64().max(f64::MIN_POSITIVE)
    }
}

async fn measure(
    alone: &mut Engine,
    fleet: &mut Fleet,
    work: &Work,
    arguments: &Arguments,
    submitted: &mut Vec<JobId>,
) -> anyhow::Result<(Vec<f64>, Vec<f64>)> {
    let (mut engine_rates, mut queue_rates) = (Vec::new(), Vec::new());
    // The first round warms up and is not counted.
    for round in 0..=arguments.repetitions.get() {
        note!("repetition {round} of {}", arguments.repetitions);
        let engine_time = tokio::task::block_in_place(|| through_engine(alone, work, round))?;
        let queue_time = fleet.answer(work, round, submitted).await?;
        if round > 0 {
            engine_rates.push(work.rate(engine_time));
            queue_rates.push(work.rate(queue_time));
        }
    }
    Ok((engine_rates, queue_rates))
}

/// Runs all requests through the engine.
fn through_engine(engine: &mut Engine, work: &Work, round: usize) -> anyhow::Result<Duration> {
    let started = Instant::now();
    for index in 0..work.jobs {
        let sampling = SamplingParams { ignore_eos: true, ..SamplingParams::greedy(work.generate) };
        let prompt = work.prompt(2 * round, index);
        engine.submit(Request { prompt, sampling, ..Request::default() })?;
    }
    let before = engine.stats().finished;
    while !engine.is_idle() {
        engine.step(Instant::now());
    }
    let finished = engine.stats().finished - before;
    ensure!(finished == work.jobs as u64, "{finished} of {} requests finished", work.jobs);
    Ok(started.elapsed())
}

/// A worker and a producer on the queue of this run.
struct Fleet {
    client: Client,
    queue: QueueName,
    commits: mpsc::Receiver<Committed>,
    stop: watch::Sender<Stop>,
    working: tokio::task::JoinHandle<Result<(), tritmill_worker::WorkerError>>,
}

impl Fleet {
    fn start(bench: &Bench, model: &Arc<Model>, options: &EngineOptions) -> anyhow::Result<Self> {
        let engine = load::engine(model, options)?;
        let class = engine.backend().numerics_class().to_owned();
        let (committed, commits) = mpsc::channel(1024);
        let (stop, stopped) = watch::channel(Stop::No);
        let worker = Worker {
            store: bench.store.clone(),
            dispatcher: bench.dispatcher.clone(),
            operations: None,
            events: None,
            served: Arc::new(ServedModel::new(Arc::clone(model), bench.queue.model.clone(), class)),
            config: WorkerConfig {
                isa: String::new(),
                queue: bench.queue.clone(),
                owner: format!("bench-{}", std::process::id()),
                // As in `tritmill worker`: more than the concurrent sequences.
                slots: options.max_sequences + options.max_sequences.div_ceil(4),
                lease: Duration::from_secs(15),
                drain: Duration::from_secs(1),
                step_limit: Duration::from_secs(600),
                mode: Mode::Service,
            },
            committed: Some(committed),
            metrics: Arc::new(Metrics::default()),
        };
        let device = Device { name: options.device.to_string(), engine };
        let working = tokio::spawn(worker.run(vec![device], stopped));
        let client = bench.client();
        Ok(Self { client, queue: bench.queue.clone(), commits, stop, working })
    }

    /// Submits all requests and waits until the last one's result is committed.
    async fn answer(
        &mut self,
        work: &Work,
        round: usize,
        submitted: &mut Vec<JobId>,
    ) -> anyhow::Result<Duration> {
        let name = self.queue.to_string();
        let jobs: Vec<Job> = (0..work.jobs)
            .map(|index| {
                let max_tokens = u32::try_from(work.generate).unwrap_or(u32::MAX);
                let greedy = Sampling {
                    max_tokens: Some(max_tokens),
                    temperature: 0.0,
                    ignore_eos: true,
                    ..Sampling::default()
                };
                let prompt = work.prompt(2 * round + 1, index);
                JobBuilder::tokens(&name, prompt).sampling(greedy).build()
            })
            .collect::<Result<_, _>>()?;
        submitted.extend(jobs.iter().map(|job| job.id));
        let started = Instant::now();
        self.client.submit_many(&jobs).await?;
        let (mut ended, mut tokens) = (0, 0);
        while ended < work.jobs {
            let Some(commit) = self.commits.recv().await else { bail!("the worker ended") };
            ended += commit.settled.len();
            tokens += commit.usage.completion_tokens;
        }
        let elapsed = started.elapsed();
        let expected = (work.jobs * work.generate) as u64;
        ensure!(tokens == expected, "{tokens} tokens were generated, not {expected}");
        Ok(elapsed)
    }

    async fn stop(self) -> anyhow::Result<()> {
        // Fails if the worker has ended; its result has the reason.
        let _ = self.stop.send(Stop::Drain);
        Ok(self.working.await.context("the worker panicked")??)
    }
}

/// Returns the median rate; zero without rates.
fn median(mut rates: Vec<f64>) -> f64 {
    rates.sort_by(f64::total_cmp);
    rates.get(rates.len() / 2).copied().unwrap_or(0.0)
}

fn print(
    arguments: &Arguments,
    work: &Work,
    engine: Vec<f64>,
    queue: Vec<f64>,
) -> anyhow::Result<ExitCode> {
    let ratios = engine.iter().zip(&queue).map(|(engine, queue)| queue / engine).collect();
    let (engine, queue, ratio) = (median(engine), median(queue), median(ratios));
    if arguments.json {
        output::json(json!({
            "batch": arguments.batch(), "jobs": work.jobs, "prompt": work.prompt,
            "generate": work.generate, "repetitions": arguments.repetitions,
            "engine_tokens_per_s": engine, "queue_tokens_per_s": queue, "ratio": ratio,
        }))?;
    } else {
        output::line(format_args!(
            "{} requests of {} + {} tokens, {} at once: engine {engine:.1} tokens/s, through the \
             queue {queue:.1}, {:.1} %",
            work.jobs,
            work.prompt,
            work.generate,
            arguments.batch(),
            100.0 * ratio
        ))?;
    }
    Ok(ExitCode::SUCCESS)
}
