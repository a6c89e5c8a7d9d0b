//! `cargo xtask gpu [PART] [cuda:N]`: checks and measures the CUDA backend on a machine with a GPU, as one chain of
//! at most 45 minutes for machines that are rented by the minute.
//!
//! Every part has a time limit below ten minutes and writes its report to `target/gpu-results` as soon as it ends:
//! a machine that is lost loses one part. A part that fails does not stop the others. Missing programs
//! (compute-sanitizer, ncu, PyTorch) are reported, and their parts skipped.
//!
//! `cargo xtask gpu pack` makes a file of programs for a machine that has a GPU and no Rust: unpacked there, in
//! a copy of the repository, `target/gpu/xtask gpu` does the same. `cargo xtask gpu rehearse` runs the chain on the
//! emulated driver, with a tiny model and small workloads, to see that every part works.

mod kernels;
mod latency;
mod measure;
mod pack;
mod profile;
mod programs;
mod pytorch;
mod rehearsal;
mod sampling;
mod sanitize;
mod tuning;

use std::{
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail, ensure};
use serde_json::Value;

use super::{bench_setup, process};
use programs::Programs;

/// A device, the programs that use it, and the sizes of what they run.
struct Place {
    device: String,
    programs: Programs,
    /// A model of a few kilobytes and workloads of a few rows, for the emulated driver.
    is_rehearsal: bool,
    /// Folder of reports.
    results: PathBuf,
}

impl Place {
    /// Returns the model to measure: the 2B shape with random weights, made once.
    fn model(&self) -> anyhow::Result<PathBuf> {
        if self.is_rehearsal {
            return Ok(process::root().join("engine/tests/golden/bitnet-tiny"));
        }
        bench_setup::synthetic_by(self.programs.tritmill_path(), bench_setup::SHAPE_DEFAULT)
    }

    /// Returns the sizes of a workload: of a measurement, or of its rehearsal.
    fn sizes<T>(&self, measured: T, rehearsed: T) -> T {
        if self.is_rehearsal { rehearsed } else { measured }
    }

    /// Returns `tritmill WORDS… --device … --model …`, started by another program if `starter` is not
    /// empty.
    fn command(&self, starter: &[&str], words: &str) -> anyhow::Result<Command> {
        let mut command = self.programs.under(starter, self.programs.tritmill_path());
        command.args(words.split(' ')).args(["--device", &self.device, "--model"]);
        command.arg(self.model()?);
        Ok(command)
    }

    /// Runs `tritmill WORDS… --device … --model … --json` and returns what it prints.
    fn measure(&self, words: &str) -> anyhow::Result<Value> {
        programs::json(self.command(&[], words)?.arg("--json"))
    }
}

/// A part of the chain.
#[derive(Clone, Copy)]
struct Part {
    name: &'static str,
    /// Time after which its programs are ended.
    limit: Duration,
    /// Returns the report, in Markdown.
    run: fn(&Place) -> anyhow::Result<String>,
}

const fn part(name: &'static str, minutes: u64, run: fn(&Place) -> anyhow::Result<String>) -> Part {
    Part { name, limit: Duration::from_secs(60 * minutes), run }
}

/// The parts, in the order in which they run: what the rest depends on comes first.
const PARTS: [Part; 11] = [
    part("check", 5, check),
    part("experimental", 3, check_experimental),
    part("sanitize", 6, sanitize::run),
    part("measure", 6, measure::run),
    part("kernels", 3, kernels::run),
    part("sampling", 2, sampling::run),
    part("profile", 3, profile::run),
    part("tuning", 5, tuning::run),
    part("latency", 3, latency::run),
    part("pytorch", 3, pytorch::run),
    part("final", 6, measure::run),
];

/// Time on a rented device.
const CHAIN_SECONDS: u64 = 45 * 60;
const _: () = {
    let (mut sum, mut i) = (0, 0);
    while i < PARTS.len() {
        assert!(PARTS[i].limit.as_secs() < 600, "a command on a rented device has ten minutes");
        sum += PARTS[i].limit.as_secs();
        i += 1;
    }
    assert!(sum <= CHAIN_SECONDS);
};

/// A target: its name, what was asked for, what was measured.
type Target = (&'static str, String, Option<f64>);

pub fn run(arguments: &[String]) -> anyhow::Result<()> {
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["pack"] => return pack::run(),
        ["rehearse"] => return rehearsal::run(),
        _ => {}
    }
    let is_device = |word: &&String| word.starts_with("cuda:");
    let (devices, names): (Vec<_>, Vec<_>) = arguments.iter().partition(is_device);
    let parts: Vec<Part> = match names[..] {
        [] => PARTS.to_vec(),
        [name] => PARTS.into_iter().filter(|part| part.name == name).collect(),
        _ => Vec::new(),
    };
    if parts.is_empty() || devices.len() > 1 {
        let names = PARTS.map(|part| part.name).join(", ");
        bail!(
            "expected one of {names}, pack, rehearse, or nothing for all parts, and a device as cuda:0"
        );
    }
    let has_driver = ["/dev/nvidiactl", "/dev/dxg"].iter().any(|path| Path::new(path).exists());
    ensure!(has_driver, "this machine has no GPU with a driver: nothing was checked or measured");
    let place = Place {
        device: devices.first().map_or("cuda:0", |device| device).to_owned(),
        programs: Programs::find()?,
        is_rehearsal: false,
        results: process::root().join("target/gpu-results"),
    };
    run_parts(place, &parts)
}

/// Runs parts one after another, and writes each report when it is there.
fn run_parts(mut place: Place, parts: &[Part]) -> anyhow::Result<()> {
    fs::create_dir_all(&place.results).context("cannot write to target")?;
    let mut failed = Vec::new();
    for part in parts {
        place.programs.limit(part.limit);
        let start = Instant::now();
        let result = place.found().and_then(|device| Ok((device, (part.run)(&place)?)));
        let seconds = start.elapsed().as_secs_f64();
        let text = match result {
            Ok((device, report)) => {
                format!("## {}\n\n{device}, {seconds:.0} s\n\n{report}\n", part.name)
            }
            Err(error) => {
                failed.push(part.name);
                format!("## {}\n\n**Failed** after {seconds:.0} s: {error:#}\n", part.name)
            }
        };
        println!("{text}");
        let file = place.results.join(format!("{}.md", part.name));
        fs::write(&file, text).with_context(|| format!("cannot write {}", file.display()))?;
    }
    println!("Reports: {}", place.results.display());
    ensure!(failed.is_empty(), "failed: {}", failed.join(", "));
    Ok(())
}

/// Compares the CUDA backend with the CPU's on the device, bit by bit.
fn check(place: &Place) -> anyhow::Result<String> {
    let filter = place.sizes("backend::cuda", "backend::cuda::tests::checks");
    run_tests(place, &[filter, "--skip", "cuda::tests::experimental"])?;
    Ok("The CUDA backend and the CPU's give the same bits.".to_owned())
}

/// Compares experimental kernels with the CPU's.
fn check_experimental(place: &Place) -> anyhow::Result<String> {
    let all = "backend::cuda::tests::experimental";
    let filter = place.sizes(all, "backend::cuda::tests::experimental::choices::standard");
    run_tests(place, &[filter])?;
    Ok("Experimental kernels and the CPU's give the same bits.".to_owned())
}

fn run_tests(place: &Place, filters: &[&str]) -> anyhow::Result<()> {
    let mut tests = place.programs.engine_tests()?;
    tests.args(filters).arg("--test-threads=1").env("TRITMILL_TEST_DEVICE", &place.device);
    process::run(&mut tests).context("the CUDA backend differs from the CPU's")
}

impl Place {
    /// Describes the device, from what `tritmill doctor` prints.
    fn found(&self) -> anyhow::Result<String> {
        let doctor = programs::json(self.programs.tritmill().args(["doctor", "--json"]))?;
        let cuda = &doctor["cuda"];
        let ordinal: usize = self.device.trim_start_matches("cuda:").parse().context("cuda:N")?;
        let gpu = &cuda["devices"][ordinal];
        let Some(name) = gpu["name"].as_str() else {
            bail!("{} cannot be used: {cuda}", self.device);
        };
        let (capability, driver) = (&gpu["compute_capability"], &cuda["driver"]);
        Ok(format!("{name}, compute capability {capability}, CUDA driver {driver}"))
    }
}

/// Returns a table of targets and measurements.
fn targets_table(targets: &[Target]) -> String {
    let mut text = "\n| target | asked | measured |\n| --- | --- | --- |\n".to_owned();
    for (name, asked, measured) in targets {
        let measured = measured.map_or_else(|| "none".to_owned(), |figure| format!("{figure:.2}"));
        let _ = writeln!(text, "| {name} | {asked} | {measured} |");
    }
    text
}

/// Returns a number of a JSON object; not a number if it is missing.
fn number(of: &Value, name: &str) -> f64 {
    of[name].as_f64().unwrap_or(f64::NAN)
}

/// Returns a list of a JSON object.
fn list<'a>(of: &'a Value, name: &str) -> anyhow::Result<&'a Vec<Value>> {
    of[name].as_array().with_context(|| format!("measurements have no list `{name}`"))
}
