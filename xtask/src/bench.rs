//! `cargo xtask bench [SHAPE]`: `tritmill bench engine` on a synthetic model, which is made once and
//! kept under `target/`. `cargo xtask bench queue`: `tritmill bench queue` on a Redis and a Postgres
//! of its own, as durable as they are in service.

use anyhow::Context as _;
use tritmill_servers::{Postgres, Redis};

use super::process::{self, cargo, root};

const SHAPE_DEFAULT: &str = "bitnet-2b";
const QUEUE: &str = "queue";

pub fn run(arguments: &[String]) -> anyhow::Result<()> {
    if let Some((QUEUE, options)) = arguments.split_first().map(|(name, rest)| (&**name, rest)) {
        return queue(options);
    }
    let named = arguments.first().filter(|first| !first.starts_with('-'));
    let options = if named.is_some() { &arguments[1..] } else { arguments };
    let shape = named.map_or(SHAPE_DEFAULT, String::as_str);
    let model = root().join("target").join("bench").join(shape);
    if !model.join("config.json").exists() {
        process::run(tritmill().args(["model", "synth", "--shape", shape, "--out"]).arg(&model))?;
    }
    process::run(tritmill().args(["bench", "engine", "--model"]).arg(&model).args(options))
}

/// Postgres with every default about durability, said aloud; Redis with a file that is synced every
/// second, which is all that a dispatcher that may lose everything needs.
fn queue(options: &[String]) -> anyhow::Result<()> {
    process::run(cargo().args(["build", "--release", "--workspace", "--bins"]))?;
    let redis =
        Redis::start_with(&["--save", "", "--appendonly", "yes", "--appendfsync", "everysec"])?;
    if options.iter().any(|option| option == "--fast") {
        let pid = redis.pid().context("redis-server ended")?.to_string();
        let mut bench = std::process::Command::new(root().join("target/release/tritmill"));
        bench.env("REDIS_URL", redis.url()).env_remove("DATABASE_URL");
        bench.args(["bench", "queue", "--redis-pid", &pid]).args(options);
        return process::run(&mut bench).context("bench queue");
    }
    let durable = ["fsync=on", "full_page_writes=on", "synchronous_commit=on"];
    let postgres = Postgres::start_with(&durable)?;
    let pids = [redis.pid(), postgres.pid()].map(|pid| pid.map(|pid| pid.to_string()));
    let [Some(redis_pid), Some(postgres_pid)] = pids else {
        anyhow::bail!("a server ended");
    };
    let program = root().join("target/release/tritmill");
    let tritmill = || {
        let mut command = std::process::Command::new(&program);
        command.env("REDIS_URL", redis.url()).env("DATABASE_URL", postgres.url());
        command
    };
    process::run(tritmill().arg("migrate"))?;
    let mut bench = tritmill();
    bench.args(["bench", "queue", "--redis-pid", &redis_pid, "--postgres-pid", &postgres_pid]);
    process::run(bench.args(options)).context("bench queue")
}

fn tritmill() -> std::process::Command {
    let mut command = cargo();
    command.args(["run", "--quiet", "--release", "--package", "tritmill", "--"]);
    command
}
