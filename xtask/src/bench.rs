//! `cargo xtask bench [SHAPE]` runs `tritmill bench engine` on a synthetic model, which is made once
//! and kept under `target/`. `cargo xtask bench queue` and `cargo xtask bench e2e` run the benchmarks of
//! the same names on a temporary Redis and Postgres with the durability of a production setup.
//! `cargo xtask bench compare` is [`super::compare`].

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::Context as _;
use tritmill_servers::{Postgres, Redis};

use super::{
    compare,
    process::{self, cargo, root},
};

/// The shape that is measured by default.
pub const SHAPE_DEFAULT: &str = "bitnet-2b";

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

/// As [`synthetic`], with this program.
pub fn synthetic_by(tritmill: &Path, shape: &str) -> anyhow::Result<PathBuf> {
    let model = root().join("target").join("bench").join(shape);
    if !model.join("config.json").exists() {
        let mut synth = Command::new(tritmill);
        process::run(synth.args(["model", "synth", "--shape", shape, "--out"]).arg(&model))?;
    }
    Ok(model)
}

/// A temporary Redis and Postgres.
pub struct Servers {
    redis: Redis,
    postgres: Option<Postgres>,
}

impl Servers {
    /// Starts Postgres with full durability, and Redis with a file that is synced every second: the dispatcher may lose
    /// everything.
    pub fn start() -> anyhow::Result<Self> {
        let durable = ["fsync=on", "full_page_writes=on", "synchronous_commit=on"];
        Ok(Self { postgres: Some(Postgres::start_with(&durable)?), ..Self::without_postgres()? })
    }

    /// Starts the same Redis alone.
    fn without_postgres() -> anyhow::Result<Self> {
        let options = ["--save", "", "--appendonly", "yes", "--appendfsync", "everysec"];
        Ok(Self { redis: Redis::start_with(&options)?, postgres: None })
    }

    /// Names the servers to a command, by its environment.
    pub fn give<'a>(&self, command: &'a mut Command) -> &'a mut Command {
        command.env("REDIS_URL", self.redis.url()).env_remove("DATABASE_URL");
        if let Some(postgres) = &self.postgres {
            command.env("DATABASE_URL", postgres.url());
        }
        command
    }
}

fn on_servers(which: &str, options: &[String]) -> anyhow::Result<()> {
    let is_fast = options.iter().any(|option| option == "--fast");
    let servers = if is_fast { Servers::without_postgres()? } else { Servers::start()? };
    let mut bench = tritmill();
    servers.give(&mut bench).args(["bench", which]);
    let pid = |pid: Option<u32>| pid.map(|pid| pid.to_string()).context("a server has exited");
    if which == "queue" {
        bench.args(["--redis-pid", &pid(servers.redis.pid())?]);
    }
    if let Some(postgres) = &servers.postgres {
        process::run(servers.give(tritmill().arg("migrate")))?;
        if which == "queue" {
            bench.args(["--postgres-pid", &pid(postgres.pid())?]);
        }
    }
    process::run(bench.args(options)).context("the benchmark")
}

/// Returns the program that was just built.
fn tritmill() -> Command {
    Command::new(root().join("target/release/tritmill"))
}
