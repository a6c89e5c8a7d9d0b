//! Python packages of tests and tasks, each in an environment below `target`.

use std::process::Command;

use anyhow::Context as _;

use super::process;

/// Installs a Python package in its environment, unless it is there.
pub fn install(folder: &str, package: &str) -> anyhow::Result<()> {
    let folder = process::root().join("target").join(folder);
    let done = folder.join(package);
    if done.exists() {
        return Ok(());
    }
    let made = process::run(Command::new("python3").args(["-m", "venv", "--clear"]).arg(&folder))
        .and_then(|()| {
            let mut pip = Command::new(folder.join("bin/python"));
            process::run(pip.args(["-m", "pip", "install", "--quiet", package]))
        });
    if made.is_err() {
        // Tests take an existing environment for a complete one.
        let _ = std::fs::remove_dir_all(&folder);
    }
    made.with_context(|| {
        format!("cannot install {package}; it needs python3 with venv (apt install python3-venv) and PyPI")
    })?;
    std::fs::write(done, "").context("cannot write to target")
}
