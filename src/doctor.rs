//! `tritmill doctor`: checks what this machine has and what is missing.

use std::{fmt::Write as _, process::ExitCode};

use clap::Args;
use serde_json::json;
use tritmill_engine::{
    backend::cuda::{self, CudaLoadError, Devices},
    kernels::{Isa, self_check},
    measure,
};
use tritmill_worker::machine::{self, Machine};

use crate::output;

const EXAMPLES: &str = "\
Examples:
  tritmill doctor
  tritmill doctor --json

Exit code 1 if something that all commands need does not work.";

/// Arguments of `doctor`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct Arguments {
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Instruction set of the kernels [default: the fastest of this machine]
    #[arg(long, env = "TRITMILL_ISA")]
    isa: Option<Isa>,
}

/// A line of the report.
struct Check {
    name: &'static str,
    ok: bool,
    /// Result of the check.
    found: String,
    /// Advice; empty if nothing is to be done.
    advice: String,
}

/// Runs the checks and prints the report.
pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let machine = Machine::read();
    let isas: Vec<Isa> = Isa::ALL.into_iter().filter(|isa| isa.is_available()).collect();
    let chosen = arguments.isa.unwrap_or_else(Isa::detect);
    let bandwidth = measure::memory_bandwidth(machine.cores, machine.memory_available_bytes);
    let peak = measure::product_peak(chosen, machine.cores);
    let folder = std::env::current_dir()?;
    let disk = machine::disk_free_bytes(&folder);
    let gpus = cuda::devices();
    let checks = [
        processor(&isas, chosen),
        kernels(&isas),
        memory(&machine),
        huge_pages(&machine),
        disk_space(disk),
        gpu(&gpus),
    ];
    let ok = checks.iter().all(|check| check.ok);
    if arguments.json {
        output::json(json!({
            "ok": ok,
            "cpu": machine.cpu,
            "cores": machine.cores,
            "isas": isas.iter().map(Isa::to_string).collect::<Vec<_>>(),
            "isa": chosen.to_string(),
            "memory_bytes": machine.memory_bytes,
            "memory_available_bytes": machine.memory_available_bytes,
            "memory_limit_bytes": machine.memory_limit_bytes,
            "memory_bandwidth_bytes_per_s": bandwidth.round(),
            "products_per_s": peak.map(f64::round),
            "huge_pages": machine.huge_pages,
            "disk_free_bytes": disk,
            "cuda": cuda_json(&gpus),
            "checks": checks.iter().map(|check| json!({
                "name": check.name, "ok": check.ok, "found": check.found, "advice": check.advice,
            })).collect::<Vec<_>>(),
        }))?;
    } else {
        print(&machine, bandwidth, peak, &checks)?;
    }
    Ok(if ok { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn print(
    machine: &Machine,
    bandwidth: f64,
    peak: Option<f64>,
    checks: &[Check],
) -> anyhow::Result<()> {
    let cpu = machine.cpu.as_deref().unwrap_or("unknown processor");
    output::line(format_args!("{cpu}, {} cores for this process", machine.cores))?;
    let gb = bandwidth / 1e9;
    let ceiling = gb / 0.5;
    output::line(format_args!(
        "memory reads at {gb:.1} GB/s: with 0.5 GB of weights at most {ceiling:.0} steps/s"
    ))?;
    if let Some(peak) = peak {
        let (peak, ceiling) = (peak / 1e9, peak / 2e9);
        output::line(format_args!(
            "{peak:.0} G int8 products/s: with 2 G weights at most {ceiling:.0} tokens/s"
        ))?;
    }
    output::line("")?;
    for check in checks {
        let mark = if check.ok { "ok     " } else { "MISSING" };
        output::line(format_args!("{mark}  {:<12} {}", check.name, check.found))?;
        if !check.advice.is_empty() {
            output::line(format_args!("         {:<12} → {}", "", check.advice))?;
        }
    }
    output::line("\nTritmill runs without servers: Redis, Postgres and a GPU are optional.")?;
    output::line("Next: tritmill demo")?;
    Ok(())
}

fn processor(isas: &[Isa], chosen: Isa) -> Check {
    let names: Vec<String> = isas.iter().map(Isa::to_string).collect();
    let ok = chosen.is_available();
    let advice = match (ok, Isa::detect()) {
        (false, _) => format!("this machine has no {chosen}: unset TRITMILL_ISA"),
        (true, best) if chosen < best => {
            format!("{best} is available and faster: unset TRITMILL_ISA")
        }
        (true, Isa::Scalar) if cfg!(target_arch = "aarch64") => {
            "the kernels for aarch64 need the dot product instructions of ARMv8.2".to_owned()
        }
        (true, Isa::Scalar) => {
            "an x86-64 processor with AVX2 or AVX-512 is many times faster".to_owned()
        }
        _ => String::new(),
    };
    Check { name: "kernels", ok, found: format!("{chosen} of {}", names.join(", ")), advice }
}

fn kernels(isas: &[Isa]) -> Check {
    let wrong: Vec<String> =
        isas.iter().filter(|isa| !self_check(**isa)).map(Isa::to_string).collect();
    let ok = wrong.is_empty();
    let (found, advice) = if ok {
        ("all kernels agree with the scalar definition".to_owned(), String::new())
    } else {
        let found = format!("{} disagree with the scalar definition", wrong.join(", "));
        (found, "set TRITMILL_ISA=scalar, and please report this machine".to_owned())
    };
    Check { name: "self-check", ok, found, advice }
}

fn memory(machine: &Machine) -> Check {
    let available = machine.memory_available_bytes;
    let found = match (machine.memory_bytes, available) {
        (Some(all), Some(free)) => {
            format!("{}, {} available", output::bytes(all), output::bytes(free))
        }
        _ => "unknown".to_owned(),
    };
    let advice = match available {
        Some(free) if free < 2 << 30 => {
            "a model of 2 B weights takes about 1.5 GiB: free memory, or lower --kv-memory"
                .to_owned()
        }
        _ => String::new(),
    };
    Check { name: "memory", ok: true, found, advice }
}

fn huge_pages(machine: &Machine) -> Check {
    let found = machine.huge_pages.clone().unwrap_or_else(|| "unknown".to_owned());
    let advice = if found == "never" {
        "for faster reads of the weights: echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled"
    } else {
        ""
    };
    Check { name: "huge pages", ok: true, found, advice: advice.to_owned() }
}

fn disk_space(free: Option<u64>) -> Check {
    let found =
        free.map_or_else(|| "unknown".to_owned(), |free| output::bytes(free) + " free here");
    let ok = free.is_none_or(|free| free > 64 << 20);
    let advice = if ok { "" } else { "runs keep their state beside their output: free some space" };
    Check { name: "disk", ok, found, advice: advice.to_owned() }
}

/// Checks the GPU, which is optional: its absence is not a failure.
fn gpu(gpus: &Result<Devices, CudaLoadError>) -> Check {
    let (found, advice) = match gpus {
        Ok(Devices { driver, devices }) if devices.is_empty() => {
            (format!("none; CUDA driver {driver} is installed"), String::new())
        }
        Ok(Devices { driver, devices }) => {
            let mut text = format!("CUDA driver {driver}");
            for (ordinal, device) in devices.iter().enumerate() {
                let device = match device {
                    Ok(device) => device,
                    Err(error) => {
                        let _ = write!(text, "; cuda:{ordinal} cannot be used: {error}");
                        continue;
                    }
                };
                let (major, minor) = device.capability;
                let (all, free) = (device.memory_bytes, device.memory_free_bytes);
                let _ = write!(
                    text,
                    "; cuda:{ordinal} {}, compute capability {major}.{minor}, {}, {} free",
                    device.name,
                    output::bytes(all),
                    output::bytes(free)
                );
            }
            let advice = match cuda::usable(0) {
                Ok(()) => "use it with --device cuda:0, or TRITMILL_DEVICE=auto".to_owned(),
                Err(error) => error.to_string(),
            };
            (text, advice)
        }
        Err(CudaLoadError::NoDriver) => ("none: no CUDA driver".to_owned(), String::new()),
        Err(error) => ("none usable".to_owned(), error.to_string()),
    };
    Check { name: "gpu", ok: true, found, advice }
}

fn cuda_json(gpus: &Result<Devices, CudaLoadError>) -> serde_json::Value {
    match gpus {
        Ok(Devices { driver, devices }) => json!({
            "driver": driver,
            "devices": devices.iter().map(|device| match device {
                Ok(device) => json!({
                    "name": device.name,
                    "compute_capability": format!("{}.{}", device.capability.0, device.capability.1),
                    "multiprocessors": device.multiprocessors,
                    "memory_bytes": device.memory_bytes,
                    "memory_free_bytes": device.memory_free_bytes,
                }),
                Err(error) => json!({ "error": error.to_string() }),
            }).collect::<Vec<_>>(),
        }),
        Err(error) => json!({ "missing": error.to_string() }),
    }
}
