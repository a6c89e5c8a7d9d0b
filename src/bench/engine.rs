//! `tritmill bench engine`: tokens per second of one model on this machine.

use std::{num::NonZeroUsize, process::ExitCode};

use anyhow::ensure;
use clap::Args;
use serde_json::json;
use tritmill_engine::{
    backend::{LogitsFor, cuda::FeatureReport},
    load,
    measure::{self, MemoryReads, Phase, Speed, Workload},
};
use tritmill_worker::machine::{self, Machine};

use crate::{
    options::{ModelOption, RunOptions},
    output,
};

const EXAMPLES: &str = "\
Examples:
  tritmill model synth --shape bitnet-2b -o /tmp/bitnet-2b
  tritmill bench engine --model /tmp/bitnet-2b --threads 2 --batch 1,4,16
  tritmill bench engine --model /tmp/bitnet-2b --format tl2 --prompt 512 --generate 0 --json

Prints the median of the repetitions. Tokens per second count all sequences together.";

/// Arguments of `bench engine`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct Arguments {
    #[command(flatten)]
    model: ModelOption,
    /// Sequences of a step; one measurement each
    #[arg(long, value_name = "N,…", value_delimiter = ',', default_value = "1,4,8,16,32")]
    batch: Vec<NonZeroUsize>,
    /// Tokens of each prompt
    #[arg(long, value_name = "N", default_value = "128")]
    prompt: NonZeroUsize,
    /// Tokens to decode after it
    #[arg(long, value_name = "N", default_value_t = 64)]
    generate: usize,
    /// Compute all logits, as for sampling from the whole distribution, instead of the largest only, as
    /// for greedy decoding
    #[arg(long)]
    all_logits: bool,
    /// Repetitions of each measurement
    #[arg(long, value_name = "N", default_value = "3")]
    repetitions: NonZeroUsize,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    run: RunOptions,
}

/// Measures and prints the results.
pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let model = arguments.model.open()?;
    let workload = Workload {
        batches: arguments.batch.iter().map(|batch| batch.get()).collect(),
        prompt_tokens: arguments.prompt.get(),
        generate_tokens: arguments.generate,
        logits: if arguments.all_logits { LogitsFor::Last } else { LogitsFor::largest(1) },
        repetitions: arguments.repetitions.get(),
    };
    let context = model.config().context_length;
    let longest = workload.prompt_tokens.saturating_add(workload.generate_tokens);
    ensure!(longest <= context, "{longest} tokens are more than the model's context of {context}");
    let options = arguments.run.engine_on_one()?;
    let mut backend = load::backend(&model, &options, workload.block_count())?;
    let (kernels, threads) = (options.kernels(), options.threads());
    let reads = MemoryReads::new(threads, Machine::read().memory_available_bytes);
    let mut rates = vec![reads.bytes_per_s()];
    let speeds = measure::run(backend.as_mut(), &workload, |repetition| {
        eprintln!("repetition {} of {}", repetition + 1, workload.repetitions);
        rates.push(reads.bytes_per_s());
    })?;
    rates.push(reads.bytes_per_s());
    rates.sort_by(f64::total_cmp);
    let bandwidth = rates[rates.len() / 2];
    let weight_bytes = backend.weight_bytes();
    let features = backend.features();
    let resident_bytes =
        machine::resident_bytes().map(|bytes| bytes.saturating_sub(reads.size_bytes() as u64));
    let on_cpu = options.device.is_cpu();
    // All logits take the head itself, not the copy that is counted; a GPU has memory of its own.
    let step_bytes = weight_bytes.filter(|_| !arguments.all_logits && on_cpu);
    let share = |s: &Speed| match (s.phase, step_bytes) {
        (Phase::Decode, Some(bytes)) => Some(s.median / s.batch as f64 * bytes as f64 / bandwidth),
        _ => None,
    };
    if arguments.json {
        output::json(json!({
            "model": model.name(),
            "format": options.format.to_string(),
            "isa": kernels,
            "threads": threads,
            "prompt": workload.prompt_tokens,
            "generate": workload.generate_tokens,
            "all_logits": arguments.all_logits,
            "weight_bytes": weight_bytes,
            "resident_bytes": resident_bytes,
            "gpu_features": features.iter().map(feature).collect::<Vec<_>>(),
            "memory_bandwidth_bytes_per_s": bandwidth.round(),
            "rows": speeds.iter().map(|s| row(s, share(s))).collect::<Vec<_>>(),
        }))?;
        return Ok(ExitCode::SUCCESS);
    }
    let (name, format) = (model.name(), options.format);
    output::line(format_args!("{name}, {format}, {kernels}, {threads} threads"))?;
    let size = |bytes: Option<u64>| bytes.map_or_else(|| "unknown".to_owned(), output::bytes);
    let (weights, resident) = (size(weight_bytes.map(|n| n as u64)), size(resident_bytes));
    output::line(format_args!("weights {weights}, resident {resident}"))?;
    let (slowest, fastest) = (rates[0] / 1e9, rates[rates.len() - 1] / 1e9);
    let text = format!("memory reads at {:.1} GB/s ({slowest:.1} … {fastest:.1})", bandwidth / 1e9);
    output::line(text)?;
    output::line(
        "phase     batch   tokens/s  (slowest … fastest)   weights read, of what memory gives",
    )?;
    for s in &speeds {
        let (name, batch) = (s.phase.name(), s.batch);
        let (median, lowest, highest) = (s.median, s.lowest, s.highest);
        let range = format!("({lowest:.1} … {highest:.1})");
        let share = share(s).map_or_else(String::new, |share| format!("{:.0} %", share * 100.0));
        let text = format!("{name:<8} {batch:>6} {median:>10.1}  {range:<21} {share:>6}");
        output::line(text.trim_end())?;
    }
    for report in &features {
        let (name, uses) = (report.feature.name(), report.uses);
        let why = report.given_up.as_deref().unwrap_or("allowed");
        output::line(format_args!("{name:<8} {uses:>8} uses, {why}"))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn feature(report: &FeatureReport) -> serde_json::Value {
    let FeatureReport { feature, uses, given_up } = report;
    json!({ "name": feature.name(), "uses": uses, "given_up": given_up })
}

fn row(speed: &Speed, share: Option<f64>) -> serde_json::Value {
    json!({
        "phase": speed.phase.name(),
        "batch": speed.batch,
        "tokens_per_s": speed.median,
        "tokens_per_s_lowest": speed.lowest,
        "tokens_per_s_highest": speed.highest,
        "weights_share_of_bandwidth": share,
    })
}
