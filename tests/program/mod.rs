//! Runs the program and returns its output.

use std::{path::Path, process::Command};

use serde_json::Value;

/// Exit code and output of a run.
#[derive(Debug)]
pub struct Output {
    /// Exit code.
    pub code: i32,
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
}

/// Returns the path of a folder of the golden data.
pub fn golden(name: &str) -> String {
    format!("{}/engine/tests/golden/{name}", env!("CARGO_MANIFEST_DIR"))
}

/// Runs the program with these arguments and without `RUST_LOG`.
pub fn run(arguments: &[&str]) -> Output {
    let output = Command::new(Path::new(env!("CARGO_BIN_EXE_tritmill")))
        .args(arguments)
        .env_remove("RUST_LOG")
        .output()
        .expect("the program starts");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("the output is UTF-8");
    let code = output.status.code().expect("the program exits without a signal");
    Output { code, stdout: text(output.stdout), stderr: text(output.stderr) }
}

/// Returns the JSON that a successful run prints.
pub fn json(arguments: &[&str]) -> Value {
    let output = run(arguments);
    assert_eq!(output.code, 0, "{arguments:?}: {}", output.stderr);
    serde_json::from_str(&output.stdout).expect("one JSON value")
}

/// Runs the program, which must exit with code 1, print nothing on standard output and an error that
/// contains `message` on standard error, without a panic.
pub fn fails(arguments: &[&str], message: &str) -> Output {
    let output = run(arguments);
    assert_eq!(output.code, 1, "{arguments:?}: {output:?}");
    assert_eq!(output.stdout, "", "{arguments:?}");
    assert!(output.stderr.starts_with("error: "), "{arguments:?}: {}", output.stderr);
    assert!(output.stderr.contains(message), "{arguments:?}: {}", output.stderr);
    assert!(!output.stderr.contains("panicked"), "{arguments:?}: {}", output.stderr);
    output
}
