//! `tritmill bench sampling`: tokens per second of the engine by the sampling parameters, against greedy decoding.

use std::{num::NonZeroUsize, process::ExitCode, time::Instant};

use anyhow::ensure;
use clap::Args;
use serde_json::json;
use tritmill_engine::{
    Engine, Request, SamplingParams,
    load::{self, EngineOptions},
};

use crate::{
    options::{ModelOption, RunOptions},
    output,
};

const EXAMPLES: &str = "\
Examples:
  tritmill bench sampling
  tritmill bench sampling --model /tmp/bitnet-2b --batch 1,8,32 --json
  tritmill bench sampling --model /tmp/bitnet-2b --batch 32 --only 'top_p 0.9,top_k 40'

Each repetition measures all parameters one after another. Every step computes one token of each sequence: drafts are
off. Prints medians, the shares of greedy decoding in the same repetition, and the share of draws with
top_k, top_p, min_p or penalties for which all logits had to be computed. Log-probabilities always need all, on CPUs on the host.
Penalties apply to the prompt and to the answer so far.";

/// Parameters by name; all other ones are the defaults.
type Kind = (&'static str, fn(&mut SamplingParams));

const KINDS: [Kind; 9] = [
    ("greedy", |params| params.temperature = 0.0),
    ("temperature 1", |_| {}),
    ("temperature 0.6", |params| params.temperature = 0.6),
    ("min_p 0.05", |params| params.min_p = 0.05),
    ("top_k 40", |params| params.top_k = 40),
    ("top_p 0.9", |params| params.top_p = 0.9),
    ("top_p 0.9 at 0.6", |params| (params.top_p, params.temperature) = (0.9, 0.6)),
    ("top_p and penalties", |params| {
        (params.top_p, params.repetition_penalty, params.frequency_penalty) = (0.9, 1.1, 0.2);
    }),
    ("logprobs 5", |params| params.logprobs = Some(5)),
];

/// Arguments of `bench sampling`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct Arguments {
    #[command(flatten)]
    model: ModelOption,
    /// Concurrent sequences; one measurement for each number
    #[arg(long, value_name = "N,…", value_delimiter = ',', default_values = ["1", "8", "32"])]
    batch: Vec<NonZeroUsize>,
    /// Tokens of each prompt
    #[arg(long, value_name = "N", default_value = "16")]
    prompt: NonZeroUsize,
    /// Tokens of each answer
    #[arg(long, value_name = "N", default_value = "48")]
    generate: NonZeroUsize,
    /// Measure these parameters only, as the output names them; greedy decoding always
    #[arg(long, value_name = "NAME,…", value_delimiter = ',', value_parser = KINDS.map(|(name, _)| name))]
    only: Vec<String>,
    /// Repetitions
    #[arg(long, value_name = "N", default_value = "3")]
    repetitions: NonZeroUsize,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    run: RunOptions,
}

/// Tokens per second of one kind in each repetition, and their shares of greedy decoding.
#[derive(Default)]
struct Row {
    rates: Vec<f64>,
    shares: Vec<f64>,
    /// Draws for which all logits had to be computed, and all draws.
    undecided: (u64, u64),
}

/// Measures and prints.
pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let model = arguments.model.open()?;
    let (prompt, generate) = (arguments.prompt.get(), arguments.generate.get());
    let (tokens, context) = (prompt + generate, model.config().context_length);
    ensure!(tokens <= context, "{tokens} tokens are more than the model's context of {context}");
    let most = arguments.batch.iter().map(|batch| batch.get()).max().unwrap_or(1);
    let one = arguments.run.engine_on_one()?;
    let options = EngineOptions { max_sequences: most, draft_tokens: 0, ..one };
    let mut engine = load::engine(&model, &options)?;
    let vocab_size = model.config().vocab_size;
    if !arguments.json {
        output::line(format_args!("{}, {} tokens per answer", model.name(), generate))?;
        output::line("batch   parameters            tokens/s   of greedy   all logits")?;
    }
    let wants = |name: &str| {
        let only = &arguments.only;
        only.is_empty() || name == KINDS[0].0 || only.iter().any(|only| only == name)
    };
    let mut all = Vec::new();
    for batch in arguments.batch.iter().map(|batch| batch.get()) {
        let mut rows: [Row; KINDS.len()] = Default::default();
        for repetition in 0..arguments.repetitions.get() {
            let mut greedy = 0.0;
            for ((name, change), row) in
                KINDS.iter().zip(&mut rows).filter(|(kind, _)| wants(kind.0))
            {
                let mut sampling = SamplingParams {
                    max_tokens: generate,
                    ignore_eos: true,
                    seed: repetition as u64,
                    ..SamplingParams::default()
                };
                change(&mut sampling);
                let before = engine.stats();
                let rate = measure(&mut engine, &sampling, (batch, prompt), vocab_size)?;
                let after = engine.stats();
                row.undecided.0 += after.undecided_draws - before.undecided_draws;
                row.undecided.1 += after.generated_tokens - before.generated_tokens;
                if *name == KINDS[0].0 {
                    greedy = rate;
                }
                row.rates.push(rate);
                row.shares.push(rate / greedy);
            }
        }
        for ((name, _), row) in KINDS.iter().zip(&mut rows).filter(|(kind, _)| wants(kind.0)) {
            let (rate, share) = (median(&mut row.rates), median(&mut row.shares));
            let (undecided, draws) = row.undecided;
            let undecided = undecided as f64 / draws.max(1) as f64;
            if arguments.json {
                all.push(json!({
                    "batch": batch, "parameters": name, "tokens_per_s": rate, "of_greedy": share,
                    "all_logits": undecided,
                }));
            } else {
                let (share, undecided) = (100.0 * share, 100.0 * undecided);
                output::line(format_args!(
                    "{batch:>5}   {name:<20} {rate:>9.1}   {share:>6.1} %   {undecided:>7.1} %"
                ))?;
            }
        }
    }
    if arguments.json {
        output::json(json!({ "model": model.name(), "rows": all }))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns the tokens per second of steps in which all sequences decode.
fn measure(
    engine: &mut Engine,
    sampling: &SamplingParams,
    (batch, prompt): (usize, usize),
    vocab_size: usize,
) -> anyhow::Result<f64> {
    for sequence in 0..batch {
        let token = |at: usize| (((sequence * prompt + at) * 7919 + 11) % vocab_size) as u32;
        let sampling =
            SamplingParams { seed: sampling.seed + 1000 * sequence as u64, ..sampling.clone() };
        let prompt = (0..prompt).map(token).collect();
        engine.submit(Request { prompt, sampling, ..Request::default() })?;
    }
    let (mut tokens, mut seconds) = (0, 0.0);
    while !engine.is_idle() {
        let began = Instant::now();
        let report = engine.step(began);
        ensure!(!report.failed, "a step failed");
        if report.decode_tokens == batch {
            tokens += batch;
            seconds += began.elapsed().as_secs_f64();
        }
    }
    Ok(tokens as f64 / seconds)
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
