//! `cargo xtask gpu [cuda:N]`: everything that takes a GPU. The CUDA backend against the CPU's, to the
//! bit, on the device; then its speed on a synthetic model, as a table for `benches/RESULTS.md`.

use std::{fmt::Write as _, path::Path, process::Command};

use anyhow::{Context as _, bail, ensure};
use serde_json::Value;

use super::{
    bench,
    process::{self, cargo},
};

/// Sequences of a step, and tokens of prompt and answer.
const SWEEPS: [(&str, &str, &str); 3] = [
    ("1,2,4,8,16,32,64,128,256", "128", "64"),
    ("1,16,64,128,256", "512", "32"),
    ("1", "2048", "16"),
];

/// What is to be reached: a name, tokens/s, and the figure of the measurements.
type Target = (&'static str, f64, fn(&[Row]) -> Option<f64>);

const TARGETS: [Target; 5] = [
    ("decode, batch 1", 1_500.0, |rows| decode(rows, 1, 128)),
    ("decode, batch 64", 20_000.0, |rows| decode(rows, 64, 128)),
    ("decode, best batch at 512 tokens", 40_000.0, |rows| {
        let speeds = rows.iter().filter(|row| row.phase == "decode" && row.prompt == 512);
        speeds.map(|row| row.median).max_by(f64::total_cmp)
    }),
    ("decode, batch 16 against batch 1 (times)", 8.0, |rows| {
        Some(decode(rows, 16, 128)? / decode(rows, 1, 128)?)
    }),
    ("prefill", 150_000.0, |rows| {
        let speeds = rows.iter().filter(|row| row.phase == "prefill");
        speeds.map(|row| row.median).max_by(f64::total_cmp)
    }),
];

/// One measurement.
struct Row {
    phase: String,
    batch: u64,
    prompt: u64,
    median: f64,
    lowest: f64,
    highest: f64,
}

fn decode(rows: &[Row], batch: u64, prompt: u64) -> Option<f64> {
    let found =
        rows.iter().find(|row| row.phase == "decode" && row.batch == batch && row.prompt == prompt);
    found.map(|row| row.median)
}

pub fn run(arguments: &[String]) -> anyhow::Result<()> {
    let device = match arguments {
        [] => "cuda:0",
        [device] if device.starts_with("cuda:") => device,
        _ => bail!("expected the name of a device, as cuda:0"),
    };
    let driver = ["/dev/nvidiactl", "/dev/dxg"].iter().any(|path| Path::new(path).exists());
    ensure!(driver, "this machine has no GPU with a driver: nothing was checked or measured");
    process::run(cargo().args(["build", "--release", "--bin", "tritmill"]))?;
    let found = found(device)?;
    let tests = ["test", "--package", "tritmill-engine", "--lib", "--", "backend::cuda"];
    let mut command = cargo();
    process::run(command.args(tests).arg("--test-threads=1").env("TRITMILL_TEST_DEVICE", device))
        .context("the CUDA backend differs from the CPU's")?;
    let model = bench::synthetic(bench::SHAPE_DEFAULT)?;
    let mut rows = Vec::new();
    for sweep in SWEEPS {
        rows.extend(measure(device, &model, sweep)?);
    }
    println!("\n{}", table(&found, &rows)?);
    Ok(())
}

/// The device's line of `tritmill doctor`.
fn found(device: &str) -> anyhow::Result<String> {
    let said: Value = json(bench::tritmill().args(["doctor", "--json"]))?;
    let cuda = &said["cuda"];
    let ordinal: usize = device.trim_start_matches("cuda:").parse().context("cuda:N")?;
    let gpu = &cuda["devices"][ordinal];
    let Some(name) = gpu["name"].as_str() else {
        bail!("{device} cannot be used: {cuda}");
    };
    let (capability, driver) = (&gpu["compute_capability"], &cuda["driver"]);
    Ok(format!("{name}, compute capability {capability}, CUDA driver {driver}"))
}

/// The JSON that a command prints; a failed check of `doctor` is its own concern.
fn json(command: &mut Command) -> anyhow::Result<Value> {
    let output = command.stderr(std::process::Stdio::inherit()).output().context("cannot start")?;
    serde_json::from_slice(&output.stdout)
        .with_context(|| format!("{command:?} printed no JSON: {}", output.status))
}

fn measure(
    device: &str,
    model: &Path,
    (batches, prompt, generate): (&str, &str, &str),
) -> anyhow::Result<Vec<Row>> {
    let mut command = bench::tritmill();
    command.args(["bench", "engine", "--json", "--device", device, "--model"]).arg(model);
    command.args(["--batch", batches, "--prompt", prompt, "--generate", generate]);
    let said = json(&mut command)?;
    let rows = said["rows"].as_array().context("measurements have rows")?;
    let number = |row: &Value, name: &str| row[name].as_f64().unwrap_or(f64::NAN);
    rows.iter()
        .map(|row| {
            Ok(Row {
                phase: row["phase"].as_str().context("a row has a phase")?.to_owned(),
                batch: row["batch"].as_u64().context("a row has a batch")?,
                prompt: prompt.parse()?,
                median: number(row, "tokens_per_s"),
                lowest: number(row, "tokens_per_s_lowest"),
                highest: number(row, "tokens_per_s_highest"),
            })
        })
        .collect()
}

fn table(device: &str, rows: &[Row]) -> anyhow::Result<String> {
    let mut text = format!("{device}\n\n    cargo xtask gpu\n\n");
    text += "| phase | prompt | batch | tokens/s | slowest … fastest |\n| --- | --- | --- | --- | --- |\n";
    for Row { phase, batch, prompt, median, lowest, highest } in rows {
        writeln!(
            text,
            "| {phase} | {prompt} | {batch} | {median:.0} | {lowest:.0} … {highest:.0} |"
        )?;
    }
    text += "\n| target | asked | measured |\n| --- | --- | --- |\n";
    for (name, asked, measured) in TARGETS {
        let measured = measured(rows).map_or_else(|| "none".to_owned(), |n| format!("{n:.1}"));
        writeln!(text, "| {name} | {asked} | {measured} |")?;
    }
    Ok(text)
}
