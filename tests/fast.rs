//! The fast mode with real processes: producers and workers with a Redis and no database.

#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "a failed step of a test is a failed test")]

#[allow(dead_code, reason = "shared with other tests")]
#[path = "support/fleet.rs"]
mod fleet;

use std::{
    collections::{BTreeMap, HashSet},
    fs,
    process::{Command, Stdio},
};

use fleet::{WorkerProcess, eventually, questions};
use serde_json::{Value, json};
use tritmill_servers::{Redis, Signal};

/// A Redis for the fast mode.
struct Fast {
    redis: Redis,
}

impl Fast {
    fn start() -> Self {
        Self { redis: Redis::start().unwrap() }
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tritmill"));
        command
            .args(arguments)
            .arg("--fast")
            .env("REDIS_URL", self.redis.url())
            .env_remove("DATABASE_URL")
            .stdin(Stdio::null());
        command
    }

    fn run(&self, arguments: &[&str]) -> (Option<i32>, String, String) {
        fleet::run(&mut self.command(arguments))
    }

    fn worker(&self) -> WorkerProcess {
        let words = "worker --json --threads 1 --lease 2 --retention 0.05";
        let mut command = self.command(&words.split(' ').collect::<Vec<_>>());
        command.stderr(Stdio::null());
        WorkerProcess::start(command)
    }

    /// Submits a file; returns the job ids by custom_id.
    fn submit(&self, lines: &str) -> BTreeMap<String, String> {
        let folder = tempfile::tempdir().unwrap();
        let input = folder.path().join("in");
        fs::write(&input, lines).unwrap();
        let (code, stdout, stderr) = self.run(&["submit", input.to_str().unwrap()]);
        assert_eq!(code, Some(0), "{stderr}");
        let read = |line: &str| {
            let line: Value = serde_json::from_str(line).unwrap();
            let text = |name: &str| line[name].as_str().unwrap().to_owned();
            (text("custom_id"), text("id"))
        };
        stdout.lines().map(read).collect()
    }

    /// Waits for jobs; returns the exit code and the jobs in the order of the ids.
    fn watch(&self, ids: &[&str]) -> (Option<i32>, Vec<Value>) {
        let words = [&["watch", "--timeout", "120"], ids].concat();
        let (code, stdout, _) = self.run(&words);
        (code, stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect())
    }
}

/// Waits for jobs that must complete; returns their choices by custom_id.
fn answers(fast: &Fast, jobs: &BTreeMap<String, String>) -> BTreeMap<String, Value> {
    let ids: Vec<&str> = jobs.values().map(String::as_str).collect();
    let (code, finished) = fast.watch(&ids);
    assert_eq!((code, finished.len()), (Some(0), jobs.len()));
    let answered = jobs.keys().zip(&finished).map(|(name, job)| {
        assert_eq!(job["state"], "completed", "{job}");
        (name.clone(), job["choices"].clone())
    });
    answered.collect()
}

#[test]
fn killed_worker_loses_and_doubles_nothing() {
    let fast = Fast::start();
    let doomed = fast.worker();
    let jobs = fast.submit(&questions(400));
    assert_eq!(jobs.values().collect::<HashSet<_>>().len(), 400);
    let first = jobs.values().next().unwrap();
    eventually("something is answered", || {
        fast.run(&["results", first]).1.contains("\"completed\"")
    });
    doomed.signal(Signal::Kill);
    let _heir = fast.worker();
    let disturbed = answers(&fast, &jobs);

    let undisturbed = Fast::start();
    let _worker = undisturbed.worker();
    let again = undisturbed.submit(&questions(400));
    assert_eq!(disturbed, answers(&undisturbed, &again));
}

#[test]
fn jobs_are_cancelled_and_unknown_jobs_have_no_state() {
    let fast = Fast::start();
    let jobs = fast.submit(&questions(2));
    let ids: Vec<&str> = jobs.values().map(String::as_str).collect();
    let (code, stdout, _) = fast.run(&["cancel", ids[0]]);
    assert_eq!(code, Some(0));
    assert!(stdout.contains("\"cancelled\":true"), "{stdout}");
    let _worker = fast.worker();
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
