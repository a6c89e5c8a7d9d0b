//! The engine's tests that compare the CUDA backend with the CPU's, on the device, bit by bit. A group of tests is one process;
//! a test that fails is run again by itself, because an error of a kernel ends a process's use of the device.
//!
//! Left out are the groups that need the emulated driver, or damage devices on purpose: `limits`, `recordings`,
//! `overlap`, `experimental::tuning` and `emulated`.

use std::process::Command;

use super::place::Place;

/// Most failed tests that are run again.
const AGAIN_MAX: usize = 4;

/// Runs the tests of a module of `backend::cuda::tests`.
pub fn run(place: &Place, module: &str) -> anyhow::Result<String> {
    let filter = format!("backend::cuda::tests::{module}::");
    let (passed, failed, text) = tests(place, &[&filter, "--test-threads=2"])?;
    let mut report = format!("{} passed, {} failed\n", passed.len(), failed.len());
    if failed.is_empty() && !passed.is_empty() {
        return Ok(report);
    }
    report += &format!("\n```\n{}\n```\n", end_of(&text, 3000));
    for name in failed.iter().take(AGAIN_MAX) {
        let (passed, _, text) = tests(place, &[name, "--exact"])?;
        let by_itself = if passed.is_empty() { "fails" } else { "passes" };
        report += &format!("\n`{name}` {by_itself} by itself\n");
        if passed.is_empty() {
            report += &format!("\n```\n{}\n```\n", end_of(&text, 1500));
        }
    }
    anyhow::bail!("{report}")
}

/// Runs tests; returns the names of those that passed and failed, and what was printed.
fn tests(place: &Place, arguments: &[&str]) -> anyhow::Result<(Vec<String>, Vec<String>, String)> {
    let mut command: Command = place.programs.engine_tests()?;
    command.args(arguments);
    if !place.is_rehearsal {
        command.env("TRITMILL_TEST_DEVICE", &place.device);
    }
    let (output, messages) = place.output(&mut command)?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let named = |end: &str| {
        let of_line =
            |line: &str| Some(line.strip_prefix("test ")?.strip_suffix(end)?.trim_end().to_owned());
        text.lines().filter_map(of_line).collect::<Vec<_>>()
    };
    let (passed, mut failed) = (named("... ok"), named("... FAILED"));
    if !output.status.success() && failed.is_empty() {
        failed.push(format!("{}", output.status));
    }
    Ok((passed, failed, text + &messages))
}

/// Returns the end of a text.
fn end_of(text: &str, bytes: usize) -> &str {
    let start = text.len().saturating_sub(bytes);
    let start = (start..=text.len()).find(|at| text.is_char_boundary(*at)).unwrap_or(text.len());
    &text[start..]
}
