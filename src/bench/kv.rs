//! `tritmill bench kv`: the first token of a long prompt, computed and from KV blocks on disk.

use std::{
    path::PathBuf,
    process::ExitCode,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};
use clap::Args;
use serde_json::json;
use tritmill_engine::{
    Engine, Event, Output, Request, SamplingParams,
    files::Model,
    kv::{
        BLOCK_TOKENS,
        disk::{BlockTiers, FolderLimits, TierOptions},
    },
    load::{self, EngineOptions},
};

use crate::{
    options::{ModelOption, RunOptions},
    output,
};

const EXAMPLES: &str = "\
Examples:
  tritmill bench kv --model /tmp/bitnet-2b --prompt 2000
  tritmill bench kv --kv-cache-dir /mnt/disk/test --json

Prints the time to the first token of prompts that are computed, and of the same prompts in a new engine that reads
their KV blocks from disk; medians. The files are probably in the system's memory when they are read.";

/// No limits: the files of a run are few.
const LIMITS: FolderLimits = FolderLimits { bytes_max: u64::MAX, free_min: 1 << 30 };
/// Time limit for the writes.
const WRITTEN_WITHIN: Duration = Duration::from_secs(60);

/// Arguments of `bench kv`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct Arguments {
    #[command(flatten)]
    model: ModelOption,
    /// Tokens of each prompt; all prompts differ from their first token on
    #[arg(long, value_name = "N", default_value = "400")]
    prompt: usize,
    /// Number of prompts
    #[arg(long, value_name = "N", default_value = "5", value_parser = clap::value_parser!(u16).range(1..))]
    repetitions: u16,
    /// Folder for the blocks [default: a temporary one]
    #[arg(long, value_name = "DIR")]
    kv_cache_dir: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    run: RunOptions,
}

/// Measures and prints.
pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let model = arguments.model.open()?;
    let context = model.config().context_length;
    let blocks = arguments.prompt.saturating_sub(1) / BLOCK_TOKENS;
    ensure!(blocks > 0, "--prompt must be above {BLOCK_TOKENS}");
    ensure!(arguments.prompt < context, "the model's context has {context} tokens");
    let options = arguments.run.engine_on_one()?;
    let temporary = tempfile::tempdir().context("cannot make a temporary folder")?;
    let folder = arguments.kv_cache_dir.as_deref().unwrap_or(temporary.path());
    let disk = BlockTiers::open(TierOptions::folder(folder, LIMITS))?;
    let mut computed = Vec::new();
    let mut first = engine(&model, &options, &disk)?;
    let (prompts, vocab_size) = (arguments.repetitions, model.config().vocab_size as u64);
    // The first prompt warms up.
    for index in 0..=prompts {
        let prompt = prompt(u64::from(index), arguments.prompt, vocab_size);
        let (time, output) = answer(&mut first, prompt.clone())?;
        ensure!(output.cached_tokens == 0, "the folder has these prompts already");
        note!("prompt {index} of {prompts}: computed in {:.3} s", time.as_secs_f64());
        computed.push(time);
        // Written because a second request uses them.
        answer(&mut first, prompt)?;
        let (began, needed) = (Instant::now(), (u64::from(index) + 1) * blocks as u64);
        while disk.stats().written < needed {
            ensure!(began.elapsed() < WRITTEN_WITHIN, "the blocks were not written");
            std::thread::sleep(Duration::from_millis(5));
            // Only a step of the engine hands over more blocks.
            answer(&mut first, vec![1])?;
        }
    }
    drop(first);
    let mut second = engine(&model, &options, &disk)?;
    let (mut read, mut held) = (Vec::new(), Vec::new());
    for index in 0..=prompts {
        let prompt = prompt(u64::from(index), arguments.prompt, vocab_size);
        let (time, output) = answer(&mut second, prompt.clone())?;
        ensure!(
            output.cached_tokens == blocks * BLOCK_TOKENS,
            "{} of {} tokens were read",
            output.cached_tokens,
            blocks * BLOCK_TOKENS
        );
        read.push(time);
        let (time, output) = answer(&mut second, prompt)?;
        ensure!(output.cached_tokens >= blocks * BLOCK_TOKENS, "the blocks left the memory");
        held.push(time);
    }
    let [computed, read, held] = [computed, read, held].map(median);
    let ratio = computed / read;
    match arguments.json {
        true => output::json(json!({
            "prompt_tokens": arguments.prompt, "block_bytes": second.backend().block_bytes(),
            "blocks": blocks, "computed_s": computed, "read_s": read, "in_memory_s": held,
            "ratio": ratio,
        }))?,
        false => output::line(format_args!(
            "first token of {} tokens: computed {computed:.3} s, from disk {read:.4} s ({} a block), from memory \
             {held:.4} s: disk {ratio:.1} times as fast as computed",
            arguments.prompt,
            output::bytes(second.backend().block_bytes() as u64)
        ))?,
    }
    Ok(ExitCode::SUCCESS)
}

fn engine(
    model: &Arc<Model>,
    options: &EngineOptions,
    disk: &BlockTiers,
) -> anyhow::Result<Engine> {
    let mut engine = load::engine(model, options)?;
    engine.use_disk(disk.clone());
    Ok(engine)
}

/// Returns a prompt that differs from others in every token.
fn prompt(index: u64, tokens: usize, vocab_size: u64) -> Vec<u32> {
    let token = |at: u64| {
        let mixed = (index << 32 | at).wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 33;
        (mixed % vocab_size) as u32
    };
    (0..tokens as u64).map(token).collect()
}

/// Returns the time until a request's only token, and its output.
fn answer(engine: &mut Engine, prompt: Vec<u32>) -> anyhow::Result<(Duration, Output)> {
    let sampling = SamplingParams { ignore_eos: true, ..SamplingParams::greedy(1) };
    let started = Instant::now();
    engine.submit(Request { prompt, sampling, ..Request::default() })?;
    loop {
        let began = Instant::now();
        let report = engine.step(began);
        engine.record_time(&report, began.elapsed());
        for event in report.events {
            match event {
                Event::Finished { output, .. } => return Ok((started.elapsed(), output)),
                Event::Failed { error, .. } => return Err(error.into()),
                Event::Delta { .. } => {}
            }
        }
    }
}

/// Returns the median of all but the first time, in seconds.
fn median(times: Vec<Duration>) -> f64 {
    let mut seconds: Vec<f64> = times[1..].iter().map(Duration::as_secs_f64).collect();
    seconds.sort_by(f64::total_cmp);
    seconds[seconds.len() / 2]
}
