//! `tritmill bench kernels`: the speed of each kernel of a GPU's steps, compared with the device's maximum.

use std::process::ExitCode;

use clap::Args;
use serde_json::{Value, json};
use tritmill_engine::backend::cuda::{
    Peaks,
    roofline::{self, KernelTime, Rooflines, StepTimes},
};

use super::gpu::GpuSteps;
use crate::{options::RunOptions, output};

const EXAMPLES: &str = "\
Examples:
  tritmill bench kernels --model /tmp/bitnet-2b --device cuda:0
  tritmill bench kernels --model /tmp/bitnet-2b --device cuda:0 --batch 16 --prompt 512 --json

Runs each kernel of a decode step at each batch size, and of a prefill step, separately: the launches of all layers,
repeated many times between two synchronizations. Prints the time of a launch, the bytes it must move, the operations
it must do, and its share of the device's rate for the bounding resource. These rates are measured in the same run:
reads and copies of memory, int8 products of tensor cores by mma.sync, multiply-adds of f32.";

/// Arguments of `bench kernels`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct Arguments {
    #[command(flatten)]
    steps: GpuSteps,
    /// Run every kernel once, on little data: to see that it works, not to compare
    #[arg(long)]
    quick: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    run: RunOptions,
}

/// Measures and prints the results.
pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let Arguments { steps, quick, json, run } = arguments;
    let (model, options, workload) = steps.open(run, "single kernels are measured on a GPU")?;
    let found = roofline::measure(&model, options, &workload, *quick)?;
    if *json {
        output::line(as_json(model.name(), steps, &found))?;
        return Ok(ExitCode::SUCCESS);
    }
    print(model.name(), steps, &found)
}

fn as_json(model: &str, measured: &GpuSteps, found: &Rooflines) -> Value {
    let peaks = &found.peaks;
    json!({
        "model": model,
        "device": found.device.name,
        "prompt": measured.prompt,
        "read_bytes_per_s": peaks.read_bytes,
        "copy_bytes_per_s": peaks.copy_bytes,
        "int8_operations_per_s": peaks.int8,
        "f32_operations_per_s": peaks.f32,
        "launch_s": peaks.launch,
        "steps": found.steps.iter().map(|step| json!({
            "phase": step.phase.name(),
            "rows": step.rows,
            "step_s": step.seconds,
            "kernels": step.kernels.iter().map(|k| kernel(k, peaks)).collect::<Vec<_>>(),
        })).collect::<Vec<_>>(),
    })
}

fn kernel(time: &KernelTime, peaks: &Peaks) -> Value {
    let (bound, least) = time.bound(peaks);
    json!({
        "kernel": time.kernel,
        "of": time.of,
        "launches": time.launches,
        "launch_s": time.seconds,
        "bytes": time.cost.bytes,
        "int8_operations": time.cost.int8,
        "f32_operations": time.cost.f32,
        "bound": bound,
        "share": least / time.seconds,
    })
}

fn print(model: &str, measured: &GpuSteps, found: &Rooflines) -> anyhow::Result<ExitCode> {
    let Rooflines { device, peaks, steps } = found;
    output::line(format_args!("{model} on {}, {} tokens before", device.name, measured.prompt))?;
    output::line(format_args!(
        "memory: read {:.0} GB/s, copied {:.0} GB/s (both ways); int8 {:.0} T/s; f32 {:.1} T/s; a launch {:.2} µs",
        peaks.read_bytes / 1e9,
        peaks.copy_bytes / 1e9,
        peaks.int8 / 1e12,
        peaks.f32 / 1e12,
        peaks.launch * 1e6
    ))?;
    for StepTimes { phase, rows, seconds, kernels } in steps {
        output::line(format_args!(
            "\n{} of {rows} rows, {:.0} µs on the device\nkernel                            launches  µs each       MB  T int8  bound   share",
            phase.name(),
            seconds * 1e6
        ))?;
        for time in kernels {
            let (bound, least) = time.bound(peaks);
            let name = format!("{} {}", time.kernel, time.of);
            output::line(format_args!(
                "{name:<34} {:>7} {:>8.2} {:>8.2} {:>7.3}  {bound:<6} {:>5.1} %",
                time.launches,
                time.seconds * 1e6,
                time.cost.bytes as f64 / 1e6,
                time.cost.int8 as f64 / 1e12,
                100.0 * least / time.seconds
            ))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}
