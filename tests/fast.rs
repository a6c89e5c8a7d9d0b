//! The fast mode with real processes: producers and workers with a Redis and no database.

#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "a failed step of a test is a failed test")]

#[allow(dead_code, reason = "shared with other tests")]
#[path = "support/fleet.rs"]
mod fleet;

use std::{
    collections::HashSet,
    process::{Command, Stdio},
};

use fleet::{Fast, WorkerProcess, eventually, questions};
use serde_json::{Value, json};
use tritmill_servers::{Redis, Signal};

/// Starts a worker that keeps finished jobs for 0.05 days.
fn worker(fast: &Fast) -> WorkerProcess {
    let mut command = fast.worker(&["--retention", "0.05"]);
    command.stderr(Stdio::null());
    WorkerProcess::start(command)
}

#[test]
fn killed_worker_loses_and_doubles_nothing() {
    let fast = Fast::start();
    let doomed = worker(&fast);
    let jobs = fast.submit(&questions(400), &[]);
    assert_eq!(jobs.values().collect::<HashSet<_>>().len(), 400);
    let first = jobs.values().next().unwrap();
    eventually("something is answered", || {
        fast.run(&["results", first]).1.contains("\"completed\"")
    });
    doomed.signal(Signal::Kill);
    let _heir = worker(&fast);
    let disturbed = fast.answers(&jobs);

    let undisturbed = Fast::start();
    let _worker = worker(&undisturbed);
    let again = undisturbed.submit(&questions(400), &[]);
    assert_eq!(disturbed, undisturbed.answers(&again));
}

#[test]
fn jobs_are_cancelled_and_unknown_jobs_have_no_state() {
    let fast = Fast::start();
    let jobs = fast.submit(&questions(2), &[]);
    let ids: Vec<&str> = jobs.values().map(String::as_str).collect();
    let (code, stdout, _) = fast.run(&["cancel", ids[0]]);
    assert_eq!(code, Some(0));
    assert!(stdout.contains("\"cancelled\":true"), "{stdout}");
    let _worker = worker(&fast);
    let (code, finished) = fast.watch(&ids);
    assert_eq!(code, Some(2), "one is cancelled");
    assert_eq!(
        (&finished[0]["state"], &finished[1]["state"]),
        (&json!("cancelled"), &json!("completed"))
    );
    let key = format!("tm:{{demo:i2_s}}:job:{}", ids[1]);
    let port = fast.redis.port().to_string();
    let kept = Command::new("redis-cli").args(["-p", &port, "ttl", &key]).output().unwrap();
    let kept: u32 = String::from_utf8(kept.stdout).unwrap().trim().parse().unwrap();
    assert!((4200..=4320).contains(&kept), "kept for {kept} s, not for 0.05 days");
    let (_, stdout, _) = fast.run(&["results", ids[1], "--queue", "other@i2_s"]);
    let job: Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!(job["state"], Value::Null, "another queue does not hold the job");
}

#[test]
fn database_urls_and_an_evicting_redis_are_refused() {
    let fast = Fast::start();
    for words in
        [&["worker"][..], &["submit", "-"], &["results", "0199f3c2-0000-7000-8000-000000000000"]]
    {
        let mut command = fast.command(words);
        let output = command.args(["--database", "postgres://localhost/x"]).output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains("--fast") && said.contains("--database"), "{said}");
    }
    let evicting = ["--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru"];
    let evicting = Fast { redis: Redis::start_with(&evicting).unwrap() };
    let (code, _, stderr) = evicting.run(&["submit", "-"]);
    assert_eq!(code, Some(1));
    assert!(stderr.contains("noeviction"), "{stderr}");
}

#[test]
fn bench_queue_measures_every_phase_and_cleans_up() {
    let fast = Fast::start();
    let pid = fast.redis.pid().unwrap().to_string();
    let words = "bench queue --json --jobs 1300 --micro-batch 7 --repetitions 2 --starts 3";
    let mut words: Vec<&str> = words.split(' ').collect();
    words.extend(["--redis-pid", &pid]);
    let (code, stdout, stderr) = fast.run(&words);
    assert_eq!(code, Some(0), "{stderr}");
    let figures: Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!((&figures["mode"], &figures["starts"]), (&json!("fast"), &json!(3)));
    for (row, phase) in figures["rows"].as_array().unwrap().iter().zip(["submit", "consume"]) {
        assert_eq!(row["phase"], phase);
        assert!(row["jobs_per_s"].as_f64() > Some(0.0), "{row}");
        assert!(row["postgres_cpu_s"].is_null(), "{row}");
    }
    assert_eq!(fleet::redis_keys(&fast.redis), 0);
}
