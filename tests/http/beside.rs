//! Callers who wait, beside a batch that is larger than its queue.

use serde_json::{Value, json};

use crate::{
    batches::lines,
    fleet::{Fleet, eventually},
    rig::{Admin, Caller},
};

/// Asks for a batch at priority low; its path.
fn low(caller: &Caller, content: &str) -> String {
    let file = caller.upload(content.as_bytes()).json()["id"].clone();
    let asked = json!({
        "input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": "24h",
        "priority": "low",
    });
    let batch = caller.post("/v1/batches", &asked).json();
    format!("/v1/batches/{}", batch["id"].as_str().unwrap())
}

#[test]
fn a_batch_that_fills_its_queue_leaves_room_for_those_who_wait() {
    const CALLERS: usize = 100;
    let fleet = Fleet::start();
    let worker = fleet.worker(&[]);
    let admin = Admin::start(&fleet, &[]);
    // Some eight hundred lines of the batch; a fifth of it is enough for all callers.
    assert_eq!(fleet.run(&["queue", "limit", "demo@i2_s", "20000"]).0, Some(0));
    let caller = admin.first();
    let path = low(&caller, &lines(10_000));
    let counts = || caller.get(&path).json()["request_counts"].clone();
    let waiting = || -> u64 {
        let queued = "SELECT count(*) FROM jobs WHERE state = 'queued' AND priority = 'low'";
        fleet.sql(queued).trim().parse().unwrap()
    };
    eventually("the batch fills its part of the queue", || {
        counts()["completed"].as_u64() > Some(0) && waiting() > 500
    });
    let before = counts()["completed"].as_u64().unwrap();
    let body = json!({
        "model": "demo",
        "messages": [{ "role": "user", "content": "Paid on the 3rd of March, 2024" }],
        "temperature": 0,
        "max_tokens": 16,
    });
    std::thread::scope(|scope| {
        let ask = || {
            let answer = caller.post("/v1/chat/completions", &body);
            assert_eq!(answer.status, 200, "{}", answer.text());
            let text: Value = answer.json()["choices"][0]["message"]["content"].clone();
            assert_eq!(text, "2024-03-03");
        };
        for _ in 0..CALLERS {
            scope.spawn(ask);
        }
    });
    let now = caller.get(&path).json();
    assert_eq!(
        (&now["status"], &now["request_counts"]["failed"]),
        (&json!("in_progress"), &json!(0))
    );
    eventually("the batch goes on", || counts()["completed"].as_u64() > Some(before));
    assert_eq!(caller.post(&format!("{path}/cancel"), &json!({})).status, 200);
    drop(worker);
}
