//! `cargo xtask bench [SHAPE]` runs `tritmill bench engine` on a synthetic model, which is made once
//! and kept under `target/`. `cargo xtask bench queue` and `cargo xtask bench e2e` run the benchmarks of
//! the same names on a temporary Redis and Postgres with the durability of a production setup.
//! `cargo xtask bench compare` is [`super::compare`].

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::Context as _;

use super::{
    bench_setup::{SHAPE_DEFAULT, Servers, synthetic_by},
    compare,
    process::{self, built, cargo},
};

pub fn run(arguments: &[String]) -> anyhow::Result<()> {
    if let Some(("compare", rest)) = arguments.split_first().map(|(name, rest)| (&**name, rest)) {
        return compare::run(rest);
    }
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

fn on_servers(which: &str, options: &[String]) -> anyhow::Result<()> {
    let servers = Servers::start()?;
    process::run(servers.give(tritmill().arg("migrate")))?;
    let mut bench = tritmill();
    servers.give(&mut bench).args(["bench", which]);
    let pid = |pid: Option<u32>| pid.map(|pid| pid.to_string()).context("a server has exited");
    if which == "queue" {
        bench.args(["--redis-pid", &pid(servers.redis.pid())?]);
        bench.args(["--postgres-pid", &pid(servers.postgres.pid())?]);
    }
    process::run(bench.args(options)).context("the benchmark")
}

/// Returns the program that was just built.
fn tritmill() -> Command {
    Command::new(built().join("release/tritmill"))
}
