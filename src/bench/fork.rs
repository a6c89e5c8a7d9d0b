//! `tritmill bench fork`: how long forks of an engine and of its requests take, and their memory.

use std::{
    collections::BTreeMap,
    num::NonZeroUsize,
    process::ExitCode,
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};
use clap::Args;
use serde_json::json;
use tritmill_engine::{
    Engine, Event, Fork, Request, RequestId, SamplingParams,
    kv::BLOCK_TOKENS,
    load::{self, EngineOptions},
};

use crate::{
    options::{ModelOption, RunOptions},
    output,
};

const EXAMPLES: &str = "\
Examples:
  tritmill bench fork
  tritmill bench fork --model /tmp/bitnet-2b --tokens 2048 --json

Prints medians, and the KV memory that a fork adds after a step of both engines. Prompts that are longer than the
model's context allows are divided into several. First it checks that forks give the same tokens as their original.";

/// Tokens of each answer: the forks of a run are made while they are generated.
const ANSWER_TOKENS: usize = 24;

/// Arguments of `bench fork`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct Arguments {
    #[command(flatten)]
    model: ModelOption,
    /// Tokens of the sequences of the engine, all together
    #[arg(long, value_name = "N", default_value = "2048")]
    tokens: NonZeroUsize,
    /// Forks of each kind
    #[arg(long, value_name = "N", default_value = "20")]
    repetitions: NonZeroUsize,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    run: RunOptions,
}

/// Times of forks, and the KV blocks that the last one added.
struct Measured {
    name: &'static str,
    times: Vec<Duration>,
    blocks_added: usize,
}

impl Measured {
    fn new(name: &'static str) -> Self {
        Self { name, times: Vec::new(), blocks_added: 0 }
    }

    fn median_ms(&self) -> f64 {
        let mut times = self.times.clone();
        times.sort();
        times[times.len() / 2].as_secs_f64() * 1000.0
    }

    fn longest_ms(&self) -> f64 {
        self.times.iter().max().map_or(0.0, |time| time.as_secs_f64() * 1000.0)
    }
}

/// Measures and prints.
pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let model = arguments.model.open()?;
    let longest = model.config().context_length.saturating_sub(ANSWER_TOKENS);
    ensure!(longest > BLOCK_TOKENS, "the model's context is too short");
    let tokens = arguments.tokens.get();
    let sequences = tokens.div_ceil(longest);
    let one = arguments.run.engine_on_one()?;
    let options = EngineOptions { max_sequences: 2 * sequences.max(1), ..one };
    let mut original = load::engine(&model, &options)?;
    let ids = start(&mut original, (tokens, sequences), model.config().vocab_size)?;
    let before = original.stats().blocks_used;
    let [mut shared, mut deep, mut of_requests, mut copies] =
        ["engine, shared", "engine, deep", "requests, shared", "requests, deep"].map(Measured::new);
    for _ in 0..arguments.repetitions.get() {
        let mut fork = timed(&mut shared, || original.fork(Fork::Shared))?;
        timed(&mut of_requests, || fork_requests(&mut fork, &ids, Fork::Shared))?;
        of_requests.blocks_added = fork.stats().blocks_used - before;
        // Requests of the fork release what they hold when it is dropped.
        fork = original.fork(Fork::Shared)?;
        timed(&mut copies, || fork_requests(&mut fork, &ids, Fork::Deep))?;
        copies.blocks_added = fork.stats().blocks_used - before;
        drop(fork);
        let fork = timed(&mut deep, || original.fork(Fork::Deep))?;
        deep.blocks_added = fork.stats().blocks_used;
    }
    shared.blocks_added = check(&mut original, before)?;
    let block_bytes = original.backend().block_bytes();
    let all = [shared, deep, of_requests, copies];
    if arguments.json {
        let rows = all.iter().map(|row| {
            json!({
                "fork": row.name, "median_ms": row.median_ms(), "longest_ms": row.longest_ms(),
                "kv_bytes_added": row.blocks_added * block_bytes,
            })
        });
        output::json(json!({
            "model": model.name(), "tokens": tokens, "sequences": sequences,
            "kv_bytes": before * block_bytes, "forks": rows.collect::<Vec<_>>(),
        }))?;
        return Ok(ExitCode::SUCCESS);
    }
    let size = |blocks: usize| output::bytes((blocks * block_bytes) as u64);
    let (name, kv) = (model.name(), size(before));
    output::line(format_args!(
        "{name}: {tokens} tokens in {sequences} sequences, {kv} of KV blocks"
    ))?;
    output::line("fork               median ms   longest ms   KV memory added")?;
    for row in &all {
        let (median, longest) = (row.median_ms(), row.longest_ms());
        let share = 100.0 * row.blocks_added as f64 / before as f64;
        let added = size(row.blocks_added);
        output::line(format_args!(
            "{:<16} {median:>11.3} {longest:>12.3}   {added} ({share:.1} %)",
            row.name
        ))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Submits prompts of `tokens` tokens together and computes them.
fn start(
    engine: &mut Engine,
    (tokens, sequences): (usize, usize),
    vocab_size: usize,
) -> anyhow::Result<Vec<RequestId>> {
    let sampling = SamplingParams { ignore_eos: true, ..SamplingParams::greedy(ANSWER_TOKENS) };
    let mut ids = Vec::new();
    for sequence in 0..sequences {
        let (first, end) = (sequence * tokens / sequences, (sequence + 1) * tokens / sequences);
        let prompt = (first..end).map(|at| ((at * 7919 + 11) % vocab_size) as u32).collect();
        let sampling = sampling.clone();
        ids.push(engine.submit(Request { prompt, sampling, ..Request::default() })?);
    }
    let mut waiting = sequences;
    while waiting > 0 {
        let report = engine.step(Instant::now());
        ensure!(!report.failed, "a step failed");
        let stats = engine.stats();
        // Every sequence runs, and the last step had no prefill chunk.
        waiting = usize::from(report.prefill_tokens > 0 || stats.running < sequences);
        let ended = report.events.iter().any(|event| !matches!(event, Event::Delta { .. }));
        ensure!(!ended, "the KV cache has too few blocks for these prompts and their answers");
    }
    Ok(ids)
}

fn fork_requests(
    engine: &mut Engine,
    ids: &[RequestId],
    kind: Fork,
) -> Result<(), tritmill_engine::ForkError> {
    ids.iter().try_for_each(|id| engine.fork_request(*id, kind).map(drop))
}

/// Calls `fork` and notes how long it took.
fn timed<T, E: std::error::Error + Send + Sync + 'static>(
    measured: &mut Measured,
    fork: impl FnOnce() -> Result<T, E>,
) -> anyhow::Result<T> {
    let began = Instant::now();
    let forked = fork();
    measured.times.push(began.elapsed());
    forked.context("cannot fork")
}

/// Runs the engine and a fork of each kind to the end and compares their answers. Returns the KV blocks that the
/// shared one has added after a step of both.
fn check(original: &mut Engine, before: usize) -> anyhow::Result<usize> {
    let mut forks = [original.fork(Fork::Shared)?, original.fork(Fork::Deep)?];
    let mut answers = BTreeMap::new();
    step(original, &mut answers)?;
    step(&mut forks[0], &mut BTreeMap::new())?;
    let added = original.stats().blocks_used.saturating_sub(before);
    while !original.is_idle() {
        step(original, &mut answers)?;
    }
    for fork in &mut forks {
        let mut forked = BTreeMap::new();
        while !fork.is_idle() {
            step(fork, &mut forked)?;
        }
        ensure!(forked == answers, "a fork gave other tokens than its original");
    }
    Ok(added)
}

/// Runs a step and notes the tokens of finished requests.
fn step(engine: &mut Engine, answers: &mut BTreeMap<RequestId, Vec<u32>>) -> anyhow::Result<()> {
    for event in engine.step(Instant::now()).events {
        match event {
            Event::Finished { id, output } => {
                answers.insert(id, output.choices.into_iter().flat_map(|c| c.tokens).collect());
            }
            Event::Failed { error, .. } => return Err(error.into()),
            Event::Delta { .. } => {}
        }
    }
    Ok(())
}
