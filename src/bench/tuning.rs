//! `tritmill bench tuning`: other values of the constants that choose a GPU's kernels, measured in one process.

use std::{collections::BTreeMap, process::ExitCode};

use clap::Args;
use serde_json::json;
use tritmill_engine::backend::cuda::sweep::{self, Comparison, Trial};

use super::gpu::GpuSteps;
use crate::{options::RunOptions, output};

const EXAMPLES: &str = "\
Examples:
  tritmill bench tuning --model /tmp/bitnet-2b --device cuda:0
  tritmill bench tuning --model /tmp/bitnet-2b --device cuda:0 --batch 64,256 --prompt 512 --json

Loads the model once. Changes one constant at a time and measures decode steps at each batch, or prefill steps:
  short_positions      contexts of decodes up to which one kernel computes scores and values
  short_blocks         blocks per multiprocessor up to which it does
  split_tasks          attention tasks per multiprocessor up to which other decodes are split over blocks
  one_digit_rows       rows from which the screen of the head uses one digit instead of two
  few_rows             rows up to which linears use the kernels for few rows
  large_tile_rows      rows from which linears use the larger tiles
  wgmma_rows           rows from which linears use the products of warpgroups of an H100 or H200
  overlap_rows         rows up to which a kernel may start while the one before it runs
  attention_tile_rows  rows of a sequence from which attention uses tensor cores, with --kv q8
  shared_percent       share of shared memory in a multiprocessor's cache; 0: chosen for each kernel
  step_rows            rows of a prefill step
Every value gives the same tokens. An asterisk marks the default.";

/// Arguments of `bench tuning`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct Arguments {
    #[command(flatten)]
    steps: GpuSteps,
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
    let Arguments { steps, quick, json, run } = arguments;
    let (model, options, workload) = steps.open(run, "tuning needs a GPU")?;
    let (sweep, prompt) = (sweep::sweep(&model, options, &workload, *quick)?, steps.prompt);
    if *json {
        output::json(json!({
            "model": model.name(),
            "device": sweep.device.name,
            "prompt": prompt,
            "rows": sweep.measured.trials.iter().map(row).collect::<Vec<_>>(),
            "best": sweep.measured.best.iter().copied().collect::<BTreeMap<_, _>>(),
            "together": sweep.measured.comparisons.iter().map(together).collect::<Vec<_>>(),
        }))?;
        return Ok(ExitCode::SUCCESS);
    }
    let (name, device) = (model.name(), &sweep.device.name);
    output::line(format_args!("{name} on {device}, prompts of {prompt} tokens"))?;
    output::line("constant            value   phase      rows  context   tokens/s")?;
    for trial in &sweep.measured.trials {
        let Trial { constant, value, is_default, phase, rows, context, tokens_per_s } = trial;
        let mark = if *is_default { '*' } else { ' ' };
        let phase = phase.name();
        output::line(format_args!(
            "{constant:<16} {value:>8}{mark}  {phase:<8} {rows:>6} {context:>8} {tokens_per_s:>10.0}"
        ))?;
    }
    let best: Vec<String> =
        sweep.measured.best.iter().map(|(name, value)| format!("{name} {value}")).collect();
    output::line(format_args!("best values: {}", best.join(", ")))?;
    output::line("phase      rows  context   standard   experimental   best values, tokens/s")?;
    for compared in &sweep.measured.comparisons {
        let Comparison { phase, rows, context, standard, experimental, best } = compared;
        let phase = phase.name();
        output::line(format_args!(
            "{phase:<8} {rows:>6} {context:>8} {standard:>10.0} {experimental:>14.0} {best:>13.0}"
        ))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn together(compared: &Comparison) -> serde_json::Value {
    let Comparison { phase, rows, context, standard, experimental, best } = compared;
    json!({
        "phase": phase.name(), "rows": rows, "context": context, "standard_tokens_per_s": standard,
        "experimental_tokens_per_s": experimental, "best_tokens_per_s": best,
    })
}

fn row(trial: &Trial) -> serde_json::Value {
    json!({
        "constant": trial.constant,
        "value": trial.value,
        "is_default": trial.is_default,
        "phase": trial.phase.name(),
        "rows": trial.rows,
        "context": trial.context,
        "tokens_per_s": trial.tokens_per_s,
    })
}
