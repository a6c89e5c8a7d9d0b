//! `cargo xtask gpu first|second [cuda:N]`: checks and measures the CUDA backend on a machine with a GPU that is rented by the
//! minute. Each run takes at most seven minutes: `first` finds out what works and how fast it is; `second` measures what only a
//! device can choose between.
//!
//! A run is a chain of parts. Each part has a time limit, and the next one runs whatever happened. Reports are written as they come
//! to `$OUT`, or to `target/gpu-results`: a machine that is lost loses one part. Missing programs (compute-sanitizer,
//! ncu, PyTorch) are reported, and their parts skipped.
//!
//! `cargo xtask gpu pack` makes a file of programs for a machine that has a GPU and no Rust: unpacked there, in
//! a copy of the repository, `target/gpu/xtask gpu first` does the same. `cargo xtask gpu rehearse` runs both chains on the
//! emulated driver, with a tiny model and small workloads, to see that every part works.

mod chain;
mod checks;
mod kernels;
mod latency;
mod measure;
mod pack;
mod place;
mod profile;
mod programs;
mod pytorch;
mod rehearsal;
mod sampling;
mod sanitize;
mod tiny;
mod tuning;

use std::path::{Path, PathBuf};

use anyhow::{bail, ensure};

use super::process;
use chain::{Chain, part, tests};
use place::Place;
use programs::Programs;

/// Finds out what works, and how fast it is: small things before large ones.
const FIRST: Chain = Chain {
    name: "first",
    parts: &[
        part("doctor", 20, 20, place::doctor),
        part("tiny model", 60, 60, tiny::run),
        tests("checks", 30, 75),
        tests("choices", 30, 90),
        tests("equality", 40, 120),
        tests("attention", 30, 135),
        tests("experimental::launches", 30, 150),
        tests("sampling", 30, 165),
        tests("groups", 30, 180),
        tests("biases", 20, 190),
        tests("distributions", 20, 200),
        tests("roofline", 20, 210),
        tests("ahead", 20, 220),
        part("decode and prefill", 60, 280, measure::standard),
        part("sampling", 40, 310, sampling::run),
        part("kernels", 30, 335, kernels::run),
        tests("experimental::widths", 30, 350),
        part("int8 keys and values", 30, 370, measure::int8),
        part("sanitize", 60, 420, sanitize::run),
    ],
};

/// Measures what only a device can choose between.
const SECOND: Chain = Chain {
    name: "second",
    parts: &[
        part("tuning", 90, 100, tuning::run),
        part("profile", 150, 250, profile::run),
        part("latency", 30, 280, latency::run),
        part("pytorch", 80, 360, pytorch::run),
        part("decode and prefill, experimental kernels", 40, 400, measure::experimental),
        part("kernels, experimental", 20, 420, kernels::experimental),
    ],
};

pub fn run(arguments: &[String]) -> anyhow::Result<()> {
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let (chain, device) = match words[..] {
        ["pack"] => return pack::run(),
        ["rehearse"] => return rehearsal::run(),
        ["first"] => (FIRST, "cuda:0"),
        ["second"] => (SECOND, "cuda:0"),
        ["first", device] if device.starts_with("cuda:") => (FIRST, device),
        ["second", device] if device.starts_with("cuda:") => (SECOND, device),
        _ => bail!("expected first, second, pack or rehearse, and a device as cuda:0"),
    };
    let has_driver = ["/dev/nvidiactl", "/dev/dxg"].iter().any(|path| Path::new(path).exists());
    ensure!(has_driver, "this machine has no GPU with a driver: nothing was checked or measured");
    let results = std::env::var_os("OUT").map(PathBuf::from);
    let results = results.unwrap_or_else(|| process::root().join("target/gpu-results"));
    let place = Place::new(device, Programs::find()?, false, &results, chain.name)?;
    chain.run(place, |_| true)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// Longest run of a chain.
    const LONGEST: Duration = Duration::from_secs(7 * 60);
    /// Files that come back from a rented machine.
    const FILES_MAX: usize = 8;

    #[test]
    fn chains_end_in_time_and_leave_few_files() {
        for chain in [FIRST, SECOND] {
            let ends: Vec<Duration> = chain.parts.iter().map(|part| part.ends_by).collect();
            assert!(ends.is_sorted() && ends.last() == Some(&LONGEST), "{}", chain.name);
        }
        const { assert!(place::FILES.len() < FILES_MAX) };
    }
}
