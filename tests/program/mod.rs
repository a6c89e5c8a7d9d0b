//! Runs the program and looks at what it says.

use std::{path::Path, process::Command};

use serde_json::Value;

/// What a run left.
#[derive(Debug)]
pub struct Output {
    /// Exit code.
    pub code: i32,
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
}

/// A path of the golden data.
pub fn golden(name: &str) -> String {
    format!("{}/engine/tests/golden/{name}", env!("CARGO_MANIFEST_DIR"))
}

/// Runs the program with these arguments, in an environment without settings of ours.
pub fn run(arguments: &[&str]) -> Output {
    let output = Command::new(Path::new(env!("CARGO_BIN_EXE_tritmill")))
        .args(arguments)
        .env_remove("RUST_LOG")
        .output()
        .expect("the program starts");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("the program speaks UTF-8");
    let code = output.status.code().expect("it exits by itself");
    Output { code, stdout: text(output.stdout), stderr: text(output.stderr) }
}

/// The JSON that a successful run prints.
pub fn json(arguments: &[&str]) -> Value {
    let output = run(arguments);
    assert_eq!(output.code, 0, "{arguments:?}: {}", output.stderr);
    serde_json::from_str(&output.stdout).expect("one JSON value")
}

/// Runs the program, which must refuse: exit code 1, nothing on standard output, an error that
/// says `says`, no panic.
pub fn fails(arguments: &[&str], says: &str) -> Output {
    let output = run(arguments);
    assert_eq!(output.code, 1, "{arguments:?}: {output:?}");
    assert_eq!(output.stdout, "", "{arguments:?}");
    assert!(output.stderr.starts_with("error: "), "{arguments:?}: {}", output.stderr);
    assert!(output.stderr.contains(says), "{arguments:?}: {}", output.stderr);
    assert!(!output.stderr.contains("panicked"), "{arguments:?}: {}", output.stderr);
    output
}
