//! Chat and text completions, whole and streamed.

use std::{io::Read as _, time::Duration};

use serde_json::{Value, json};

use crate::{
    fleet::{Fleet, eventually},
    rig::{Admin, question},
};

#[test]
fn answers_are_the_same_whole_and_streamed() {
    let (_fleet, _worker, admin) = Admin::with_worker();
    let caller = admin.first();
    let models = caller.get("/v1/models").json();
    let names: Vec<&str> = models["data"]
        .as_array()
        .unwrap()
        .iter()
        .filter_map(|model| model["id"].as_str())
        .collect();
    assert_eq!(names, ["demo", "demo@i2_s"]);
    assert_eq!(caller.get("/v1/models/demo").json()["object"], "model");
    assert_eq!(caller.get("/v1/models/x/y").error(), (404, "model_not_found".to_owned()));

    let whole = caller.post("/v1/chat/completions", &question(json!({})));
    assert_eq!(whole.status, 200, "{}", whole.text());
    let whole = whole.json();
    assert_eq!(whole["object"], "chat.completion");
    assert_eq!(whole["choices"][0]["message"]["content"], "2024-03-03");
    assert_eq!(whole["choices"][0]["finish_reason"], "stop");
    let mut usage = whole["usage"].clone();
    assert!(usage["completion_tokens"].as_u64() > Some(0), "{usage}");
    assert_eq!(usage["prompt_tokens_details"], json!({ "cached_tokens": 0 }));

    let options = json!({ "stream": true, "stream_options": { "include_usage": true } });
    let streamed = caller.post("/v1/chat/completions", &question(options));
    assert_eq!(streamed.header("content-type"), Some("text/event-stream"));
    let mut events = streamed.events();
    assert_eq!(events.pop().unwrap(), "[DONE]");
    let events: Vec<Value> =
        events.iter().map(|event| serde_json::from_str(event).unwrap()).collect();
    assert_eq!(events[0]["choices"][0]["delta"]["role"], "assistant");
    let text: String = events
        .iter()
        .filter_map(|event| event["choices"][0]["delta"]["content"].as_str())
        .collect();
    assert_eq!(text, "2024-03-03");
    let [.., finish, last] = events.as_slice() else { panic!("{events:?}") };
    assert_eq!(finish["choices"][0]["finish_reason"], "stop");
    // The first call left the keys and values of both blocks of the prompt; its last token is always computed.
    assert_eq!(usage["prompt_tokens"], 32);
    usage["prompt_tokens_details"]["cached_tokens"] = json!(31);
    assert_eq!((&last["usage"], &last["choices"]), (&usage, &json!([])));

    let prompts = ["Paid", "Due 3/3/24", "Paid"];
    let body =
        json!({ "model": "demo@i2_s", "prompt": prompts, "n": 2, "max_tokens": 4, "seed": 1 });
    let plain = caller.post("/v1/completions", &body).json();
    assert_eq!(plain["object"], "text_completion");
    let mut body = body;
    body["stream"] = json!(true);
    let streamed = caller.post("/v1/completions", &body);
    assert_eq!(plain["choices"].as_array().unwrap().len(), 6);
    for choice in 0..6 {
        let text: String = streamed
            .events()
            .iter()
            .filter_map(|event| serde_json::from_str::<Value>(event).ok())
            .filter(|event| event["choices"][0]["index"] == choice)
            .filter_map(|event| event["choices"][0]["text"].as_str().map(str::to_owned))
            .collect();
        assert_eq!(plain["choices"][choice]["text"], text);
    }
    let metrics = caller.get("/metrics").text();
    assert!(metrics.contains("route=\"/v1/chat/completions\",status=\"200\"} 2"), "{metrics}");
}

#[test]
fn invalid_requests_name_the_parameter() {
    let (_fleet, _worker, admin) = Admin::with_worker();
    let caller = admin.first();
    let refused = |change: Value, status: u16, code: &str, param: Value| {
        let answer = caller.post("/v1/chat/completions", &question(change.clone()));
        assert_eq!(answer.error(), (status, code.to_owned()), "{change}");
        assert_eq!(answer.json()["error"]["param"], param, "{change}");
    };
    refused(json!({ "model": "none" }), 404, "model_not_found", json!("model"));
    refused(json!({ "model": null }), 400, "missing_field", json!("model"));
    refused(json!({ "color": 1 }), 400, "unknown_parameter", json!("color"));
    refused(json!({ "temperature": 9 }), 400, "invalid_value", json!("temperature"));
    refused(json!({ "messages": [] }), 400, "invalid_value", json!("messages"));
    let streamed = json!({ "stream": true, "top_logprobs": 2 });
    refused(streamed, 400, "invalid_value", json!("top_logprobs"));
    // Found by the worker: a stream without events yet still fails with a status.
    let long = json!([{ "role": "user", "content": "x ".repeat(20_000) }]);
    for stream in [false, true] {
        let change = json!({ "messages": long, "stream": stream });
        refused(change, 400, "context_length_exceeded", json!("messages"));
    }
    let not_json = caller.request("POST", "/v1/completions", "application/json", b"{");
    assert_eq!(not_json.error(), (400, "invalid_json".to_owned()));
}

#[test]
fn full_queue_answers_with_retry_after() {
    let (fleet, admin) = Admin::without_worker();
    assert_eq!(fleet.run(&["queue", "limit", "demo@i2_s", "1"]).0, Some(0));
    let caller = admin.first();
    // No worker runs. The first request is accepted, because the queue is empty.
    let waiting = caller.open_post("/v1/chat/completions", &question(json!({})));
    eventually("the first job is queued", || {
        fleet.sql("SELECT count(*) FROM all_jobs").trim() == "1"
    });
    eventually("the queue is full", || {
        let second = caller.post("/v1/chat/completions", &question(json!({})));
        second.status == 429
            && second.header("retry-after").is_some_and(|seconds| seconds.parse::<u64>().is_ok())
    });
    drop(waiting);
}

#[test]
fn closed_connection_cancels_the_job() {
    let (fleet, admin) = Admin::without_worker();
    let caller = admin.first();
    for stream in [false, true] {
        let body = question(json!({ "stream": stream }));
        let waiting = caller.open_post("/v1/chat/completions", &body);
        let count = |state: &str| {
            fleet.sql(&format!("SELECT count(*) FROM all_jobs WHERE state = '{state}'"))
        };
        eventually("the job is queued", || count("queued").trim() == "1");
        drop(waiting);
        eventually("the job is cancelled", || count("queued").trim() == "0");
    }
    assert_eq!(fleet.sql("SELECT count(*) FROM all_jobs WHERE state = 'cancelled'").trim(), "2");
}

#[test]
fn stopping_admin_finishes_open_requests() {
    let fleet = Fleet::start();
    let mut admin = Admin::start(&fleet, &[]);
    drop(fleet.worker(&[]));
    let caller = admin.first();
    let mut waiting = caller.open_post("/v1/chat/completions", &question(json!({})));
    eventually("the job is queued", || fleet.sql("SELECT count(*) FROM all_jobs").trim() == "1");
    admin.signal(tritmill_servers::Signal::Terminate);
    let _worker = fleet.worker(&[]);
    let mut answer = String::new();
    waiting.read_to_string(&mut answer).unwrap();
    assert!(answer.contains("200 OK") && answer.contains("2024-03-03"), "{answer}");
    assert_eq!(admin.wait(Duration::from_secs(30)), Some(0));
}

#[test]
fn jobs_are_cancelled_though_their_callers_left_during_an_outage() {
    let (mut fleet, admin) = Admin::without_worker();
    let caller = admin.first();
    let body = json!({ "model": "demo", "prompt": "Paid", "max_tokens": 4 });
    let streams = [false, true].map(|stream| {
        let mut body = body.clone();
        body["stream"] = json!(stream);
        caller.open_post("/v1/completions", &body)
    });
    let count = |of: &str| format!("SELECT count(*) FROM all_jobs WHERE {of}");
    eventually("both jobs are queued", || fleet.sql(&count("state = 'queued'")).trim() == "2");
    fleet.postgres.kill();
    drop(streams);
    // Longer than a call waits for a connection.
    std::thread::sleep(Duration::from_secs(6));
    fleet.postgres.restart().unwrap();
    eventually("both jobs are cancelled", || {
        fleet.sql(&count("state = 'cancelled'")).trim() == "2"
    });
}
