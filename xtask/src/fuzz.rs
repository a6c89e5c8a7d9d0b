//! `cargo xtask fuzz`: runs the parsers of untrusted bytes on mutated inputs.
//!
//! With cargo-fuzz installed, libFuzzer guides the mutations by coverage. It runs without a sanitizer:
//! the parsers have no `unsafe`, and the stable compiler is enough that way. Without cargo-fuzz, a
//! mutation loop over the same corpus and targets runs instead.

use std::time::SystemTime;

use anyhow::{Context as _, bail};

use super::process::{self, cargo, has_cargo_subcommand, root};

const TARGETS: [&str; 3] = ["gguf", "safetensors", "batch_line"];
const SECONDS_DEFAULT: u64 = 60;

pub fn run(arguments: &[String]) -> anyhow::Result<()> {
    let (targets, seconds) = parse(arguments)?;
    let guided = has_cargo_subcommand("fuzz");
    if !guided {
        println!(
            "cargo-fuzz is not installed (cargo install cargo-fuzz): mutating without coverage"
        );
    }
    for target in targets {
        if guided { with_coverage(target, seconds)? } else { without_coverage(target, seconds)? }
    }
    Ok(())
}

fn with_coverage(target: &str, seconds: u64) -> anyhow::Result<()> {
    // New inputs are written to the first folder; the committed corpus is only read.
    let found = root().join("target").join("fuzz-corpus").join(target);
    std::fs::create_dir_all(&found)
        .with_context(|| format!("cannot create {}", found.display()))?;
    let mut command = cargo();
    command
        .args(["fuzz", "run", "--fuzz-dir", "xtask/fuzz", "--features", "libfuzzer"])
        .args(["--sanitizer", "none", target])
        .arg(found)
        .arg(format!("xtask/fuzz/corpus/{target}"))
        .args(["--".to_owned(), format!("-max_total_time={seconds}")])
        .arg("-rss_limit_mb=1024");
    process::run(&mut command)
}

fn without_coverage(target: &str, seconds: u64) -> anyhow::Result<()> {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    let seed = now.context("the system clock is before 1970")?.as_secs();
    let mut command = cargo();
    command
        .args(["run", "--quiet", "--package", "tritmill-fuzz", "--bin", "tritmill-fuzz"])
        .args(["--", target, &seconds.to_string(), &seed.to_string()]);
    process::run(&mut command)
}

fn parse(arguments: &[String]) -> anyhow::Result<(Vec<&str>, u64)> {
    let (mut targets, mut seconds) = (Vec::new(), SECONDS_DEFAULT);
    let mut arguments = arguments.iter();
    while let Some(argument) = arguments.next() {
        if argument == "--seconds" {
            let value = arguments.next().context("--seconds needs a number")?;
            seconds = value.parse().with_context(|| format!("--seconds '{value}'"))?;
        } else if let Some(target) = TARGETS.iter().find(|target| *target == argument) {
            targets.push(*target);
        } else {
            bail!("unknown target '{argument}' (known: {})", TARGETS.join(", "));
        }
    }
    if targets.is_empty() {
        targets.extend(TARGETS);
    }
    Ok((targets, seconds))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<String> {
        text.split_whitespace().map(str::to_owned).collect()
    }

    #[test]
    fn targets_and_seconds_have_defaults() {
        assert_eq!(parse(&[]).expect("no arguments"), (TARGETS.to_vec(), SECONDS_DEFAULT));
        let arguments = words("gguf --seconds 5");
        assert_eq!(parse(&arguments).expect("both given"), (vec!["gguf"], 5));
    }

    #[test]
    fn unknown_targets_and_bad_seconds_are_refused() {
        for text in ["ggml", "--seconds", "--seconds ten"] {
            assert!(parse(&words(text)).is_err(), "{text}");
        }
    }
}
