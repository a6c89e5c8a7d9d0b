//! Two numerics classes on one queue, allowed and withdrawn by an operator, with real processes.

#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "a failed step of a test is a failed test")]

#[path = "support/fleet.rs"]
#[allow(dead_code, reason = "not every test uses all of it")]
mod fleet;

use std::{fs, time::Duration};

use fleet::{Fleet, eventually};
use serde_json::Value;

const QUEUE: &str = "demo@i2_s";

fn json(text: &str) -> Value {
    serde_json::from_str(text.lines().next().unwrap()).unwrap()
}

/// Submits a line; returns its job in the terminal state.
fn answered(fleet: &Fleet, input: &str) -> Value {
    let (code, submitted, stderr) = fleet.run(&["submit", input]);
    assert_eq!(code, Some(0), "{stderr}");
    let id = json(&submitted)["id"].as_str().unwrap().to_owned();
    let (code, job, stderr) = fleet.run(&["watch", &id, "--timeout", "60"]);
    assert_eq!(code, Some(0), "{stderr}");
    json(&job)
}

#[test]
fn allowed_class_serves_and_withdrawn_class_drains() {
    let folder = tempfile::tempdir().unwrap();
    let input = folder.path().join("in");
    fs::write(&input, "{\"prompt\": \"Paid on the 3rd of March, 2024\", \"temperature\": 0}\n")
        .unwrap();
    let input = input.to_str().unwrap();
    let fleet = Fleet::start();
    let shown = || json(&fleet.run(&["queue", "show", QUEUE, "--json"]).1);
    assert_eq!(shown()["numerics_class"], Value::Null);
    let mut first = fleet.worker(&[]);
    let own = shown()["numerics_class"].as_str().unwrap().to_owned();
    assert!(own.contains("/kv-f16/"), "{own}");
    let other = own.replace("/kv-f16/", "/kv-f32/");

    // The refusal names the command that allows the class.
    let refused = |class: &str| {
        let (code, _, said) = fleet.run(&["worker", "--kv", "f32", "--threads", "1"]);
        assert_eq!(code, Some(1), "{said}");
        let how = format!("tritmill queue allow-class {QUEUE} {class}");
        assert!(said.contains(&own) && said.contains(&how), "{said}");
    };
    refused(&other);
    let (code, _, said) = fleet.run(&["queue", "allow-class", QUEUE, &other]);
    assert_eq!(code, Some(0), "{said}");
    let mut second = fleet.worker(&["--kv", "f32"]);
    eventually("both workers are listed", || shown()["workers"].as_array().unwrap().len() == 2);
    let state = shown();
    assert_eq!(state["allowed_classes"], serde_json::json!([other]));
    let mut classes: Vec<&str> = state["workers"]
        .as_array()
        .unwrap()
        .iter()
        .map(|worker| worker["numerics_class"].as_str().unwrap())
        .collect();
    classes.sort_unstable();
    assert_eq!(classes, [own.as_str(), other.as_str()]);
    let (_, listed, _) = fleet.run(&["queue", "list"]);
    assert!(listed.contains("2 numerics classes"), "{listed}");
    let (_, said, _) = fleet.run(&["queue", "show", QUEUE]);
    assert!(said.contains(&format!("allowed as well {other}")), "{said}");

    // Each answer names the numerics class of its worker.
    assert_eq!(fleet.run(&["workers", "drain", &first.owner]).0, Some(0));
    assert_eq!(first.wait(Duration::from_secs(30)), Some(0));
    assert_eq!(answered(&fleet, input)["numerics_class"], other);
    let mut first = fleet.worker(&[]);
    let (code, _, said) = fleet.run(&["queue", "withdraw-class", QUEUE, &other]);
    assert_eq!(code, Some(0), "{said}");
    assert_eq!(second.wait(Duration::from_secs(30)), Some(0), "its worker drains");
    let job = answered(&fleet, input);
    assert_eq!(job["numerics_class"], own);
    assert_eq!(job["choices"][0]["text"], "2024-03-03");
    refused(&other);
    assert_eq!(fleet.run(&["queue", "withdraw-class", QUEUE, &other]).0, Some(1));
    assert_eq!(
        fleet.run(&["queue", "withdraw-class", QUEUE, &own]).0,
        Some(1),
        "the class of the queue cannot be withdrawn"
    );
    assert_eq!(first.wait(Duration::from_millis(100)), None, "its worker still runs");
    let acts = fleet.sql("SELECT action FROM audit ORDER BY id");
    // Acts are recorded before they happen, those that fail as well.
    let withdrawn = ["queue.withdraw_class"; 3];
    let expected = [&["queue.allow_class", "worker.drain"][..], &withdrawn].concat();
    assert!(acts.lines().eq(expected), "{acts}");
}

#[test]
fn class_is_allowed_in_a_sqlite_store() {
    let folder = tempfile::tempdir().unwrap();
    let store = folder.path().join("jobs.sqlite");
    let store = store.to_str().unwrap();
    let program = |arguments: &[&str]| {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_tritmill"));
        command.args(arguments).args(["--store", store]);
        command.env_remove("REDIS_URL").env_remove("DATABASE_URL");
        command.stdin(std::process::Stdio::null());
        command
    };
    let standalone = |kv: &str| {
        program(&["standalone", "--api", "127.0.0.1:0", "--json", "--threads", "1", "--kv", kv])
    };
    let mut worker = fleet::WorkerProcess::start(standalone("f16"));
    worker.signal(tritmill_servers::Signal::Terminate);
    assert_eq!(worker.wait(Duration::from_secs(60)), Some(0));
    let output = standalone("f32").output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{said}");
    let how = said.split("tritmill queue allow-class ").nth(1).unwrap();
    let words: Vec<&str> = how.split(' ').take(4).collect();
    assert_eq!((words[0], words[2], words[3]), (QUEUE, "--store", store), "{said}");
    let allowed = program(&["queue", "allow-class", QUEUE, words[1]]).output().unwrap();
    assert!(allowed.status.success(), "{}", String::from_utf8_lossy(&allowed.stderr));
    drop(fleet::WorkerProcess::start(standalone("f32")));
}
