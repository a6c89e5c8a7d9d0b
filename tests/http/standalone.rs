//! API and worker in one process, with and without servers.

use std::{path::Path, process::Command, time::Duration};

use serde_json::{Value, json};
use tritmill_servers::Signal;

use crate::{
    batches::{by_name, embedded, lines},
    fleet::Fleet,
    rig::{Admin, question},
};

const WORDS: [&str; 6] = ["standalone", "--json", "--threads", "1", "--api", "127.0.0.1:0"];

/// Returns the program without servers, with a SQLite store in `folder`.
pub fn alone(folder: &Path, words: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tritmill"));
    command.args(words).arg("--store").arg(folder.join("store"));
    command.env_remove("REDIS_URL").env_remove("DATABASE_URL");
    command
}

#[test]
fn sqlite_store_keeps_keys_files_and_batches_over_a_kill() {
    let folder = tempfile::tempdir().unwrap();
    // Slow enough that a long answer is streamed in several events.
    let slow = [&WORDS[..], &["--isa", "scalar"]].concat();
    let service = Admin::run(alone(folder.path(), &slow));
    let caller = service.first();
    let answer = caller.post("/v1/chat/completions", &question(json!({}))).json();
    assert_eq!(answer["choices"][0]["message"]["content"], "2024-03-03");
    let pieces = |body: &Value| -> Vec<String> {
        let events = caller.post("/v1/chat/completions", body).events();
        let events = events.iter().filter_map(|event| serde_json::from_str::<Value>(event).ok());
        let text =
            |event: Value| event["choices"][0]["delta"]["content"].as_str().map(str::to_owned);
        events.filter_map(text).collect()
    };
    assert_eq!(pieces(&question(json!({ "stream": true }))).concat(), "2024-03-03");
    let long = question(json!({ "stream": true, "ignore_eos": true, "max_tokens": 400 }));
    assert!(pieces(&long).len() > 1, "text is streamed while it is generated");
    // A key of another tenant, created while the service runs.
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
    let mut service = Admin::run(alone(folder.path(), &WORDS));
    assert!(service.first_key.is_none());
    let caller = service.with(&key);
    let batch = caller.finished(&id);
    assert_eq!(batch["request_counts"], json!({ "total": 300, "completed": 300, "failed": 0 }));
    assert_eq!(by_name(&caller.lines(&batch["output_file_id"])), embedded(&content));
    service.signal(Signal::Terminate);
    assert_eq!(service.wait(Duration::from_secs(60)), Some(0));
}

#[test]
fn standalone_with_servers_can_be_joined_by_an_admin() {
    let fleet = Fleet::empty();
    let service = Admin::run(fleet.command(&WORDS));
    let caller = service.first();
    let answer = caller.post("/v1/chat/completions", &question(json!({}))).json();
    assert_eq!(answer["choices"][0]["message"]["content"], "2024-03-03");
    let admin = Admin::start(&fleet, &[]);
    let streamed = admin.with(service.first_key.as_deref().unwrap());
    let streamed = streamed.post("/v1/chat/completions", &question(json!({ "stream": true })));
    assert_eq!(streamed.events().last().map(String::as_str), Some("[DONE]"));
}

#[test]
fn first_key_is_in_a_file_that_only_its_owner_can_read() {
    use std::os::unix::fs::PermissionsExt as _;
    let folder = tempfile::tempdir().unwrap();
    let service = Admin::run(alone(folder.path(), &WORDS));
    let mode = |name: &str| {
        let metadata = std::fs::metadata(folder.path().join(name)).unwrap();
        metadata.permissions().mode() & 0o777
    };
    let key = std::fs::read_to_string(folder.path().join("store-first-key")).unwrap();
    assert_eq!(Some(key.trim()), service.first_key.as_deref());
    assert_eq!(["store", "store-wal", "store-first-key"].map(mode), [0o600; 3]);
}
