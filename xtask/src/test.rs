//! `cargo xtask test`: every test of the workspace, with cargo-nextest where it is installed.
//!
//! All tests run in the dev profile (dependencies and the engine are optimised there), so that one
//! build serves them all. No test needs a service today; one that does belongs behind a check here
//! that says what is missing instead of failing in the middle.

use super::process::{self, cargo, has_cargo_subcommand};

pub fn run(filters: &[String]) -> anyhow::Result<()> {
    if has_cargo_subcommand("nextest") {
        process::run(
            cargo().args(["nextest", "run", "--workspace", "--no-fail-fast"]).args(filters),
        )?;
    } else {
        let tests = ["test", "--workspace", "--no-fail-fast", "--lib", "--bins", "--tests"];
        process::run(cargo().args(tests).arg("--").args(filters))?;
    }
    process::run(cargo().args(["test", "--doc", "--workspace", "--"]).args(filters))
}
