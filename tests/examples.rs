//! Runs the programs in `producer/examples/` and checks their output.

#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "a failed step of a test is a failed test")]

#[allow(dead_code, reason = "shared with other tests")]
#[path = "support/fleet.rs"]
mod fleet;
#[allow(dead_code, reason = "shared with other tests")]
#[path = "http/rig.rs"]
mod rig;

use std::{
    fs,
    io::{BufRead as _, BufReader},
    path::Path,
    process::{Command, Stdio},
};

use fleet::{Fleet, KillOnDrop};
use rig::Admin;
use serde_json::Value;

const PROMPTS: [&str; 2] = ["Paid on the 3rd of March, 2024", "Rechnung 82 vom 5. Okt. 98"];
const ANSWERS: [&str; 2] = ["2024-03-03", "1998-10-05"];
/// Where `cargo xtask test` installs the openai package.
const PYTHON: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/target/openai/bin/python");
const SECRET: &str = "whsec_AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";

fn example(name: &str) -> String {
    format!("{}/producer/examples/{name}", env!("CARGO_MANIFEST_DIR"))
}

#[test]
fn the_rust_client_prints_an_answer_for_each_prompt() {
    let fleet = Fleet::start();
    let _worker = fleet.worker(&[]);
    let programs = Path::new(env!("CARGO_BIN_EXE_tritmill")).parent().unwrap();
    let output = Command::new(programs.join("examples/client"))
        .arg("demo")
        .args(PROMPTS)
        .env("REDIS_URL", fleet.redis.url())
        .env("DATABASE_URL", fleet.postgres.url())
        .output()
        .unwrap();
    let stdout = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    // The streamed text of the first, then one line each.
    assert!(stdout.starts_with(ANSWERS[0]), "{stdout}");
    for (prompt, answer) in PROMPTS.iter().zip(ANSWERS) {
        assert!(stdout.contains(&format!("{prompt} → {answer}\n")), "{stdout}");
    }
}

#[test]
fn the_python_batch_writes_answers_and_the_receiver_verifies_its_webhook() {
    if !Path::new(PYTHON).exists() {
        return tritmill_servers::skip("the openai package of PyPI");
    }
    let fleet = Fleet::start();
    let _worker = fleet.worker(&[]);
    let admin = Admin::start(&fleet, &["--webhook-allow-private"]);
    let mut receiver = KillOnDrop(
        Command::new(PYTHON)
            .args([&example("webhook_receiver.py"), "0"])
            .env("WEBHOOK_SECRET", SECRET)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap(),
    );
    let mut lines = BufReader::new(receiver.0.stdout.take().unwrap()).lines();
    let listening = lines.next().unwrap().unwrap();
    let port = listening.strip_prefix("listening on ").unwrap().to_owned();

    let folder = tempfile::tempdir().unwrap();
    let (prompts, answers) =
        (folder.path().join("prompts.txt"), folder.path().join("answers.jsonl"));
    fs::write(&prompts, PROMPTS.join("\n")).unwrap();
    let output = Command::new(PYTHON)
        .arg(example("batch.py"))
        .args([&prompts, &answers])
        .args(["--webhook", &format!("http://127.0.0.1:{port}/"), "--secret", SECRET])
        .env("OPENAI_BASE_URL", format!("http://{}/v1", admin.listen))
        .env("OPENAI_API_KEY", admin.first_key.as_deref().unwrap())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let found: Vec<String> = fs::read_to_string(&answers)
        .unwrap()
        .lines()
        .map(|line| {
            serde_json::from_str::<Value>(line).unwrap()["answer"].as_str().unwrap().to_owned()
        })
        .collect();
    assert_eq!(found, ANSWERS);
    let event = lines.next().unwrap().unwrap();
    assert!(event.starts_with("batch.completed batch_"), "{event}");
}
