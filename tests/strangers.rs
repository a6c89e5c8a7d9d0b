//! Inputs of strangers: each file of `strangers/` has one that failed in Tritmill or in another tool, and what is right.
//!
//! | field | |
//! | --- | --- |
//! | `report` | where it comes from |
//! | `model` | changes of `bitnet-tiny`: `set` has values by file and JSON pointer, `write` has whole files |
//! | `input` | the lines of IN; or `input_bytes`, in hexadecimal |
//! | `run` | commands for bash; `$IN`, `$OUT` and `$MODEL` are paths |
//! | `code` | the exit code, if it is not 0 |
//! | `json` | for each line of standard output, values by JSON pointer |
//! | `stdout`, `stdout_has`, `stdout_has_not`, `stderr_has`, `stderr_has_not` | what it prints, or a part |

#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "a failed step of a test is a failed test")]

use std::{
    collections::BTreeMap,
    fs,
    path::Path,
    process::{Command, Stdio},
};

use serde::Deserialize;
use serde_json::Value;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Case {
    report: String,
    #[serde(default)]
    model: Changes,
    #[serde(default)]
    input: Vec<String>,
    input_bytes: Option<String>,
    run: String,
    #[serde(default)]
    code: i32,
    #[serde(default)]
    json: Vec<BTreeMap<String, Value>>,
    stdout: Option<String>,
    #[serde(default)]
    stdout_has: Vec<String>,
    #[serde(default)]
    stdout_has_not: Vec<String>,
    #[serde(default)]
    stderr_has: Vec<String>,
    #[serde(default)]
    stderr_has_not: Vec<String>,
}

/// Changes of the model.
#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Changes {
    #[serde(default)]
    set: BTreeMap<String, BTreeMap<String, Value>>,
    #[serde(default)]
    write: BTreeMap<String, String>,
}

impl Changes {
    /// Makes a copy of the model with the changes.
    fn apply(&self, model: &Path) {
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("engine/tests/golden/bitnet-tiny");
        fs::create_dir(model).unwrap();
        for entry in fs::read_dir(golden).unwrap() {
            let path = entry.unwrap().path();
            let copy = model.join(path.file_name().unwrap());
            fs::write(copy, fs::read(path).unwrap()).unwrap();
        }
        for (file, values) in &self.set {
            let path = model.join(file);
            let mut json: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
            for (pointer, value) in values {
                let (parent, key) = pointer.rsplit_once('/').unwrap();
                json.pointer_mut(parent).unwrap()[key] = value.clone();
            }
            fs::write(path, json.to_string()).unwrap();
        }
        for (file, text) in &self.write {
            fs::write(model.join(file), text).unwrap();
        }
    }
}

/// Runs a case; returns what is wrong.
fn problems(case: &Case) -> Vec<String> {
    let folder = tempfile::tempdir().unwrap();
    let [input, output, model] = ["in.jsonl", "out.jsonl", "model"].map(|n| folder.path().join(n));
    case.model.apply(&model);
    let lines = case.input.iter().flat_map(|line| [line.as_bytes(), b"\n"]).collect::<Vec<_>>();
    fs::write(&input, bytes(case).unwrap_or_else(|| lines.concat())).unwrap();
    let program = Path::new(env!("CARGO_BIN_EXE_tritmill")).parent().unwrap();
    let path = format!("{}:{}", program.display(), std::env::var("PATH").unwrap());
    let run = Command::new("bash")
        .args(["-c", &case.run])
        .current_dir(&folder)
        .env("PATH", path)
        .envs([("IN", &input), ("OUT", &output), ("MODEL", &model)])
        .env_remove("REDIS_URL")
        .env_remove("DATABASE_URL")
        .env_remove("RUST_LOG")
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let [stdout, stderr] =
        [&run.stdout, &run.stderr].map(|b| String::from_utf8_lossy(b).into_owned());
    let mut problems = Vec::new();
    let mut check = |holds: bool, problem: String| problems.extend((!holds).then_some(problem));
    check(run.status.code() == Some(case.code), format!("it ended with {}", run.status));
    if let Some(expected) = &case.stdout {
        check(stdout == *expected, format!("it did not print {expected:?}"));
    }
    for part in &case.stdout_has {
        check(stdout.contains(part), format!("{part:?} is not in standard output"));
    }
    for part in &case.stdout_has_not {
        check(!stdout.contains(part), format!("{part:?} is in standard output"));
    }
    for part in &case.stderr_has {
        check(stderr.contains(part), format!("{part:?} is not in standard error"));
    }
    for part in &case.stderr_has_not {
        check(!stderr.contains(part), format!("{part:?} is in standard error"));
    }
    let mut printed = stdout.lines().map(|line| serde_json::from_str::<Value>(line).ok());
    for expected in &case.json {
        let line = printed.next().flatten().unwrap_or_default();
        for (pointer, value) in expected {
            let found = line.pointer(pointer).unwrap_or(&Value::Null);
            check(found == value, format!("{pointer} is {found}, not {value}"));
        }
    }
    if !problems.is_empty() {
        problems.push(format!("standard output: {stdout}\nstandard error: {stderr}"));
    }
    problems
}

fn bytes(case: &Case) -> Option<Vec<u8>> {
    let text = case.input_bytes.as_deref()?;
    let byte = |at: usize| u8::from_str_radix(&text[at..at + 2], 16).unwrap();
    Some((0..text.len()).step_by(2).map(byte).collect())
}

#[test]
fn inputs_of_strangers_have_their_right_values() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/strangers");
    let mut files: Vec<_> =
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    assert!(files.len() >= 75, "the corpus is whole: {}", files.len());
    let mut failed = String::new();
    for file in files {
        let name = file.file_stem().unwrap().to_string_lossy().into_owned();
        let case: Case = serde_json::from_slice(&fs::read(&file).unwrap())
            .unwrap_or_else(|error| panic!("{name}: {error}"));
        let problems = problems(&case);
        if !problems.is_empty() {
            failed += &format!("{name} ({}):\n  {}\n", case.report, problems.join("\n  "));
        }
    }
    assert!(failed.is_empty(), "{failed}");
}
