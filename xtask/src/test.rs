//! `cargo xtask test`: every test of the workspace, with cargo-nextest where it is installed.
//!
//! All tests run in the dev profile (dependencies and the engine are optimised there), so that one
//! build serves them all. Tests start Redis and Postgres themselves; where the programs are
//! missing they are installed here, before anything runs, as are the Python client that the HTTP API is
//! tested with and the browser that the dashboard is looked at with.

use std::process::Command;

use anyhow::Context as _;

use super::{
    chaos,
    process::{self, cargo, has_cargo_subcommand},
};

/// Installs Debian packages without the services that come with them.
fn install(packages: &[&str]) -> anyhow::Result<()> {
    let apt = |arguments: &[&str]| {
        let mut command = Command::new("apt-get");
        command.env("DEBIAN_FRONTEND", "noninteractive").args(arguments);
        // Keeps the packages from starting servers: tests start their own.
        command.env("RUNLEVEL", "1");
        process::run(&mut command)
    };
    apt(&["update", "-q"]).and_then(|()| {
        let mut arguments = vec!["install", "-y", "-q", "--no-install-recommends"];
        arguments.extend(packages);
        apt(&arguments)
    })
}

/// The client that the HTTP API is tested with, as its makers publish it; one version, so that a
/// failure is of a change here.
const OPENAI: &str = "openai==3.54.0";

/// Makes a Python environment with that client, unless it is there. Without Python, the test that
/// needs it says that it is skipped.
fn install_openai() -> anyhow::Result<()> {
    let folder = process::root().join("target/openai");
    let done = folder.join(OPENAI);
    if done.exists() {
        return Ok(());
    }
    let made = process::run(Command::new("python3").args(["-m", "venv", "--clear"]).arg(&folder))
        .and_then(|()| {
            let mut pip = Command::new(folder.join("bin/python"));
            process::run(pip.args(["-m", "pip", "install", "--quiet", OPENAI]))
        });
    match made {
        Ok(()) => std::fs::write(done, "").context("cannot write to target"),
        Err(error) => {
            eprintln!("warning: the openai package is not tested against: {error:#}");
            // A half-made one would not be skipped.
            let _ = std::fs::remove_dir_all(&folder);
            Ok(())
        }
    }
}

/// The browser that the dashboard is looked at with, and a font that makes its pictures alike.
const BROWSER: [&str; 3] = ["chromium", "chromium-driver", "fonts-inter"];

/// Installs the browser, unless it is there. Without it, the test that needs it says that it is skipped.
fn install_browser() {
    if tritmill_servers::Browser::is_installed() {
        return;
    }
    if let Err(error) = install(&BROWSER) {
        eprintln!("warning: the dashboard is not looked at: {error:#}");
    }
}

pub fn run(filters: &[String]) -> anyhow::Result<()> {
    install_openai()?;
    install_browser();
    let missing = tritmill_servers::missing_packages();
    if !missing.is_empty() {
        let packages = missing.join(" ");
        install(&missing).with_context(|| {
            format!("tests need {packages}; install by hand with: sudo apt-get install {packages}")
        })?;
    }
    if has_cargo_subcommand("nextest") {
        process::run(
            cargo().args(["nextest", "run", "--workspace", "--no-fail-fast"]).args(filters),
        )?;
    } else {
        let tests = ["test", "--workspace", "--no-fail-fast", "--lib", "--bins", "--tests"];
        process::run(cargo().args(tests).arg("--").args(filters))?;
    }
    process::run(cargo().args(["test", "--doc", "--workspace", "--"]).args(filters))?;
    if filters.is_empty() {
        let short = ["--minutes", "0.3", "--seed", "1"].map(str::to_owned);
        chaos::run(&short)?;
    }
    Ok(())
}
