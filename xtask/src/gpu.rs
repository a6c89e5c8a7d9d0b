//! `cargo xtask gpu [PART] [cuda:N]`: everything that takes a GPU, each part a command of its own for
//! machines that are lent by the minute. Each prints its tables for `benches/RESULTS.md` when it has them.
//!
//! `cargo xtask gpu pack` makes a folder of programs for a machine that has a GPU and no Rust: there, in
//! a copy of the repository, `target/gpu/xtask gpu` does the same.

mod kernels;
mod latency;
mod pack;
mod programs;
mod pytorch;
mod sweep;

use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail, ensure};
use serde_json::Value;

use super::{bench, process};
use programs::Programs;

/// Where parts run, and by which programs.
struct Place {
    device: String,
    programs: Programs,
}

impl Place {
    /// The 2B shape with random weights, made once.
    fn model(&self) -> anyhow::Result<PathBuf> {
        bench::synthetic_by(&self.programs.tritmill, bench::SHAPE_DEFAULT)
    }

    /// What `tritmill WORDS… --json --device … --model …` says.
    fn measure(&self, words: &[&str], model: &Path) -> anyhow::Result<Value> {
        let mut command = self.programs.tritmill();
        command.args(words).args(["--json", "--device", &self.device, "--model"]).arg(model);
        programs::json(&mut command)
    }
}

/// A part's name, and what it does.
type Part = (&'static str, fn(&Place) -> anyhow::Result<()>);

/// In the order in which all are done: each of some minutes at the most.
const PARTS: [Part; 5] = [
    ("check", check),
    ("measure", sweep::run),
    ("kernels", kernels::run),
    ("latency", latency::run),
    ("pytorch", pytorch::run),
];

/// What was to be reached: a name, what was asked, the figure.
type Target = (&'static str, String, Option<f64>);

pub fn run(arguments: &[String]) -> anyhow::Result<()> {
    if arguments == ["pack"] {
        return pack::run();
    }
    let is_device = |word: &&String| word.starts_with("cuda:");
    let device = arguments.iter().find(is_device).map_or("cuda:0", String::as_str).to_owned();
    let mut parts = PARTS.to_vec();
    if let Some(named) = arguments.iter().find(|word| !is_device(word)) {
        parts.retain(|(name, _)| name == named);
    }
    let understood = usize::from(arguments.iter().any(|word| word.starts_with("cuda:")))
        + usize::from(parts.len() < PARTS.len());
    if parts.is_empty() || understood != arguments.len() {
        let names = PARTS.map(|(name, _)| name).join(", ");
        bail!("expected one of {names}, pack, or nothing for all, and a device as cuda:0");
    }
    let driver = ["/dev/nvidiactl", "/dev/dxg"].iter().any(|path| Path::new(path).exists());
    ensure!(driver, "this machine has no GPU with a driver: nothing was checked or measured");
    let place = Place { device, programs: Programs::find()? };
    println!("{}\n", place.found()?);
    for (name, part) in parts {
        part(&place).with_context(|| format!("cargo xtask gpu {name}"))?;
    }
    Ok(())
}

/// The CUDA backend against the CPU's, to the bit, on the device.
fn check(place: &Place) -> anyhow::Result<()> {
    let mut tests = place.programs.engine_tests()?;
    tests.args(["backend::cuda", "--test-threads=1"]).env("TRITMILL_TEST_DEVICE", &place.device);
    process::run(&mut tests).context("the CUDA backend differs from the CPU's")
}

impl Place {
    /// The device's line of `tritmill doctor`.
    fn found(&self) -> anyhow::Result<String> {
        let said = programs::json(self.programs.tritmill().args(["doctor", "--json"]))?;
        let cuda = &said["cuda"];
        let ordinal: usize = self.device.trim_start_matches("cuda:").parse().context("cuda:N")?;
        let gpu = &cuda["devices"][ordinal];
        let Some(name) = gpu["name"].as_str() else {
            bail!("{} cannot be used: {cuda}", self.device);
        };
        let (capability, driver) = (&gpu["compute_capability"], &cuda["driver"]);
        Ok(format!("{name}, compute capability {capability}, CUDA driver {driver}"))
    }
}

/// What was asked and what was measured, as a table.
fn print_targets(targets: &[Target]) {
    println!("\n| target | asked | measured |\n| --- | --- | --- |");
    for (name, asked, measured) in targets {
        let measured = measured.map_or_else(|| "none".to_owned(), |figure| format!("{figure:.2}"));
        println!("| {name} | {asked} | {measured} |");
    }
    println!();
}

/// A number of some JSON; none where there is none.
fn number(of: &Value, name: &str) -> f64 {
    of[name].as_f64().unwrap_or(f64::NAN)
}

/// A list of some JSON.
fn list<'a>(of: &'a Value, name: &str) -> anyhow::Result<&'a Vec<Value>> {
    of[name].as_array().with_context(|| format!("measurements have {name}"))
}
