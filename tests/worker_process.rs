//! The worker process while it loads its model.

#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a failed step of a test is a failed test")]

#[allow(dead_code, reason = "shared with other tests")]
#[path = "support/fleet.rs"]
mod fleet;

use std::{
    fs,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use fleet::{Fleet, eventually};
use tritmill_servers::Signal;

/// Returns whether a process handles SIGTERM: the first process of a container has no default
/// handler.
fn handles_terminate(pid: u32) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:")).unwrap();
    u64::from_str_radix(caught.trim(), 16).unwrap() & (1 << 14) != 0
}

#[test]
fn worker_that_loads_its_model_stops_at_once() {
    let fleet = Fleet::start();
    let folder = tempfile::tempdir().unwrap();
    // A fifo without a writer: opening it never returns.
    let model = folder.path().join("endless.gguf");
    assert!(Command::new("mkfifo").arg(&model).status().unwrap().success());
    let mut worker = fleet
        .command(&["worker", "--model", model.to_str().unwrap()])
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    eventually("the worker handles signals", || handles_terminate(worker.id()));
    assert!(worker.try_wait().unwrap().is_none(), "it is loading");
    let told_at = Instant::now();
    Signal::Terminate.send(worker.id()).unwrap();
    while worker.try_wait().unwrap().is_none() {
        assert!(told_at.elapsed() < Duration::from_secs(10), "it is still loading");
        std::thread::sleep(Duration::from_millis(5));
    }
    let output = worker.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{said}");
    assert!(said.contains("before it claimed any jobs"), "{said}");
}
