//! A worker with the settings for spot nodes, told to stop in the middle of a long answer.

#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "a failed step of a test is a failed test")]

#[allow(dead_code, reason = "shared with other tests")]
#[path = "support/fleet.rs"]
mod fleet;
#[expect(dead_code, reason = "each test program uses its part of it")]
mod program;

use std::{
    fs,
    process::Stdio,
    time::{Duration, Instant},
};

use fleet::{Fleet, KillOnDrop, WorkerProcess, eventually, series};
use serde_json::{Value, json};
use tritmill_servers::Signal;

/// Tokens of the answer: several times what the first worker generates before it ends.
const TOKENS: u64 = 1200;
/// Longest time from SIGTERM to the end of the worker.
const END_WITHIN: Duration = Duration::from_secs(10);
/// Longest time from then to the end of the batch, on a slow machine.
const ANSWER_WITHIN: Duration = Duration::from_secs(120);

/// Returns the value that the spot manifest gives an option of the worker.
fn in_manifest(option: &str) -> String {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/docker/kubernetes/worker-spot.yaml");
    let manifest: Value = serde_saphyr::from_str(&fs::read_to_string(path).unwrap()).unwrap();
    let arguments = &manifest["spec"]["template"]["spec"]["containers"][0]["args"];
    let mut arguments = arguments.as_array().unwrap().iter().map(|word| word.as_str().unwrap());
    arguments.find(|word| *word == option).unwrap();
    arguments.next().unwrap().to_owned()
}

fn worker(fleet: &Fleet, model: &str, isa: Option<&str>) -> WorkerProcess {
    let arguments = ["worker", "--json", "--threads", "1", "--model", model];
    let mut command = fleet.command(&arguments);
    command.args(["--drain", &in_manifest("--drain")]).stderr(Stdio::piped());
    // Every instruction set gives the same tokens.
    isa.map(|isa| command.env("TRITMILL_ISA", isa));
    WorkerProcess::start(command)
}

#[test]
fn spot_worker_ends_in_seconds_and_another_one_continues_its_answer() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (model, input, output) = (path("small"), path("in"), path("out"));
    let synth = ["model", "synth", "--shape", "bitnet-0.7b", "--layers", "1", "--out", &model];
    program::json(&[&synth[..], &["--json"]].concat());
    let line = json!({
        "custom_id": "long", "method": "POST", "url": "/v1/completions",
        "body": { "prompt": "once", "max_tokens": TOKENS, "ignore_eos": true, "temperature": 0 },
    });
    fs::write(&input, format!("{line}\n")).unwrap();
    let fleet = Fleet::start();
    let answer = |output: &str| -> Value {
        let line: Value = serde_json::from_str(&fs::read_to_string(output).unwrap()).unwrap();
        line["response"]["body"]["choices"].clone()
    };
    let alone = path("alone");
    let mut embedded = fleet.command(&["batch", "run", &input, "-o", &alone, "--model", &model]);
    assert!(
        embedded.env_remove("REDIS_URL").env_remove("DATABASE_URL").status().unwrap().success()
    );

    let mut slow = worker(&fleet, &model, Some("scalar"));
    let submitted = ["batch", "run", &input, "-o", &output, "--model", "small"];
    let mut batch = KillOnDrop(fleet.command(&submitted).spawn().unwrap());
    let row =
        |columns: &str| fleet.sql(&format!("SELECT {columns} FROM open_jobs")).trim().to_owned();
    eventually("some tokens are generated", || {
        generated(&slow) > Some(64.0) && row("state") == "running"
    });
    let told_at = Instant::now();
    slow.signal(Signal::Terminate);
    assert_eq!(slow.wait(END_WITHIN), Some(0), "it has not ended within {END_WITHIN:?}");
    println!("the worker ended {:.1} s after SIGTERM", told_at.elapsed().as_secs_f64());
    assert_eq!(row("state, attempts, checkpoint IS NOT NULL"), "queued|0|t");

    let fast = worker(&fleet, &model, None);
    assert_eq!(batch.wait(ANSWER_WITHIN), Some(0), "it has not ended within {ANSWER_WITHIN:?}");
    assert_eq!(answer(&output), answer(&alone));
    let continued = generated(&fast).unwrap() as u64;
    assert!((1..TOKENS - 32).contains(&continued), "{continued} of {TOKENS} tokens");
    println!("the other worker generated {continued} of {TOKENS} tokens");
}

/// Returns the number of tokens that a worker has generated, once it has begun.
fn generated(worker: &WorkerProcess) -> Option<f64> {
    series(&worker.get("/metrics").1, "tritmill_generation_tokens_total{device=\"cpu\"}")
}
