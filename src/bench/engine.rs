//! `tritmill bench engine`: tokens per second of one model on this machine.

use std::{io, num::NonZeroUsize, process::ExitCode, sync::Arc};

use anyhow::ensure;
use clap::Args;
use serde_json::json;
use tritmill_engine::{
    backend::{Backend, LogitsFor, cuda::FeatureReport},
    files::Model,
    load::{self, EngineOptions},
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
  tritmill bench engine --model /tmp/bitnet-2b --batch 16 --prompt 3900 --shared 3500 --kv q8
  tritmill bench engine --model bitnet-embedding.gguf --batch 1,32 --prompt 128

Prints the median of the repetitions. Tokens per second count all sequences together. Of embedding models, the one phase is
embed: a batch is texts that are embedded at once, each of --prompt tokens.";

/// Arguments of `bench engine`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct Arguments {
    #[command(flatten)]
    model: ModelOption,
    /// Sequences of a step, or texts at once; one measurement each
    #[arg(long, value_name = "N,…", value_delimiter = ',', default_value = "1,4,8,16,32")]
    batch: Vec<NonZeroUsize>,
    /// Tokens of each prompt
    #[arg(long, value_name = "N", default_value = "128")]
    prompt: NonZeroUsize,
    /// Leading tokens that all prompts have in common: computed once, and kept once
    #[arg(long, value_name = "N", default_value_t = 0)]
    shared: usize,
    /// Tokens to decode after it; embedding models decode none
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
    let embeds = model.config().pooling.is_some();
    let workload = Workload {
        batches: arguments.batch.iter().map(|batch| batch.get()).collect(),
        prompt_tokens: arguments.prompt.get(),
        shared_tokens: arguments.shared,
        generate_tokens: if embeds { 0 } else { arguments.generate },
        logits: if arguments.all_logits { LogitsFor::Last } else { LogitsFor::largest(1) },
        repetitions: arguments.repetitions.get(),
    };
    let context = model.config().context_length;
    let longest = workload.prompt_tokens.saturating_add(workload.generate_tokens);
    ensure!(longest <= context, "{longest} tokens are more than the model's context of {context}");
    ensure!(arguments.shared < arguments.prompt.get(), "--shared must be below --prompt");
    ensure!(arguments.shared == 0 || !embeds, "embedding models share nothing: no --shared");
    let options = arguments.run.engine_on_one()?;
    let measured = measure(&model, &options, &workload)?;
    let share = |s: &Speed| match (s.phase, measured.weight_bytes) {
        // All logits take the head itself, not the copy that is counted; a GPU has memory of its own.
        (Phase::Decode, Some(bytes)) if !arguments.all_logits && options.device.is_cpu() => {
            Some(s.median / s.batch as f64 * bytes as f64 / measured.bandwidth())
        }
        _ => None,
    };
    let report = Report {
        name: model.name(),
        options: &options,
        workload: &workload,
        measured: &measured,
        rows: measured.speeds.iter().map(|speed| (speed, share(speed))).collect(),
    };
    match arguments.json {
        true => report.print_json(arguments.all_logits)?,
        false => report.print()?,
    }
    Ok(ExitCode::SUCCESS)
}

/// What was measured.
struct Measured {
    speeds: Vec<Speed>,
    /// Bytes per second of memory, ascending: before, between and after the repetitions.
    memory_rates: Vec<f64>,
    weight_bytes: Option<usize>,
    resident_bytes: Option<u64>,
    features: Vec<FeatureReport>,
}

impl Measured {
    /// Returns the median of the memory's rates.
    fn bandwidth(&self) -> f64 {
        self.memory_rates[self.memory_rates.len() / 2]
    }
}

/// Loads the model and measures it, in turns with the memory.
fn measure(
    model: &Arc<Model>,
    options: &EngineOptions,
    workload: &Workload,
) -> anyhow::Result<Measured> {
    let reads = MemoryReads::new(options.threads(), Machine::read().memory_available_bytes);
    let mut memory_rates = vec![reads.bytes_per_s()];
    let progress = |repetition| {
        note!("repetition {} of {}", repetition + 1, workload.repetitions);
        memory_rates.push(reads.bytes_per_s());
    };
    let (speeds, of_backend) = if model.config().pooling.is_some() {
        let max_sequences = workload.batches.iter().max().copied().unwrap_or(1);
        let mut engine = load::engine(model, &EngineOptions { max_sequences, ..*options })?;
        (measure::texts(&mut engine, workload, progress)?, OfBackend::read(engine.backend()))
    } else {
        let mut backend = load::backend(model, options, workload.block_count())?;
        let speeds = measure::run(backend.as_mut(), workload, progress)?;
        (speeds, OfBackend::read(backend.as_ref()))
    };
    memory_rates.push(reads.bytes_per_s());
    memory_rates.sort_by(f64::total_cmp);
    let OfBackend { weight_bytes, features, resident_bytes } = of_backend;
    let resident_bytes =
        resident_bytes.map(|bytes| bytes.saturating_sub(reads.size_bytes() as u64));
    Ok(Measured { speeds, memory_rates, weight_bytes, resident_bytes, features })
}

/// What is known as long as a backend is loaded.
struct OfBackend {
    weight_bytes: Option<usize>,
    features: Vec<FeatureReport>,
    /// Memory of the process.
    resident_bytes: Option<u64>,
}

impl OfBackend {
    fn read(backend: &dyn Backend) -> Self {
        Self {
            weight_bytes: backend.weight_bytes(),
            features: backend.features(),
            resident_bytes: machine::resident_bytes(),
        }
    }
}

/// What is printed.
struct Report<'a> {
    name: &'a str,
    options: &'a EngineOptions,
    workload: &'a Workload,
    measured: &'a Measured,
    /// Speeds, and of decodes the share of what memory gives.
    rows: Vec<(&'a Speed, Option<f64>)>,
}

impl Report<'_> {
    /// Returns the texts per second of a speed of embedding.
    fn texts_per_s(&self, speed: &Speed) -> Option<f64> {
        let is_of_texts = speed.phase == Phase::Embed;
        is_of_texts.then(|| speed.median / self.workload.prompt_tokens as f64)
    }

    fn print_json(&self, all_logits: bool) -> io::Result<()> {
        let row = |(speed, share): &(&Speed, Option<f64>)| {
            json!({
                "phase": speed.phase.name(),
                "batch": speed.batch,
                "tokens_per_s": speed.median,
                "tokens_per_s_lowest": speed.lowest,
                "tokens_per_s_highest": speed.highest,
                "texts_per_s": self.texts_per_s(speed),
                "weights_share_of_bandwidth": share,
            })
        };
        let Measured { weight_bytes, resident_bytes, features, .. } = self.measured;
        output::json(json!({
            "model": self.name,
            "format": self.options.format.to_string(),
            "isa": self.options.kernels(),
            "threads": self.options.threads(),
            "prompt": self.workload.prompt_tokens,
            "generate": self.workload.generate_tokens,
            "all_logits": all_logits,
            "weight_bytes": weight_bytes,
            "resident_bytes": resident_bytes,
            "gpu_features": features.iter().map(feature).collect::<Vec<_>>(),
            "memory_bandwidth_bytes_per_s": self.measured.bandwidth().round(),
            "rows": self.rows.iter().map(row).collect::<Vec<_>>(),
        }))
    }

    fn print(&self) -> io::Result<()> {
        let Measured { memory_rates, weight_bytes, resident_bytes, features, .. } = self.measured;
        let (format, kernels) = (self.options.format, self.options.kernels());
        let (name, threads) = (self.name, self.options.threads());
        output::line(format_args!("{name}, {format}, {kernels}, {threads} threads"))?;
        let size = |bytes: Option<u64>| bytes.map_or_else(|| "unknown".to_owned(), output::bytes);
        let (weights, resident) = (size(weight_bytes.map(|n| n as u64)), size(*resident_bytes));
        output::line(format_args!("weights {weights}, resident {resident}"))?;
        let bandwidth = self.measured.bandwidth() / 1e9;
        let (slowest, fastest) =
            (memory_rates[0] / 1e9, memory_rates[memory_rates.len() - 1] / 1e9);
        output::line(format_args!(
            "memory reads at {bandwidth:.1} GB/s ({slowest:.1} … {fastest:.1})"
        ))?;
        let is_of_texts = self.rows.iter().any(|(speed, _)| speed.phase == Phase::Embed);
        let last = if is_of_texts { "texts/s" } else { "weights read, of what memory gives" };
        output::line(format_args!("phase     batch   tokens/s  (slowest … fastest)   {last}"))?;
        for (speed, share) in &self.rows {
            let (name, batch) = (speed.phase.name(), speed.batch);
            let (median, lowest, highest) = (speed.median, speed.lowest, speed.highest);
            let range = format!("({lowest:.1} … {highest:.1})");
            let last = match (self.texts_per_s(speed), share) {
                (Some(texts), _) => format!("{texts:.2}"),
                (None, Some(share)) => format!("{:.0} %", share * 100.0),
                (None, None) => String::new(),
            };
            let text = format!("{name:<8} {batch:>6} {median:>10.1}  {range:<21} {last:>6}");
            output::line(text.trim_end())?;
        }
        for report in features {
            let (name, uses) = (report.feature.name(), report.uses);
            let why = report.given_up.as_deref().unwrap_or("allowed");
            output::line(format_args!("{name:<8} {uses:>8} uses, {why}"))?;
        }
        Ok(())
    }
}

fn feature(report: &FeatureReport) -> serde_json::Value {
    let FeatureReport { feature, uses, given_up } = report;
    json!({ "name": feature.name(), "uses": uses, "given_up": given_up })
}
