//! `submit`: quotas, deadlines, idempotency keys, trace contexts; and a batch after a deletion of its
//! jobs.

#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "a failed step of a test is a failed test")]

#[allow(dead_code, reason = "shared with other tests")]
#[path = "support/fleet.rs"]
mod fleet;

use std::{fs, path::PathBuf};

use fleet::{Fleet, eventually};
use serde_json::Value;

/// Returns a folder with an input file of `count` questions.
fn questions(count: usize) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let line = |n: usize| format!("{{\"prompt\": \"Paid on {} March 2024\"}}\n", 1 + n % 28);
    let input = folder.path().join("in");
    fs::write(&input, (0..count).map(line).collect::<String>()).unwrap();
    (folder, input)
}

fn ids(stdout: &str) -> Vec<String> {
    let id = |line: &str| {
        let line: Value = serde_json::from_str(line).unwrap();
        line["id"].as_str().unwrap().to_owned()
    };
    stdout.lines().map(id).collect()
}

#[test]
fn traceparent_is_stored_with_the_job_and_validated() {
    let (_folder, input) = questions(1);
    let fleet = Fleet::start();
    let trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    let submit =
        |trace: &str| fleet.run(&["submit", input.to_str().unwrap(), "--traceparent", trace]);
    let (code, stdout, stderr) = submit(trace);
    assert_eq!((code, ids(&stdout).len()), (Some(0), 1), "{stderr}");
    let carries = format!("all_jobs WHERE position('{trace}' IN encode(job, 'escape')) > 0");
    assert_eq!(fleet.rows(&[&carries]), 1);
    let (code, _, stderr) = submit(&trace.to_uppercase());
    assert_ne!(code, Some(0));
    assert!(stderr.contains("traceparent must be"), "{stderr}");
}

#[test]
fn same_idempotency_key_submits_once() {
    let (_folder, input) = questions(3);
    let fleet = Fleet::start();
    let submit = || fleet.run(&["submit", input.to_str().unwrap(), "--idempotency-key", "k"]);
    let (code, first, stderr) = submit();
    assert_eq!((code, ids(&first).len()), (Some(0), 3), "{stderr}");
    let (code, second, stderr) = submit();
    assert_eq!((code, ids(&second)), (Some(0), ids(&first)), "{stderr}");
    assert_eq!(fleet.rows(&["all_jobs"]), 3);
    fs::write(&input, "{\"prompt\": \"something else\"}\n").unwrap();
    let (code, _, stderr) = submit();
    assert_eq!(code, Some(1));
    assert!(stderr.contains("idempotency key"), "{stderr}");
    assert_eq!(fleet.rows(&["all_jobs"]), 3);
}

#[test]
fn job_past_its_deadline_expires() {
    let (_folder, input) = questions(1);
    let fleet = Fleet::start();
    let (_, late, _) = fleet.run(&["submit", input.to_str().unwrap(), "--deadline", "1"]);
    let (_, early, _) = fleet.run(&["submit", input.to_str().unwrap(), "--deadline", "3600"]);
    std::thread::sleep(std::time::Duration::from_secs(2));
    let _worker = fleet.worker(&[]);
    let (late, early) = (ids(&late).remove(0), ids(&early).remove(0));
    let (code, jobs, stderr) = fleet.run(&["watch", &late, &early, "--timeout", "60"]);
    assert_eq!(code, Some(2), "{stderr}");
    let states: Vec<String> = jobs
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap()["state"].to_string())
        .collect();
    assert_eq!(states, ["\"expired\"", "\"completed\""]);
}

#[test]
fn tenant_over_its_quota_waits_and_others_do_not() {
    let (_folder, input) = questions(30);
    let (_other, one) = questions(1);
    let fleet = Fleet::start();
    let (code, _, stderr) = fleet.run(&["queue", "limit", "demo@i2_s", "900", "--each-tenant"]);
    assert_eq!(code, Some(0), "{stderr}");
    let limit = ["queue", "limit", "demo@i2_s", "600", "--tenant", "greedy"];
    assert_eq!(fleet.run(&limit).0, Some(0));
    let (code, _, said) = std::thread::scope(|scope| {
        let greedy = || fleet.run(&["submit", input.to_str().unwrap(), "--tenant", "greedy"]);
        let greedy = scope.spawn(greedy);
        eventually("some of the greedy tenant's are in", || fleet.rows(&["all_jobs"]) > 0);
        let (code, _, said) = fleet.run(&["submit", one.to_str().unwrap(), "--tenant", "modest"]);
        assert_eq!(code, Some(0), "{said}");
        assert!(!said.contains("full at"), "{said}");
        assert!(fleet.rows(&["all_jobs"]) < 31, "the quota holds the others back");
        let _worker = fleet.worker(&[]);
        greedy.join().unwrap()
    });
    assert_eq!(code, Some(0), "{said}");
    assert!(said.contains("full at its tenant's 600 tokens"), "{said}");
    assert_eq!(fleet.rows(&["all_jobs"]), 31);
}

#[test]
fn batch_completes_after_its_jobs_are_deleted() {
    let (folder, input) = questions(20);
    let output = folder.path().join("out");
    let fleet = Fleet::start();
    let (code, stdout, stderr) = std::thread::scope(|scope| {
        let (input, output) = (input.to_str().unwrap(), output.to_str().unwrap());
        let batch = scope.spawn(|| fleet.run(&["batch", "run", input, "-o", output, "--json"]));
        eventually("the jobs are there", || fleet.rows(&["all_jobs"]) == 20);
        fleet.sql("DELETE FROM open_jobs");
        let _worker = fleet.worker(&[]);
        batch.join().unwrap()
    });
    assert_eq!(code, Some(0), "{stderr}");
    let summary: Value = serde_json::from_str(stdout.lines().last().unwrap()).unwrap();
    assert_eq!(summary["completed"], 20);
    assert_eq!(fs::read_to_string(output).unwrap().lines().count(), 20);
}

#[test]
fn standalone_migrates_an_empty_database() {
    let (_folder, input) = questions(2);
    let fleet = Fleet::empty();
    let (code, _, stderr) = fleet.run(&["submit", input.to_str().unwrap()]);
    assert_eq!(code, Some(1), "nothing is migrated yet");
    assert!(stderr.contains("migrate"), "{stderr}");
    let _service = fleet.serve("standalone", &["--api", "127.0.0.1:0"]);
    let (code, submitted, stderr) = fleet.run(&["submit", input.to_str().unwrap()]);
    assert_eq!(code, Some(0), "{stderr}");
    let ids = ids(&submitted);
    let watch = ["watch", &ids[0], &ids[1], "--timeout", "60"];
    assert_eq!(fleet.run(&watch).0, Some(0));
}
