//! `cargo xtask bench [SHAPE]` runs `tritmill bench engine` on a synthetic model, which is made once
//! and kept under `target/`. `cargo xtask bench queue` and `cargo xtask bench e2e` run the benchmarks of
//! the same names on a temporary Redis and Postgres with the durability of a production setup.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::Context as _;
use tritmill_servers::{Postgres, Redis};

use super::process::{self, cargo, root};

/// The shape that is measured by default.
pub const SHAPE_DEFAULT: &str = "bitnet-2b";

pub fn run(arguments: &[String]) -> anyhow::Result<()> {
    process::run(cargo().args(["build", "--release", "--workspace", "--bins"]))?;
    match arguments.split_first().map(|(name, rest)| (&**name, rest)) {
        Some(("queue", options)) => return on_servers("queue", options),
        Some(("e2e", options)) => {
            let model = synthetic(SHAPE_DEFAULT)?.display().to_string();
            let given = options.iter().any(|option| option.starts_with("--model"));
            let model = if given { Vec::new() } else { vec!["--model".to_owned(), model] };
            return on_servers("e2e", &[model, options.to_vec()].concat());
        }
        _ => {}
    }
    let shape = arguments.first().filter(|first| !first.starts_with('-'));
    let options = if shape.is_some() { &arguments[1..] } else { arguments };
    let model = synthetic(shape.map_or(SHAPE_DEFAULT, String::as_str))?;
    process::run(tritmill().args(["bench", "engine", "--model"]).arg(&model).args(options))
}

/// Returns the folder of the model with this shape, made if it does not exist.
fn synthetic(shape: &str) -> anyhow::Result<PathBuf> {
    synthetic_by(Path::new(tritmill().get_program()), shape)
}

/// As [`synthetic`], with this program.
pub fn synthetic_by(tritmill: &Path, shape: &str) -> anyhow::Result<PathBuf> {
    let model = root().join("target").join("bench").join(shape);
    if !model.join("config.json").exists() {
        let mut synth = Command::new(tritmill);
        process::run(synth.args(["model", "synth", "--shape", shape, "--out"]).arg(&model))?;
    }
    Ok(model)
}

/// Runs a benchmark on Postgres with full durability, and Redis with a file that is synced every
/// second: the dispatcher may lose everything.
fn on_servers(which: &str, options: &[String]) -> anyhow::Result<()> {
    let redis =
        Redis::start_with(&["--save", "", "--appendonly", "yes", "--appendfsync", "everysec"])?;
    let mut bench = tritmill();
    bench.args(["bench", which]).env("REDIS_URL", redis.url()).env_remove("DATABASE_URL");
    let pid = |pid: Option<u32>| pid.map(|pid| pid.to_string()).context("a server has exited");
    if which == "queue" {
        bench.args(["--redis-pid", &pid(redis.pid())?]);
    }
    if options.iter().any(|option| option == "--fast") {
        return process::run(bench.args(options)).context("the benchmark");
    }
    let durable = ["fsync=on", "full_page_writes=on", "synchronous_commit=on"];
    let postgres = Postgres::start_with(&durable)?;
    process::run(tritmill().arg("migrate").env("DATABASE_URL", postgres.url()))?;
    bench.env("DATABASE_URL", postgres.url());
    if which == "queue" {
        bench.args(["--postgres-pid", &pid(postgres.pid())?]);
    }
    process::run(bench.args(options)).context("the benchmark")
}

/// Returns the program that was just built.
fn tritmill() -> Command {
    Command::new(root().join("target/release/tritmill"))
}
