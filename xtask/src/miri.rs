//! `cargo xtask miri`: the tests of KV bookkeeping under Miri, which finds undefined behaviour.

use std::process::Command;

use anyhow::ensure;

use super::process;

/// Tests of the engine that need no file and no device.
const TESTS: [&str; 5] =
    ["kv::cache::", "kv::pool::", "kv::prefix::", "kv::shared::", "scheduler::"];

/// Returns a command of the nightly toolchain's cargo.
fn nightly() -> Command {
    let mut command = Command::new("rustup");
    command.args(["run", "nightly", "cargo", "miri"]).current_dir(process::root());
    // Those of the cargo that started this program.
    command.env_remove("CARGO").env_remove("RUSTC").env_remove("RUSTUP_TOOLCHAIN");
    command
}

pub fn run(filters: &[String]) -> anyhow::Result<()> {
    ensure!(
        process::succeeds(nightly().arg("--version")),
        "Miri is not installed: rustup toolchain install nightly -c miri -c rust-src"
    );
    let mut test = nightly();
    // A folder of its own: other builds would have to start again.
    test.args(["test", "--target-dir", "target/miri", "-p", "tritmill-engine", "--lib", "--"]);
    match filters {
        [] => test.args(TESTS),
        filters => test.args(filters),
    };
    process::run(&mut test)
}
