//! The programs that parts start: built here by cargo, or, on a machine without cargo, the programs in
//! the same folder as this one (`cargo xtask gpu pack`).

use std::{
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};
use serde_json::Value;

use crate::process::{self, cargo, root};

/// Names of the programs in a folder made by `pack`.
pub const PACKED: [&str; 3] = ["xtask", "tritmill", "engine-tests"];

/// The command line, the engine's tests if they came along, and how both are started.
pub struct Programs {
    tritmill: PathBuf,
    tests: Option<PathBuf>,
    /// Folder of the driver's library, of an emulated one.
    driver: Option<PathBuf>,
    /// Time at which programs are ended.
    deadline: Option<Instant>,
}

impl Programs {
    /// Finds the programs beside this one; else builds the command line.
    pub fn find() -> anyhow::Result<Self> {
        let this = std::env::current_exe().context("cannot find this program")?;
        let folder = this.parent().context("a program lies in a folder")?;
        let [_, tritmill, tests] = PACKED.map(|name| folder.join(name));
        let packed = tests.exists();
        let tritmill = if packed { tritmill } else { build()? };
        Ok(Self { tests: packed.then_some(tests), ..Self::from_command_line(tritmill) })
    }

    /// Creates a command line without tests beside it.
    pub fn from_command_line(tritmill: PathBuf) -> Self {
        Self { tritmill, tests: None, driver: None, deadline: None }
    }

    /// Uses the driver's library in a folder.
    pub fn with_driver(self, folder: PathBuf) -> Self {
        Self { driver: Some(folder), ..self }
    }

    /// Ends all programs that are started from now on when the limit is over.
    pub fn limit(&mut self, limit: Duration) {
        self.deadline = Some(Instant::now() + limit);
    }

    /// Returns whether the limit is over.
    pub fn is_over(&self) -> bool {
        self.deadline.is_some_and(|deadline| Instant::now() >= deadline)
    }

    /// Returns the path of the command line.
    pub fn tritmill_path(&self) -> &Path {
        &self.tritmill
    }

    /// Returns the command line, without the servers that the environment names.
    pub fn tritmill(&self) -> Command {
        self.under(&[], &self.tritmill)
    }

    /// Returns a program started by another, which takes words before the program's name.
    pub fn under(&self, starter: &[&str], program: &Path) -> Command {
        let mut command = Command::new("timeout");
        // For `timeout`, 0 means no limit.
        let left = |deadline: Instant| deadline.saturating_duration_since(Instant::now());
        let seconds =
            self.deadline.map_or(0, |deadline| left(deadline).as_secs().max(1)).to_string();
        command.args(["--kill-after=2", &seconds]).args(starter).arg(program);
        command.env_remove("REDIS_URL").env_remove("DATABASE_URL").env("RUST_BACKTRACE", "0");
        if let Some(folder) = &self.driver {
            command.env("LD_LIBRARY_PATH", folder);
        }
        command
    }

    /// Returns the engine's unit tests.
    pub fn engine_tests(&self) -> anyhow::Result<Command> {
        let tests = self.tests.clone().map_or_else(build_tests, Ok)?;
        let mut command = self.under(&[], &tests);
        let engine = root().join("engine");
        command.current_dir(&engine).env("CARGO_MANIFEST_DIR", engine);
        Ok(command)
    }
}

/// Returns whether a program is installed.
pub fn is_installed(program: &str) -> bool {
    process::succeeds(Command::new(program).arg("--version"))
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

/// Runs cargo and returns the path of a target's program.
pub fn built(words: &[&str], target: &str) -> anyhow::Result<PathBuf> {
    eprintln!("$ cargo {}", words.join(" "));
    let mut command = cargo();
    command.args(words).arg("--message-format=json-render-diagnostics").stderr(Stdio::inherit());
    let output = command.output().context("cannot start cargo")?;
    ensure!(output.status.success(), "cargo {}: {}", words.join(" "), output.status);
    let found = String::from_utf8_lossy(&output.stdout).lines().find_map(|line| {
        let message: Value = serde_json::from_str(line).ok()?;
        let is_target = message["target"]["name"] == target;
        is_target.then(|| message["executable"].as_str().map(PathBuf::from)).flatten()
    });
    found.with_context(|| format!("cargo built no program `{target}`"))
}

/// Copies a program without its symbols.
pub fn strip(from: &Path, to: &Path) -> anyhow::Result<()> {
    process::run(Command::new("strip").arg("-o").arg(to).arg(from))
}
