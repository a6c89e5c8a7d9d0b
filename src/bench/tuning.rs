//! `tritmill bench tuning`: other values of the constants that choose a GPU's kernels, measured in one process.

use std::{num::NonZeroUsize, process::ExitCode};

use anyhow::{bail, ensure};
use clap::Args;
use serde_json::json;
use tritmill_engine::{
    backend::{
        LogitsFor,
        cuda::{
            CudaOptions, KvBlocks,
            tuning::{self, Trial},
        },
    },
    load::DeviceChoice,
    measure::Workload,
};

use crate::{
    options::{ModelOption, RunOptions},
    output,
};

const EXAMPLES: &str = "\
Examples:
  tritmill bench tuning --model /tmp/bitnet-2b --device cuda:0
  tritmill bench tuning --model /tmp/bitnet-2b --device cuda:0 --batch 64,256 --prompt 512 --json

Loads the model once. Changes one constant at a time and measures decode steps at each batch, or prefill steps:
  split_tasks      attention tasks per multiprocessor up to which a decode's attention is split over blocks
  one_digit_rows   rows from which the screen of the head uses one digit instead of two
  few_rows         rows up to which linears use the kernels for few rows
  large_tile_rows  rows from which linears use the larger tiles
  step_rows        rows of a prefill step
Every value gives the same tokens. An asterisk marks the default.";

/// Arguments of `bench tuning`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct Arguments {
    #[command(flatten)]
    model: ModelOption,
    /// Sequences of a decode step; one measurement each
    #[arg(long, value_name = "N,…", value_delimiter = ',', default_value = "1,16,64,256")]
    batch: Vec<NonZeroUsize>,
    /// Tokens of each sequence before the step
    #[arg(long, value_name = "N", default_value = "512")]
    prompt: NonZeroUsize,
    /// Measure one step each: to see that it works, not to compare
    #[arg(long)]
    quick: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    run: RunOptions,
}

/// Measures and prints.
pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let DeviceChoice::Cuda(ordinal) = arguments.run.engine_on_one()?.device.resolved() else {
        bail!("tuning needs a GPU: --device cuda:0");
    };
    let model = arguments.model.open()?;
    let context = model.config().context_length;
    ensure!(arguments.prompt.get() < context, "prompts fill the model's context of {context}");
    let workload = Workload {
        batches: arguments.batch.iter().map(|batch| batch.get()).collect(),
        prompt_tokens: arguments.prompt.get(),
        generate_tokens: 1,
        logits: LogitsFor::Largest(1),
        repetitions: 1,
    };
    let RunOptions { kv, head, .. } = arguments.run;
    let options = CudaOptions { ordinal, kv, head, blocks: KvBlocks::UpTo(1) };
    let sweep = tuning::sweep(&model, options, &workload, arguments.quick)?;
    if arguments.json {
        output::line(json!({
            "model": model.name(),
            "device": sweep.device.name,
            "prompt": arguments.prompt,
            "rows": sweep.trials.iter().map(row).collect::<Vec<_>>(),
        }))?;
        return Ok(ExitCode::SUCCESS);
    }
    let (name, device) = (model.name(), &sweep.device.name);
    output::line(format_args!("{name} on {device}, {} tokens before", arguments.prompt))?;
    output::line("constant            value   phase      rows   tokens/s")?;
    for Trial { constant, value, is_default, phase, rows, tokens_per_s } in &sweep.trials {
        let mark = if *is_default { '*' } else { ' ' };
        let phase = phase.name();
        output::line(format_args!(
            "{constant:<16} {value:>8}{mark}  {phase:<8} {rows:>6} {tokens_per_s:>10.0}"
        ))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn row(trial: &Trial) -> serde_json::Value {
    json!({
        "constant": trial.constant,
        "value": trial.value,
        "is_default": trial.is_default,
        "phase": trial.phase.name(),
        "rows": trial.rows,
        "tokens_per_s": trial.tokens_per_s,
    })
}
