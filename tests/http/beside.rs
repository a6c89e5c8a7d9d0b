//! Requests while a batch fills the queue.

use serde_json::{Value, json};

use crate::{
    batches::lines,
    fleet::eventually,
    rig::{Admin, Caller, question},
};

/// Creates a batch with low priority; returns its path.
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
fn batch_that_fills_its_queue_leaves_room_for_requests() {
    const CALLERS: usize = 100;
    let (fleet, worker, admin) = Admin::with_worker();
    // About 800 lines of the batch; a fifth of the limit is enough for all requests.
    assert_eq!(fleet.run(&["queue", "limit", "demo@i2_s", "20000"]).0, Some(0));
    let caller = admin.first();
    let path = low(&caller, &lines(10_000));
    let counts = || caller.get(&path).json()["request_counts"].clone();
    let queued = || -> u64 {
        let sql = "SELECT count(*) FROM all_jobs WHERE state = 'queued' AND priority = 'low'";
        fleet.sql(sql).trim().parse().unwrap()
    };
    eventually("the batch fills its part of the queue", || {
        counts()["completed"].as_u64() > Some(0) && queued() > 500
    });
    let before = counts()["completed"].as_u64().unwrap();
    let body = question(json!({}));
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
    eventually("the batch continues", || counts()["completed"].as_u64() > Some(before));
    assert_eq!(caller.post(&format!("{path}/cancel"), &json!({})).status, 200);
    drop(worker);
}
