//! What benchmarks run on: a synthetic model, and temporary servers.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use tritmill_servers::{Postgres, Redis};

use super::process::{self, root};

/// The shape that is measured by default.
pub const SHAPE_DEFAULT: &str = "bitnet-2b";

/// Returns the folder of the model with this shape, which this program makes if it does not exist.
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
    pub redis: Redis,
    pub postgres: Postgres,
}

impl Servers {
    /// Starts Postgres with full durability, and Redis with a file that is synced every second: the dispatcher may lose
    /// everything.
    pub fn start() -> anyhow::Result<Self> {
        let durable = ["fsync=on", "full_page_writes=on", "synchronous_commit=on"];
        let saved = ["--save", "", "--appendonly", "yes", "--appendfsync", "everysec"];
        Ok(Self { redis: Redis::start_with(&saved)?, postgres: Postgres::start_with(&durable)? })
    }

    /// Names the servers to a command, by its environment.
    pub fn give<'a>(&self, command: &'a mut Command) -> &'a mut Command {
        command.env("REDIS_URL", self.redis.url()).env("DATABASE_URL", self.postgres.url())
    }
}
