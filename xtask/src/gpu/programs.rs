//! The programs that parts start: built here by cargo, or, on a machine without it, those that lie beside
//! this one (`cargo xtask gpu pack`).

use std::{
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context as _, ensure};
use serde_json::Value;

use crate::process::{self, cargo, root};

/// Names of the programs in a folder made by `pack`.
pub const PACKED: [&str; 3] = ["xtask", "tritmill", "engine-tests"];

/// The command line, and the engine's tests if they came along.
pub struct Programs {
    pub tritmill: PathBuf,
    tests: Option<PathBuf>,
}

impl Programs {
    /// Those beside this program; else builds the command line.
    pub fn find() -> anyhow::Result<Self> {
        let this = std::env::current_exe().context("cannot find this program")?;
        let folder = this.parent().context("a program lies in a folder")?;
        let [_, tritmill, tests] = PACKED.map(|name| folder.join(name));
        if tests.exists() {
            return Ok(Self { tritmill, tests: Some(tests) });
        }
        Ok(Self { tritmill: build()?, tests: None })
    }

    /// The command line, which hears of no servers that are somebody's own.
    pub fn tritmill(&self) -> Command {
        let mut command = Command::new(&self.tritmill);
        command.env_remove("REDIS_URL").env_remove("DATABASE_URL");
        command
    }

    /// The engine's unit tests.
    pub fn engine_tests(&self) -> anyhow::Result<Command> {
        let tests = self.tests.clone().map_or_else(build_tests, Ok)?;
        let mut command = Command::new(tests);
        let engine = root().join("engine");
        command.current_dir(&engine).env("CARGO_MANIFEST_DIR", engine);
        Ok(command)
    }
}

/// Builds the command line for speed.
pub fn build() -> anyhow::Result<PathBuf> {
    let build = ["build", "--release", "--package", "tritmill", "--bin", "tritmill"];
    built(&build, "tritmill")
}

/// Builds the engine's tests, optimised as the engine always is.
pub fn build_tests() -> anyhow::Result<PathBuf> {
    built(&["test", "--package", "tritmill-engine", "--lib", "--no-run"], "tritmill_engine")
}

/// Runs cargo, and says where the program of a target is.
pub fn built(words: &[&str], target: &str) -> anyhow::Result<PathBuf> {
    eprintln!("$ cargo {}", words.join(" "));
    let mut command = cargo();
    command.args(words).arg("--message-format=json-render-diagnostics").stderr(Stdio::inherit());
    let output = command.output().context("cannot start cargo")?;
    ensure!(output.status.success(), "cargo {}: {}", words.join(" "), output.status);
    let found = String::from_utf8_lossy(&output.stdout).lines().find_map(|line| {
        let message: Value = serde_json::from_str(line).ok()?;
        let named = message["target"]["name"] == target;
        named.then(|| message["executable"].as_str().map(PathBuf::from)).flatten()
    });
    found.with_context(|| format!("cargo named no program {target}"))
}

/// Copies a program without its symbols.
pub fn strip(from: &Path, to: &Path) -> anyhow::Result<()> {
    process::run(Command::new("strip").arg("-o").arg(to).arg(from))
}

/// The JSON that a command prints; a failed check of `doctor` is its own concern.
pub fn json(command: &mut Command) -> anyhow::Result<Value> {
    let output = command.stderr(Stdio::inherit()).output().context("cannot start")?;
    serde_json::from_slice(&output.stdout)
        .with_context(|| format!("{command:?} printed no JSON: {}", output.status))
}
