//! `cargo xtask test`: every test of the workspace, with cargo-nextest where it is installed.
//!
//! All tests run in the dev profile (dependencies and the engine are optimised there), so that one
//! build serves them all. Before they run, the programs and Python packages that they need are
//! installed if they are missing. What cannot be installed is a warning, and the tests that need it
//! are skipped; with `TRITMILL_REQUIRE_ALL=1` it is an error.

use std::{iter, process::Command, thread};

use anyhow::{Context as _, ensure};

use super::{
    chaos, package,
    process::{self, cargo, has_cargo_subcommand},
    ptx, python,
};

/// Python packages that the HTTP API and object stores are tested with, each in an environment below `target`. The
/// versions are fixed, so that a failure comes from a change in this repository.
const PYTHON_PACKAGES: [(&str, &str); 4] = [
    ("anthropic", "anthropic==2.14.0"),
    ("moto", "moto[server]==5.2.1"),
    ("openai", "openai==3.54.0"),
    ("schemathesis", "schemathesis==4.32.5"),
];

/// Shares of a processor, of which `xtask/nextest.toml` says how many a test takes.
const SHARES: usize = 3;

/// Runs apt-get with arguments, as root.
fn apt(arguments: &[&str]) -> anyhow::Result<()> {
    let user = Command::new("id").arg("-u").output().context("cannot run id")?;
    let root = if user.stdout.trim_ascii() == b"0" { &[][..] } else { &["sudo", "-n"] };
    // RUNLEVEL keeps the packages from starting servers: tests start their own.
    let apt = ["env", "DEBIAN_FRONTEND=noninteractive", "RUNLEVEL=1", "apt-get", "-q"];
    let words = [root, &apt, arguments].concat();
    process::run(Command::new(words[0]).args(&words[1..]))
}

/// Installs Debian packages; returns an outcome of each step.
pub fn install_packages(packages: &[&str]) -> Vec<anyhow::Result<()>> {
    if packages.is_empty() {
        return Vec::new();
    }
    let update = apt(&["update"]);
    let install = packages.iter().map(|package| {
        apt(&["install", "-y", "--no-install-recommends", package])
            .with_context(|| format!("install by hand: sudo apt-get install {package}"))
    });
    iter::once(update).chain(install).collect()
}

/// Installs what tests need and this machine lacks; returns what could not be installed.
fn install() -> Vec<anyhow::Error> {
    let python = PYTHON_PACKAGES.map(|(folder, package)| python::install(folder, package));
    let mut outcomes = vec![ptx::install_for_tests()];
    outcomes.extend(python);
    let mut packages = tritmill_servers::missing_packages();
    if packages.contains(&"chromium") {
        // The font that the screenshots are made with.
        packages.push("fonts-inter");
    }
    for (program, package) in [("npm", "npm"), ("jq", "jq"), ("curl", "curl")] {
        if Command::new(program).arg("--version").output().is_err() {
            packages.push(package);
        }
    }
    outcomes.extend(install_packages(&packages));
    outcomes.extend(python::install_clients());
    outcomes.into_iter().filter_map(Result::err).collect()
}

pub fn run(filters: &[String]) -> anyhow::Result<()> {
    for error in install() {
        ensure!(!tritmill_servers::all_required(), "{error:#}");
        eprintln!("warning: tests that need this are skipped: {error:#}");
    }
    if has_cargo_subcommand("nextest") {
        let processors = thread::available_parallelism().map_or(1, usize::from);
        let shares = (processors * SHARES).to_string();
        let mut nextest = cargo();
        nextest.args(["nextest", "run", "--workspace", "--no-fail-fast"]);
        nextest.arg("--config-file").arg(process::root().join("xtask/nextest.toml"));
        nextest.env("NEXTEST_TEST_THREADS", shares);
        process::run(nextest.args(filters))?;
    } else {
        let tests =
            ["test", "--workspace", "--no-fail-fast", "--lib", "--bins", "--tests", "--examples"];
        process::run(cargo().args(tests).arg("--").args(filters))?;
    }
    process::run(cargo().args(["test", "--doc", "--workspace", "--"]).args(filters))?;
    if filters.is_empty() {
        package::run(&[])?;
        ptx::check()?;
        let short = ["--minutes", "0.3", "--seed", "1"].map(str::to_owned);
        chaos::run(&short)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_crate_of_the_workspace_states_its_level_in_the_dev_profile() {
        let read = |path: &str| {
            std::fs::read_to_string(process::root().join(path))
                .unwrap_or_else(|error| panic!("{path}: {error}"))
        };
        let workspace = read("Cargo.toml");
        let members = workspace.lines().find_map(|line| line.strip_prefix("members = ["));
        let members = members.expect("a list of members on one line").trim_end_matches(']');
        let folders = members.split(", ").map(|folder| folder.trim_matches('"'));
        let manifests = folders.map(|folder| format!("{folder}/Cargo.toml"));
        for path in manifests.chain(["Cargo.toml".to_owned()]) {
            let manifest = read(&path);
            let name = manifest.lines().find_map(|line| line.strip_prefix("name = "));
            let name = name.expect("a name").trim_matches('"');
            let section = format!("\n[profile.dev.package.{name}]\nopt-level = ");
            assert!(workspace.contains(&section), "Cargo.toml lacks [profile.dev.package.{name}]");
        }
    }
}
