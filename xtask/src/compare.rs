//! `cargo xtask bench compare FROM [TO] [--rounds N] [--shape SHAPE]` measures two commits in turns, with a fixed table of
//! benchmarks, and prints the ratios of their rates.
//!
//! Each commit is built once, from a worktree of its own under `target/compare`. The rounds measure both, one right
//! after the other and in changing order, so that both meet the same state of a shared machine. A benchmark that a
//! commit does not have yet is left out.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, bail, ensure};
use serde_json::Value;

use super::{
    bench_setup::{SHAPE_DEFAULT, Servers, synthetic_by},
    process::{self, cargo, root},
};

const USAGE: &str = "cargo xtask bench compare FROM [TO] [--rounds N] [--shape SHAPE]";
const ROUNDS_DEFAULT: usize = 5;

/// A benchmark of the table.
struct Measurement {
    arguments: &'static [&'static str],
    /// Whether it runs on Redis and Postgres, without a model.
    on_servers: bool,
    has_model: bool,
    /// Reads the rates from what it prints.
    rates: fn(&Value) -> Vec<(String, f64)>,
}

const TABLE: [Measurement; 5] = [
    Measurement {
        arguments: &["engine", "--prompt", "512", "--generate", "0", "--batch", "1"],
        on_servers: false,
        has_model: true,
        rates: |json| rows(json, "phase", "prefill", |_| "prefill of 512, tokens/s".to_owned()),
    },
    Measurement {
        arguments: &["engine", "--prompt", "16", "--generate", "32", "--batch", "1,8,32"],
        on_servers: false,
        has_model: true,
        rates: |json| {
            rows(json, "phase", "decode", |row| format!("decode, batch {}, tokens/s", row["batch"]))
        },
    },
    Measurement {
        arguments: &["sampling", "--generate", "32", "--batch", "8"],
        on_servers: false,
        has_model: true,
        rates: |json| {
            let name = |row: &Value| {
                format!("{}, batch 8, tokens/s", row["parameters"].as_str().unwrap_or("?"))
            };
            rows(json, "batch", 8, name)
        },
    },
    Measurement {
        arguments: &["queue", "--jobs", "20000", "--starts", "0"],
        on_servers: true,
        has_model: false,
        rates: |json| {
            let rate = |row: &Value| {
                let phase = row["phase"].as_str()?;
                Some((format!("queue, {phase}, jobs/s"), row["jobs_per_s"].as_f64()?))
            };
            json["rows"].as_array().into_iter().flatten().filter_map(rate).collect()
        },
    },
    Measurement {
        arguments: &["e2e", "--jobs", "32", "--prompt", "64", "--generate", "32"],
        on_servers: true,
        has_model: true,
        rates: |json| {
            let rate = json["queue_tokens_per_s"].as_f64();
            rate.map(|rate| ("through the queue, tokens/s".to_owned(), rate)).into_iter().collect()
        },
    },
];

/// Reads the tokens per second of the rows in which a field has this value.
fn rows(
    json: &Value,
    field: &str,
    value: impl Into<Value>,
    name: impl Fn(&Value) -> String,
) -> Vec<(String, f64)> {
    let value = value.into();
    let rate = |row: &Value| Some((name(row), row["tokens_per_s"].as_f64()?));
    let all = json["rows"].as_array().into_iter().flatten();
    all.filter(|row| row[field] == value).filter_map(rate).collect()
}

/// Rates of both commits in each round, by name; in the order of the table.
type Rates = Vec<(String, [Vec<f64>; 2])>;

pub fn run(arguments: &[String]) -> anyhow::Result<()> {
    let (commits, rounds, shape) = read(arguments)?;
    let programs = [build(&commits[0])?, build(&commits[1])?];
    let model = synthetic_by(&programs[1], &shape)?;
    let mut rates = Rates::new();
    for round in 0..rounds {
        println!("round {} of {rounds}", round + 1);
        for measurement in &TABLE {
            // The second commit begins every other round.
            for turn in 0..2 {
                let which = (round + turn) % 2;
                let Some(json) = measure(&programs[which], measurement, &model)? else { continue };
                for (name, rate) in (measurement.rates)(&json) {
                    add(&mut rates, name, which, rate);
                }
            }
        }
    }
    print(&commits, &rates);
    Ok(())
}

fn add(rates: &mut Rates, name: String, which: usize, rate: f64) {
    let place = rates.iter().position(|(other, _)| *other == name).unwrap_or_else(|| {
        rates.push((name, Default::default()));
        rates.len() - 1
    });
    rates[place].1[which].push(rate);
}

fn read(arguments: &[String]) -> anyhow::Result<([String; 2], usize, String)> {
    let (mut commits, mut options) = (Vec::new(), BTreeMap::new());
    let mut words = arguments.iter();
    while let Some(word) = words.next() {
        match word.strip_prefix("--") {
            Some(name @ ("rounds" | "shape")) => {
                let value = words.next().with_context(|| format!("{word} needs a value"))?;
                options.insert(name, value.clone());
            }
            Some(_) => bail!("unknown option {word}; usage: {USAGE}"),
            None => commits.push(word.clone()),
        }
    }
    let to = commits.get(1).cloned().unwrap_or_else(|| "HEAD".to_owned());
    ensure!(matches!(commits.len(), 1 | 2), "usage: {USAGE}");
    let rounds = options.get("rounds").map_or(Ok(ROUNDS_DEFAULT), |rounds| rounds.parse());
    let rounds = rounds.context("--rounds takes a number")?;
    ensure!(rounds > 0, "--rounds takes a number above 0");
    let shape = options.remove("shape").unwrap_or_else(|| SHAPE_DEFAULT.to_owned());
    Ok(([full_name(&commits[0])?, full_name(&to)?], rounds, shape))
}

/// Returns the hash of a commit.
fn full_name(commit: &str) -> anyhow::Result<String> {
    let revision = format!("{commit}^{{commit}}");
    let mut git = git();
    process::read(git.args(["rev-parse", "--verify", "--end-of-options", &revision]))
        .with_context(|| format!("{commit} is not a commit of this repository"))
}

fn git() -> Command {
    let mut git = Command::new("git");
    git.current_dir(root());
    git
}

/// Returns the program of a commit, built if it is not there yet.
fn build(commit: &str) -> anyhow::Result<PathBuf> {
    let folder = root().join("target/compare");
    let (source, program) = (folder.join("source"), folder.join(format!("tritmill-{commit}")));
    if program.exists() {
        return Ok(program);
    }
    // A worktree left over from a build that was interrupted.
    if source.exists() {
        process::run(git().args(["worktree", "remove", "--force"]).arg(&source))?;
    }
    process::run(git().args(["worktree", "add", "--detach"]).arg(&source).arg(commit))?;
    let target = folder.join("build");
    let mut cargo = cargo();
    cargo.current_dir(&source).env("CARGO_TARGET_DIR", &target);
    let built = process::run(cargo.args(["build", "--release", "--locked", "--bin", "tritmill"]));
    process::run(git().args(["worktree", "remove", "--force"]).arg(&source))?;
    built.with_context(|| format!("building {commit}"))?;
    std::fs::copy(target.join("release/tritmill"), &program).context("keeping the program")?;
    Ok(program)
}

/// Runs a benchmark once; returns what it prints, `None` if the program does not have it.
fn measure(
    program: &Path,
    measurement: &Measurement,
    model: &Path,
) -> anyhow::Result<Option<Value>> {
    let command = || {
        let mut command = Command::new(program);
        command.env_remove("REDIS_URL").env_remove("DATABASE_URL");
        command
    };
    let name = measurement.arguments[0];
    if !process::succeeds(command().args(["bench", name, "--help"])) {
        return Ok(None);
    }
    let mut bench = command();
    bench.arg("bench").args(measurement.arguments).args(["--repetitions", "1", "--json"]);
    if measurement.has_model {
        bench.arg("--model").arg(model);
    }
    // New servers each time: the two programs may have different schemas.
    let servers = measurement.on_servers.then(Servers::start).transpose()?;
    if let Some(servers) = &servers {
        process::read(servers.give(command().arg("migrate")))?;
        servers.give(&mut bench);
    }
    let printed = process::read(&mut bench)?;
    let last = printed.lines().last().unwrap_or_default();
    Ok(Some(serde_json::from_str(last).with_context(|| format!("bench {name} printed {last}"))?))
}

fn print(commits: &[String; 2], rates: &Rates) {
    let [from, to] = commits.each_ref().map(|commit| &commit[..10]);
    println!();
    println!("| | {from} | {to} | ratio | lowest to highest |");
    println!("| --- | --- | --- | --- | --- |");
    for (name, [before, after]) in rates {
        let mut ratios: Vec<f64> = before.iter().zip(after).map(|(a, b)| b / a).collect();
        ratios.sort_by(f64::total_cmp);
        let shown =
            |rates: &[f64]| median(rates).map_or("–".to_owned(), |rate| format!("{rate:.1}"));
        let spread = match (ratios.first(), ratios.last()) {
            (Some(lowest), Some(highest)) => format!("{lowest:.2} to {highest:.2}"),
            _ => "–".to_owned(),
        };
        let ratio = median(&ratios).map_or("–".to_owned(), |ratio| format!("**{ratio:.2}**"));
        println!("| {name} | {} | {} | {ratio} | {spread} |", shown(before), shown(after));
    }
}

fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => None,
        count if count.is_multiple_of(2) => Some((sorted[middle - 1] + sorted[middle]) / 2.0),
        _ => Some(sorted[middle]),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn rates_are_read_from_what_the_benchmarks_print() {
        let engine = json!({ "rows": [
            { "phase": "prefill", "batch": 1, "tokens_per_s": 300.0 },
            { "phase": "decode", "batch": 8, "tokens_per_s": 20.5 },
        ] });
        assert_eq!((TABLE[0].rates)(&engine), [("prefill of 512, tokens/s".to_owned(), 300.0)]);
        assert_eq!((TABLE[1].rates)(&engine), [("decode, batch 8, tokens/s".to_owned(), 20.5)]);
        let queue = json!({ "rows": [{ "phase": "submit", "jobs_per_s": 9.0 }] });
        assert_eq!((TABLE[3].rates)(&queue), [("queue, submit, jobs/s".to_owned(), 9.0)]);
    }

    #[test]
    fn medians_and_arguments_are_checked() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(&[4.0, 1.0]), Some(2.5));
        assert_eq!(median(&[]), None);
        for arguments in
            [&[][..], &["a", "b", "c"], &["HEAD", "--what"], &["HEAD", "--rounds", "0"]]
        {
            let arguments: Vec<String> = arguments.iter().map(ToString::to_string).collect();
            assert!(read(&arguments).is_err(), "{arguments:?}");
        }
    }
}
