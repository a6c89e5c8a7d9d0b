//! The mutation loop: `cargo xtask fuzz` where cargo-fuzz is not installed.
//!
//! Runs mutated inputs of one target for some seconds. An input that panics, takes too long or
//! makes the process grow is saved under `artifacts/`, and the loop stops.

use std::{
    fs,
    panic::catch_unwind,
    path::{Path, PathBuf},
    process::ExitCode,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};
use tritmill_fuzz::{TARGETS, Target, mutate};

/// Longest time for one input.
const INPUT_TIME_MAX: Duration = Duration::from_secs(5);
/// Largest growth of the process over its size after the corpus.
const GROWTH_BYTES_MAX: u64 = 256 << 20;
/// Inputs between two checks of the clock.
const INPUTS_PER_CHECK: u64 = 256;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> anyhow::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [name, seconds, seed] = arguments.as_slice() else { bail!("usage: TARGET SECONDS SEED") };
    let target = TARGETS.iter().find(|target| target.name == name);
    let target = target.with_context(|| format!("unknown target '{name}'"))?;
    let seconds = seconds.parse().with_context(|| format!("seconds '{seconds}'"))?;
    let seed = seed.parse().with_context(|| format!("seed '{seed}'"))?;
    fuzz(target, Duration::from_secs(seconds), seed)
}

fn fuzz(target: &Target, time: Duration, seed: u64) -> anyhow::Result<()> {
    let corpus =
        target.corpus().with_context(|| format!("cannot read the corpus of {}", target.name))?;
    let inputs: Vec<Vec<u8>> = corpus.into_iter().map(|(_, bytes)| bytes).collect();
    inputs.iter().for_each(|input| (target.run)(input));
    let size = peak_bytes();
    let start = Instant::now();
    let mut number = 0;
    while start.elapsed() < time {
        for _ in 0..INPUTS_PER_CHECK {
            check(target, &mutate::input(&inputs, seed, number), size)
                .with_context(|| format!("target {}, seed {seed}, input {number}", target.name))?;
            number += 1;
        }
    }
    println!("{}: {number} inputs in {} s, seed {seed}", target.name, start.elapsed().as_secs());
    Ok(())
}

fn check(target: &Target, input: &[u8], size: Option<u64>) -> anyhow::Result<()> {
    let start = Instant::now();
    let outcome = catch_unwind(|| (target.run)(input));
    let grown = peak_bytes().zip(size).map_or(0, |(now, before)| now.saturating_sub(before));
    let failure = if outcome.is_err() {
        "panics".to_owned()
    } else if start.elapsed() > INPUT_TIME_MAX {
        format!("takes {} s", start.elapsed().as_secs())
    } else if grown > GROWTH_BYTES_MAX {
        format!("makes the process grow by {grown} bytes")
    } else {
        return Ok(());
    };
    let path = save(target, input)?;
    bail!("{} {failure}", path.display())
}

fn save(target: &Target, input: &[u8]) -> anyhow::Result<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("artifacts").join(target.name);
    fs::create_dir_all(&folder)?;
    let path = folder.join("crash-input");
    fs::write(&path, input)?;
    Ok(path)
}

/// Returns the peak resident memory of this process, where the system reports it.
fn peak_bytes() -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? * 1024)
}
