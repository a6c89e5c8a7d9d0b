//! `cargo xtask test`: every test of the workspace, with cargo-nextest where it is installed.
//!
//! All tests run in the dev profile (dependencies and the engine are optimised there), so that one
//! build serves them all. Tests start Redis and Postgres themselves; where the programs are
//! missing they are installed here, before anything runs, as are the Python packages that the HTTP API
//! is tested with, the browser that the dashboard is looked at with, and what compiles the CUDA kernels.

use std::process::Command;

use anyhow::Context as _;

use super::{
    chaos,
    process::{self, cargo, has_cargo_subcommand},
    ptx,
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

/// What the HTTP API is tested with, as its makers publish it, each in a folder of its own below
/// `target`; one version, so that a failure is of a change here.
const PYTHON_PACKAGES: [(&str, &str); 2] =
    [("openai", "openai==3.54.0"), ("schemathesis", "schemathesis==4.32.5")];

/// Makes a Python environment with a package, unless it is there. Without Python, the test that
/// needs it says that it is skipped.
pub fn install_python(folder: &str, package: &str) -> anyhow::Result<()> {
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
    match made {
        Ok(()) => std::fs::write(done, "").context("cannot write to target"),
        Err(error) => {
            eprintln!("warning: nothing is tested with {package}: {error:#}");
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

/// Installs the compiler by which the CUDA kernels run on this machine's processor, unless it is there.
/// Without it, the tests of the CUDA backend say that they are skipped.
fn install_compiler() {
    if Command::new("g++").arg("--version").output().is_ok_and(|out| out.status.success()) {
        return;
    }
    if let Err(error) = install(&["g++"]) {
        eprintln!("warning: the CUDA backend is not tested: {error:#}");
    }
}

pub fn run(filters: &[String]) -> anyhow::Result<()> {
    for (folder, package) in PYTHON_PACKAGES {
        install_python(folder, package)?;
    }
    install_browser();
    ptx::install_for_tests()?;
    install_compiler();
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
        ptx::check()?;
        let short = ["--minutes", "0.3", "--seed", "1"].map(str::to_owned);
        chaos::run(&short)?;
    }
    Ok(())
}
