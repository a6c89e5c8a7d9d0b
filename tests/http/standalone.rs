//! API and worker in one process: without servers, and beside them.

use std::{path::Path, process::Command, time::Duration};

use serde_json::{Value, json};
use tritmill_servers::Signal;

use crate::{
    batches::{by_name, embedded, lines},
    fleet::Fleet,
    rig::Admin,
};

const WORDS: [&str; 6] = ["standalone", "--json", "--threads", "1", "--api", "127.0.0.1:0"];

/// The program without servers, with everything in one file.
pub fn alone(folder: &Path, words: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tritmill"));
    command.args(words).arg("--store").arg(folder.join("store"));
    command.env_remove("REDIS_URL").env_remove("DATABASE_URL");
    command
}

fn question(stream: bool) -> Value {
    json!({
        "model": "demo",
        "messages": [{ "role": "user", "content": "Paid on the 3rd of March, 2024" }],
        "temperature": 0,
        "stream": stream,
    })
}

#[test]
fn without_servers_a_file_keeps_keys_files_and_batches() {
    let folder = tempfile::tempdir().unwrap();
    // Slow enough that a long answer comes in pieces.
    let slow = [&WORDS[..], &["--isa", "scalar"]].concat();
    let service = Admin::of(alone(folder.path(), &slow));
    let caller = service.first();
    let answer = caller.post("/v1/chat/completions", &question(false)).json();
    assert_eq!(answer["choices"][0]["message"]["content"], "2024-03-03");
    let pieces = |body: &Value| -> Vec<String> {
        let events = caller.post("/v1/chat/completions", body).events();
        let events = events.iter().filter_map(|event| serde_json::from_str::<Value>(event).ok());
        let text =
            |event: Value| event["choices"][0]["delta"]["content"].as_str().map(str::to_owned);
        events.filter_map(text).collect()
    };
    assert_eq!(pieces(&question(true)).concat(), "2024-03-03");
    let mut long = question(true);
    (long["ignore_eos"], long["max_tokens"]) = (json!(true), json!(400));
    assert!(pieces(&long).len() > 1, "text comes while it is generated");
    // A key of another tenant's, made beside the service that runs.
    let other = alone(folder.path(), &["keys", "create", "--tenant", "other"]).output().unwrap();
    let other = service.with(String::from_utf8(other.stdout).unwrap().trim());
    let refused = alone(folder.path(), &WORDS).output().unwrap();
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && said.contains("another process"), "{said}");

    let content = lines(300);
    let id = caller.batch(content.as_bytes(), "24h");
    assert_eq!(other.get(&format!("/v1/batches/{id}")).status, 404);
    let path = format!("/v1/batches/{id}");
    crate::fleet::eventually("something is answered", || {
        caller.get(&path).json()["request_counts"]["completed"].as_u64() > Some(5)
    });
    service.signal(Signal::Kill);
    let key = service.first_key.clone().unwrap();
    drop(service);
    let mut service = Admin::of(alone(folder.path(), &WORDS));
    assert!(service.first_key.is_none());
    let caller = service.with(&key);
    let batch = caller.over(&id);
    assert_eq!(batch["request_counts"], json!({ "total": 300, "completed": 300, "failed": 0 }));
    assert_eq!(by_name(&caller.lines(&batch["output_file_id"])), embedded(&content));
    service.signal(Signal::Terminate);
    assert_eq!(service.wait(Duration::from_secs(60)), Some(0));
}

#[test]
fn beside_servers_others_may_join() {
    let fleet = Fleet::empty();
    let service = Admin::of(fleet.command(&WORDS));
    let caller = service.first();
    let answer = caller.post("/v1/chat/completions", &question(false)).json();
    assert_eq!(answer["choices"][0]["message"]["content"], "2024-03-03");
    let admin = Admin::start(&fleet, &[]);
    let streamed = admin.with(service.first_key.as_deref().unwrap());
    let streamed = streamed.post("/v1/chat/completions", &question(true));
    assert_eq!(streamed.events().last().map(String::as_str), Some("[DONE]"));
}
