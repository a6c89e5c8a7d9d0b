//! Packages of Python and Node for tests and tasks, below `target`.

use std::{fs, process::Command};

use anyhow::Context as _;

use super::process;

/// Installs a Python package in its environment, unless it is there.
pub fn install(folder: &str, package: &str) -> anyhow::Result<()> {
    install_all(folder, &[package], package)
}

/// Installs packages in their environment, unless they are there. `version` changes with them.
pub fn install_all(folder: &str, packages: &[&str], version: &str) -> anyhow::Result<()> {
    let folder = process::root().join("target").join(folder);
    let done = folder.join(version);
    if done.exists() {
        return Ok(());
    }
    let made = process::run(Command::new("python3").args(["-m", "venv", "--clear"]).arg(&folder))
        .and_then(|()| {
            let mut pip = Command::new(folder.join("bin/python"));
            process::run(pip.args(["-m", "pip", "install", "--quiet"]).args(packages))
        });
    if made.is_err() {
        // Tests take an existing environment for a complete one.
        let _ = fs::remove_dir_all(&folder);
    }
    made.with_context(|| {
        format!(
            "cannot install {}; it needs python3 with venv (apt install python3-venv) and PyPI",
            packages.join(", ")
        )
    })?;
    fs::write(done, "").context("cannot write to target")
}

/// Installs the clients that the HTTP API is tested with, in the versions of `tests/clients`.
pub fn install_clients() -> Vec<anyhow::Result<()>> {
    let python = || {
        let list = process::root().join("tests/clients/requirements.txt");
        let list = fs::read_to_string(&list).with_context(|| format!("cannot read {list:?}"))?;
        let packages: Vec<&str> = list.lines().collect();
        install_all("clients", &packages, &packages.join("+"))
    };
    vec![python(), install_node_clients()]
}

fn install_node_clients() -> anyhow::Result<()> {
    let root = process::root();
    let folder = root.join("target/clients-node");
    let lock = fs::read(root.join("tests/clients/package-lock.json"))?;
    if fs::read(folder.join("node_modules/installed")).is_ok_and(|installed| installed == lock) {
        return Ok(());
    }
    fs::create_dir_all(&folder)?;
    for name in ["package.json", "package-lock.json"] {
        fs::copy(root.join("tests/clients").join(name), folder.join(name))?;
    }
    let mut npm = Command::new("npm");
    npm.args(["ci", "--silent", "--no-audit", "--no-fund", "--ignore-scripts"]);
    process::run(npm.current_dir(&folder))
        .context("cannot install the clients for Node; this needs npm (apt install npm)")?;
    Ok(fs::write(folder.join("node_modules/installed"), lock)?)
}
