//! Producers and workers as processes, with a real Redis and a real Postgres.

#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "a failed step of a test is a failed test")]

#[allow(dead_code, reason = "shared with other tests")]
#[path = "support/fleet.rs"]
mod fleet;
#[allow(dead_code, reason = "shared with other tests")]
mod support;

use std::{fs, path::Path, time::Duration};

use fleet::{Fleet, eventually, questions};
use serde_json::{Value, json};
use support::{lines_of, without_created};
use tritmill_servers::Signal;

fn answers(path: &Path) -> Vec<Value> {
    let mut answers: Vec<Value> = lines_of(path).iter().map(without_created).collect();
    answers.sort_by_key(|answer| answer["custom_id"].to_string());
    answers
}

fn batch(fleet: &Fleet, input: &Path, output: &Path) -> (Option<i32>, String, String) {
    let (input, output) = (input.to_str().unwrap(), output.to_str().unwrap());
    fleet.run(&["batch", "run", input, "-o", output, "--json"])
}

/// Returns the answers of the same lines by `batch run` without servers.
fn embedded(input: &Path, output: &Path) -> Vec<Value> {
    let status = std::process::Command::new(env!("CARGO_BIN_EXE_tritmill"))
        .args(["batch", "run"])
        .arg(input)
        .arg("-o")
        .arg(output)
        .env_remove("REDIS_URL")
        .env_remove("DATABASE_URL")
        .stderr(std::process::Stdio::null())
        .status();
    assert!(status.unwrap().success());
    answers(output)
}

#[test]
fn two_workers_give_the_answers_of_one_process() {
    let folder = tempfile::tempdir().unwrap();
    let [input, here, there] = ["in", "here", "there"].map(|name| folder.path().join(name));
    fs::write(&input, questions(300)).unwrap();
    let fleet = Fleet::start();
    let workers = [fleet.worker(&[]), fleet.worker(&[])];
    let (code, stdout, stderr) = batch(&fleet, &input, &there);
    assert_eq!(code, Some(0), "{stderr}");
    let summary: Value = serde_json::from_str(stdout.lines().last().unwrap()).unwrap();
    assert_eq!((&summary["completed"], &summary["failed"]), (&json!(300), &json!(0)));
    assert_eq!(answers(&there), embedded(&input, &here));
    for worker in &workers {
        assert_eq!(worker.get("/healthz").0, 200);
        let (status, why) = worker.get("/readyz");
        assert_eq!(status, 200, "{why}");
        assert!(worker.get("/metrics").1.contains("tritmill_worker_jobs_completed_total"));
    }
    let (_, queues, _) = fleet.run(&["queue", "list", "--json"]);
    let queue: Value = serde_json::from_str(queues.lines().next().unwrap()).unwrap();
    assert_eq!((&queue["queue"], &queue["completed"]), (&json!("demo@i2_s"), &json!(300)));
}

#[test]
fn killed_worker_loses_and_doubles_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let [input, here, there] = ["in", "here", "there"].map(|name| folder.path().join(name));
    fs::write(&input, questions(600)).unwrap();
    let fleet = Fleet::start();
    let doomed = fleet.worker(&[]);
    let runner = std::thread::scope(|scope| {
        let run = scope.spawn(|| batch(&fleet, &input, &there));
        eventually("something is answered", || {
            fs::read_to_string(&there).is_ok_and(|text| text.lines().count() > 5)
        });
        doomed.signal(Signal::Kill);
        let _heir = fleet.worker(&[]);
        run.join().unwrap()
    });
    assert_eq!(runner.0, Some(0), "{}", runner.2);
    assert_eq!(answers(&there), embedded(&input, &here));
}

#[test]
fn drained_worker_exits_and_is_unlisted() {
    let fleet = Fleet::start();
    let mut worker = fleet.worker(&["--drain", "10"]);
    // Its first heartbeat follows shortly after the ready line.
    eventually("the worker is listed", || {
        fleet.run(&["workers", "list", "--json"]).1.contains(&worker.owner)
    });
    worker.signal(Signal::Terminate);
    assert_eq!(worker.wait(Duration::from_secs(30)), Some(0));
    let (_, listed, _) = fleet.run(&["workers", "list", "--json"]);
    assert!(!listed.contains(&worker.owner), "{listed}");

    let mut worker = fleet.worker(&[]);
    eventually("the worker is known and told to drain", || {
        fleet.run(&["workers", "drain", &worker.owner]).0 == Some(0)
    });
    assert_eq!(worker.wait(Duration::from_secs(30)), Some(0));
}

#[test]
fn jobs_are_submitted_watched_cancelled_and_paused() {
    let folder = tempfile::tempdir().unwrap();
    let input = folder.path().join("in");
    fs::write(
        &input,
        "{\"prompt\": \"Paid on the 3rd of March, 2024\", \"temperature\": 0}\nnonsense\n",
    )
    .unwrap();
    let input = input.to_str().unwrap();
    let fleet = Fleet::start();
    let submit = || {
        let (code, stdout, stderr) = fleet.run(&["submit", input]);
        assert_eq!(code, Some(2), "one line is refused: {stderr}");
        let line: Value = serde_json::from_str(stdout.lines().next().unwrap()).unwrap();
        (line["id"].as_str().unwrap().to_owned(), stderr)
    };
    let (cancelled, said) = submit();
    assert!(said.contains("workers: 0"), "{said}");
    assert!(said.contains("line 2"), "{said}");
    assert_eq!(fleet.run(&["cancel", &cancelled]).0, Some(0));
    let (wanted, _) = submit();
    assert_eq!(fleet.run(&["queue", "pause", "demo@i2_s"]).0, Some(0));
    let _worker = fleet.worker(&[]);
    let (code, stdout, _) = fleet.run(&["watch", &wanted, "--timeout", "2"]);
    assert_eq!(code, Some(2), "no job of a paused queue runs: {stdout}");
    assert_eq!(fleet.run(&["queue", "resume", "demo@i2_s"]).0, Some(0));
    let (code, stdout, stderr) = fleet.run(&["watch", &wanted, &cancelled, "--timeout", "60"]);
    assert_eq!(code, Some(2), "{stderr}");
    let jobs: Vec<Value> = stdout.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    assert_eq!(jobs[0]["state"], "completed");
    assert_eq!(jobs[0]["choices"][0]["text"], "2024-03-03");
    assert_eq!(jobs[1]["state"], "cancelled");
}

#[test]
fn bench_queue_measures_every_phase_and_cleans_up() {
    let fleet = Fleet::start();
    let pids = [fleet.redis.pid().unwrap(), fleet.postgres.pid().unwrap()].map(|p| p.to_string());
    let words = "bench queue --json --jobs 300 --micro-batch 7 --repetitions 2 --starts 3";
    let mut words: Vec<&str> = words.split(' ').collect();
    words.extend(["--redis-pid", &pids[0], "--postgres-pid", &pids[1]]);
    let (code, stdout, stderr) = fleet.run(&words);
    assert_eq!(code, Some(0), "{stderr}");
    let figures: Value = serde_json::from_str(&stdout).unwrap();
    for (row, phase) in figures["rows"].as_array().unwrap().iter().zip(["submit", "consume"]) {
        assert_eq!(row["phase"], phase);
        assert!(row["jobs_per_s"].as_f64() > Some(0.0), "{row}");
        for process in ["cpu_s", "redis_cpu_s", "postgres_cpu_s"] {
            assert!(row[process].is_f64(), "{process}: {row}");
        }
    }
    assert_eq!((figures["rows"].as_array().unwrap().len(), &figures["starts"]), (2, &json!(3)));
    assert!(figures["start_ms_p99"].as_f64() >= figures["start_ms_p50"].as_f64(), "{figures}");
    assert_eq!(fleet.redis_keys(), 0);
    assert_eq!(fleet.rows(&["all_jobs", "results", "attempt_errors", "queues", "workers"]), 0);
    // A benchmark that fails cleans up as well.
    let (code, _, stderr) = fleet.run(&["bench", "queue", "--redis-pid", "4194305"]);
    assert_eq!(code, Some(1));
    assert!(stderr.contains("--redis-pid"), "{stderr}");
    assert_eq!(fleet.redis_keys(), 0);
}

#[test]
fn bench_e2e_compares_the_queue_with_the_engine() {
    let fleet = Fleet::start();
    let words = "bench e2e --json --batch 4 --jobs 9 --prompt 20 --generate 8 --repetitions 1";
    let (code, stdout, stderr) = fleet.run(&words.split(' ').collect::<Vec<_>>());
    assert_eq!(code, Some(0), "{stderr}");
    let figures: Value = serde_json::from_str(&stdout).unwrap();
    let number = |name: &str| figures[name].as_f64().unwrap();
    assert!(number("engine_tokens_per_s") > 0.0 && number("queue_tokens_per_s") > 0.0);
    let ratio = number("queue_tokens_per_s") / number("engine_tokens_per_s");
    assert!((number("ratio") - ratio).abs() < 1e-9, "{figures}");
    assert_eq!(fleet.redis_keys(), 0);
    assert_eq!(fleet.rows(&["all_jobs", "results", "attempt_errors", "queues", "workers"]), 0);
}

#[test]
fn bench_e2e_offers_more_than_a_service_can_answer_and_cleans_up() {
    let fleet = Fleet::start();
    let words =
        "bench e2e --overload --json --batch 4 --prompt 20 --generate 64 --seconds 4 --deadline 4";
    let (code, stdout, stderr) = fleet.run(&words.split(' ').collect::<Vec<_>>());
    assert_eq!(code, Some(0), "{stderr}");
    let figures: Value = serde_json::from_str(&stdout).unwrap();
    let number = |name: &str| figures[name].as_f64().unwrap();
    assert!(number("capacity_tokens_per_s") > 0.0 && number("goodput_tokens_per_s") > 0.0);
    assert!(number("redis_peak_bytes") > 0.0 && number("memory_peak_bytes") > 0.0);
    let counted = |name: &str| -> f64 {
        figures[name].as_object().unwrap().values().filter_map(Value::as_f64).sum()
    };
    let ended = number("accepted") + counted("refused") + counted("failed");
    assert!((ended - number("offered")).abs() < 0.5, "{figures}");
    assert_eq!(counted("failed"), 0.0, "{figures}");
    assert_eq!(fleet.redis_keys(), 0);
    assert_eq!(fleet.rows(&["all_jobs", "results", "attempt_errors", "workers"]), 0);
}

#[test]
fn unreachable_servers_are_named_without_passwords() {
    let fleet = Fleet::start();
    let (code, _, stderr) = fleet.run(&["worker", "--redis", "ftp://x"]);
    assert_eq!(code, Some(1));
    assert!(stderr.contains("--redis"), "{stderr}");
    let gone = "postgres://u:secret@127.0.0.1:1/x";
    let (code, _, stderr) = fleet.run(&["worker", "--database", gone]);
    assert_eq!(code, Some(1));
    assert!(stderr.contains("database") && !stderr.contains("secret"), "{stderr}");
    assert!(stderr.contains("127.0.0.1:1") && stderr.contains("refused"), "{stderr}");
}

#[test]
fn late_follower_gets_all_events_of_a_streaming_job() {
    let folder = tempfile::tempdir().unwrap();
    let input = folder.path().join("in");
    fs::write(&input, "{\"prompt\": \"Paid on the 3rd of March, 2024\", \"temperature\": 0}\n")
        .unwrap();
    let fleet = Fleet::start();
    let _worker = fleet.worker(&[]);
    let (_, stdout, _) = fleet.run(&["submit", input.to_str().unwrap(), "--stream"]);
    let job: Value = serde_json::from_str(stdout.lines().next().unwrap()).unwrap();
    let id = job["id"].as_str().unwrap();
    for _ in 0..2 {
        let (code, _, events) = fleet.run(&["watch", id, "--follow", "--timeout", "60"]);
        assert_eq!(code, Some(0), "{events}");
        assert!(events.contains("2024-03-03"), "{events}");
        assert!(events.contains("is completed"), "{events}");
    }
}
