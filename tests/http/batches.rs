//! Batches: from an input file to output files, with admins killed in between.

use std::{collections::HashMap, fs, time::Duration};

use serde_json::{Value, json};
use tritmill_servers::Signal;

use crate::{
    fleet::{Fleet, eventually},
    rig::{Admin, Caller},
    standalone::alone,
};

/// Returns a batch line; every seventh has temperature 1.
fn line(index: usize) -> String {
    let body = json!({
        "model": "demo",
        "messages": [{ "role": "user", "content": format!("Paid on March {}, 2024", 1 + index % 28) }],
        "temperature": if index.is_multiple_of(7) { 1.0 } else { 0.0 },
        "max_tokens": 14,
    });
    let line = json!({
        "custom_id": format!("q{index}"),
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": body,
    });
    format!("{line}\n")
}

pub fn lines(count: usize) -> String {
    (0..count).map(line).collect()
}

/// Returns a batch line with a change.
fn changed(index: usize, change: impl Fn(&mut Value)) -> String {
    let mut value = serde_json::from_str(&line(index)).unwrap();
    change(&mut value);
    format!("{value}\n")
}

/// Returns output lines by custom_id, without `created`.
pub fn by_name(lines: &[Value]) -> HashMap<String, Value> {
    let entry = |line: &Value| {
        let mut line = line.clone();
        if let Some(body) = line["response"]["body"].as_object_mut() {
            body.remove("created");
        }
        (line["custom_id"].as_str().unwrap_or_default().to_owned(), line)
    };
    let named: HashMap<String, Value> = lines.iter().map(entry).collect();
    assert_eq!(named.len(), lines.len(), "no line is answered twice");
    named
}

/// Returns the answers of the same lines by `batch run` without servers.
pub fn embedded(content: &str) -> HashMap<String, Value> {
    let folder = tempfile::tempdir().unwrap();
    let [input, output] = ["in", "out"].map(|name| folder.path().join(name));
    fs::write(&input, content).unwrap();
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_tritmill"));
    command.args(["batch", "run"]).arg(&input).arg("-o").arg(&output);
    command.env_remove("REDIS_URL").env_remove("DATABASE_URL");
    assert!(command.output().unwrap().status.success());
    let text = fs::read_to_string(&output).unwrap();
    by_name(&text.lines().map(|line| serde_json::from_str(line).unwrap()).collect::<Vec<_>>())
}

#[test]
fn line_that_the_database_refuses_is_an_error_and_the_others_are_answered() {
    let (fleet, _worker, admin) = Admin::with_worker();
    let short = "ALTER TABLE open_jobs ADD CONSTRAINT short CHECK (octet_length(job) < 2000)";
    fleet.sql(short);
    let caller = admin.first();
    let noise: String = (0..3000).map(|_| fastrand::alphanumeric()).collect();
    let long = |index| {
        changed(index, |line| line["body"]["messages"][0]["content"] = json!(noise.as_str()))
    };
    let (good, more) = (lines(30), lines(45)[lines(30).len()..].to_owned());
    let content = format!("{}{good}{}{more}{}", long(90), long(91), long(92));
    let batch = caller.finished(&caller.batch(content.as_bytes(), "24h"));
    assert_eq!(batch["status"], "completed", "{batch}");
    assert_eq!(batch["request_counts"], json!({ "total": 48, "completed": 45, "failed": 3 }));
    let answers = caller.lines(&batch["output_file_id"]);
    assert_eq!(by_name(&answers), embedded(&format!("{good}{more}")));
    let errors = caller.lines(&batch["error_file_id"]);
    let names: Vec<&Value> = errors.iter().map(|line| &line["custom_id"]).collect();
    assert_eq!(names, ["q90", "q91", "q92"]);
    for error in errors.iter().map(|line| &line["response"]["body"]["error"]) {
        assert_eq!(error["code"], "not_storable");
        assert!(error["message"].as_str().unwrap().contains("\"short\""), "{error}");
    }
}

#[test]
fn batch_has_the_answers_of_an_embedded_run_and_an_error_file() {
    let (_fleet, _worker, admin) = Admin::with_worker();
    let caller = admin.first();
    let good = lines(60);
    let bad = changed(90, |line| line["body"]["temperature"] = json!("warm"));
    let long = changed(91, |line| {
        line["body"]["messages"][0]["content"] = json!("x ".repeat(20_000));
    });
    let id = caller.batch(format!("\n{bad}{good}\n{long}").as_bytes(), "24h");
    let batch = caller.finished(&id);
    assert_eq!(batch["status"], "completed", "{batch}");
    assert_eq!(batch["request_counts"], json!({ "total": 62, "completed": 60, "failed": 2 }));
    assert_eq!((&batch["errors"], &batch["model"]), (&Value::Null, &json!("demo@i2_s")));
    assert_eq!(batch["metadata"], json!({ "for": "a test" }));
    for moment in ["created_at", "in_progress_at", "finalizing_at", "completed_at", "expires_at"] {
        assert!(batch[moment].is_u64(), "{moment}: {batch}");
    }
    let answers = caller.lines(&batch["output_file_id"]);
    assert_eq!(answers[0]["custom_id"], "q0", "output has the input order");
    assert_eq!(by_name(&answers), embedded(&good));
    let sum = |field: &str| -> u64 {
        answers.iter().map(|line| line["response"]["body"]["usage"][field].as_u64().unwrap()).sum()
    };
    let usage = &batch["usage"];
    assert_eq!(usage["input_tokens"], sum("prompt_tokens"));
    assert_eq!(usage["output_tokens"], sum("completion_tokens"));
    assert_eq!(usage["total_tokens"], sum("total_tokens"));
    let cached = usage["input_tokens_details"]["cached_tokens"].as_u64().unwrap();
    assert!(cached < sum("prompt_tokens"), "{usage}");
    let errors = by_name(&caller.lines(&batch["error_file_id"]));
    for (name, param) in [("q90", "temperature"), ("q91", "messages")] {
        let line = &errors[name];
        assert_eq!((&line["error"], &line["response"]["status_code"]), (&Value::Null, &json!(400)));
        assert_eq!(line["response"]["body"]["error"]["param"], param, "{line}");
    }
    let output = caller.get(&format!("/v1/files/{}", batch["output_file_id"].as_str().unwrap()));
    assert_eq!(output.json()["purpose"], "batch_output");
    let listed = caller.get("/v1/batches?limit=1").json();
    assert_eq!((&listed["data"][0]["id"], &listed["has_more"]), (&json!(id), &json!(false)));
}

/// Error codes of a batch with their line numbers.
fn refused(caller: &Caller, content: &str) -> Vec<(Option<u64>, String)> {
    let id = caller.batch(content.as_bytes(), "24h");
    let batch = caller.finished(&id);
    assert_eq!(batch["status"], "failed", "{batch}");
    assert!(batch["failed_at"].is_u64() && batch["output_file_id"].is_null());
    let errors = batch["errors"]["data"].as_array().unwrap();
    let code = |error: &Value| (error["line"].as_u64(), error["code"].as_str().unwrap().to_owned());
    errors.iter().map(code).collect()
}

#[test]
fn invalid_batch_file_is_refused_with_line_and_code() {
    let fleet = Fleet::start();
    drop(fleet.worker(&[]));
    let admin = Admin::start(&fleet, &["--max-batch-lines", "4"]);
    let caller = admin.first();
    let check = |content: &str, line: Option<u64>, code: &str| {
        assert_eq!(refused(&caller, content), [(line, code.to_owned())]);
    };
    check("", None, "empty_file");
    check(" \n\n", None, "empty_file");
    check(&format!("{}{{\n", line(0)), Some(2), "invalid_json_line");
    check(&format!("{}{}", line(0), line(0)), Some(2), "duplicate_custom_id");
    let unknown = changed(0, |line| line["body"]["model"] = json!("none"));
    check(&unknown, Some(1), "model_not_found");
    check(&lines(5), Some(5), "too_many_tasks");
    assert_eq!(fleet.rows(&["all_jobs"]), 0, "no line was submitted");
    let no_file = json!({
        "input_file_id": "file-00000000000000000000000000000000",
        "endpoint": "/v1/completions",
        "completion_window": "24h",
    });
    assert_eq!(caller.post("/v1/batches", &no_file).error(), (404, "not_found".to_owned()));
}

#[test]
fn batches_expire_and_are_cancelled() {
    let (_fleet, admin) = Admin::without_worker();
    let caller = admin.first();
    let id = caller.batch(lines(3).as_bytes(), "2s");
    let batch = caller.finished(&id);
    assert_eq!(batch["status"], "expired", "{batch}");
    assert_eq!(batch["request_counts"], json!({ "total": 3, "completed": 0, "failed": 3 }));
    assert!(batch["expired_at"].is_u64() && batch["output_file_id"].is_null());
    for line in caller.lines(&batch["error_file_id"]) {
        assert_eq!(
            (&line["response"], &line["error"]["code"]),
            (&Value::Null, &json!("batch_expired"))
        );
    }
    let id = caller.batch(lines(3).as_bytes(), "24h");
    let path = format!("/v1/batches/{id}");
    eventually("the batch is in progress", || caller.get(&path).json()["status"] == "in_progress");
    let input = caller.get(&path).json()["input_file_id"].as_str().unwrap().to_owned();
    let in_use = caller.delete(&format!("/v1/files/{input}"));
    assert_eq!(in_use.error(), (400, "file_in_use".to_owned()));
    assert_eq!(caller.post(&format!("{path}/cancel"), &json!({})).json()["status"], "cancelling");
    let batch = caller.finished(&id);
    assert_eq!(batch["status"], "cancelled", "{batch}");
    assert!(batch["cancelling_at"].is_u64() && batch["cancelled_at"].is_u64());
    for line in caller.lines(&batch["error_file_id"]) {
        assert_eq!(line["error"]["code"], "batch_cancelled");
    }
    let late =
        caller.post(&format!("/v1/batches/{}/cancel", batch["id"].as_str().unwrap()), &json!({}));
    assert_eq!(late.status, 200, "a second cancel changes nothing");
    let gone = caller.delete(&format!("/v1/files/{input}")).json();
    assert_eq!(gone["deleted"], true);
    assert_eq!(caller.get(&format!("/v1/files/{input}")).status, 404);
}

#[test]
fn batches_of_a_killed_admin_continue_at_another() {
    let fleet = Fleet::start();
    let first = Admin::start(&fleet, &[]);
    let second = Admin::start(&fleet, &[]);
    assert!(second.first_key.is_none(), "only one first key is created");
    let content = lines(400);
    let worker = fleet.worker(&[]);
    let caller = first.first();
    let ids = [caller.batch(content.as_bytes(), "24h"), caller.batch(content.as_bytes(), "24h")];
    let started = || fleet.rows(&["results"]) > 20;
    eventually("something is answered", started);
    first.signal(Signal::Kill);
    let caller = second.with(first.first_key.as_deref().unwrap());
    let expected = embedded(&content);
    for id in ids {
        let batch = caller.finished(&id);
        assert_eq!(batch["status"], "completed", "{batch}");
        assert_eq!(batch["request_counts"]["completed"], 400);
        assert_eq!(by_name(&caller.lines(&batch["output_file_id"])), expected);
    }
    assert_eq!(fleet.rows(&["all_jobs"]), 800, "no line became two jobs");
    assert_eq!(fleet.sql("SELECT count(*) FROM files WHERE purpose = 'batch_output' AND size_bytes IS NOT NULL").trim(), "2");
    drop(worker);
}

#[test]
fn stopping_admin_releases_its_batches_at_once() {
    let fleet = Fleet::start();
    drop(fleet.worker(&[]));
    let mut first = Admin::start(&fleet, &[]);
    let caller = first.first();
    let id = caller.batch(lines(5).as_bytes(), "24h");
    let path = format!("/v1/batches/{id}");
    eventually("the batch is in progress", || caller.get(&path).json()["status"] == "in_progress");
    first.signal(Signal::Terminate);
    assert_eq!(first.wait(Duration::from_secs(20)), Some(0));
    assert_eq!(fleet.sql("SELECT count(*) FROM batches WHERE lease_until IS NOT NULL").trim(), "0");
    let second = Admin::start(&fleet, &[]);
    let _worker = fleet.worker(&[]);
    let caller = second.with(first.first_key.as_deref().unwrap());
    assert_eq!(caller.finished(&id)["status"], "completed");
}

#[test]
fn large_file_is_not_held_in_memory() {
    let (_fleet, admin) = Admin::without_worker();
    let caller = admin.first();
    let padding = "x".repeat(2000);
    let content: String = (0..40_000)
        .map(|index| changed(index, |line| line["body"]["user"] = json!(padding)))
        .collect();
    assert!(content.len() > 80_000_000);
    let before = admin.resident_kb();
    let id = caller.batch(content.as_bytes(), "24h");
    eventually("the batch is validated", || {
        caller.get(&format!("/v1/batches/{id}")).json()["status"] == "in_progress"
    });
    let grown = admin.resident_kb().saturating_sub(before);
    assert!(grown < 60_000, "{grown} kB for a file of 80 MB");
    caller.post(&format!("/v1/batches/{id}/cancel"), &json!({}));
}

/// Returns the peak of the resident memory in kB while a service received and validated a batch of
/// a million lines and began to submit them.
fn peak_of_a_million(admin: &Admin) -> u64 {
    const LINES: usize = 1_000_000;
    const BYTES: usize = 300_000_000;
    // The first line is the shortest.
    let padding = "x".repeat(BYTES / LINES - line(0).len() - r#","user":"""#.len());
    let caller = admin.first();
    let content: String = (0..LINES)
        .map(|index| {
            let user = format!(",\"user\":\"{padding}\"}}}}\n");
            line(index).replace("}}\n", &user)
        })
        .collect();
    assert!(content.len() >= BYTES, "{} bytes", content.len());
    let started = std::time::Instant::now();
    let id = caller.batch(content.as_bytes(), "24h");
    eprintln!("{} bytes uploaded after {:?}", content.len(), started.elapsed());
    drop(content);
    let path = format!("/v1/batches/{id}");
    while caller.get(&path).json()["status"] == "validating" {
        assert!(started.elapsed() < Duration::from_secs(900));
        std::thread::sleep(Duration::from_millis(500));
    }
    eprintln!("validated after {:?}", started.elapsed());
    let batch = caller.get(&path).json();
    assert_eq!(
        (&batch["status"], &batch["request_counts"]["total"]),
        (&json!("in_progress"), &json!(LINES))
    );
    std::thread::sleep(Duration::from_secs(20));
    let peak = admin.peak_kb();
    eprintln!("{} kB peak resident memory", peak);
    caller.post(&format!("{path}/cancel"), &json!({}));
    peak
}

#[test]
#[ignore = "takes minutes and a gigabyte of disk; run it by hand"]
fn batch_of_a_million_lines_needs_bounded_memory() {
    const LIMITS: [&str; 4] = ["--max-batch-lines", "1000000", "--max-file-mib", "400"];
    let fleet = Fleet::start();
    drop(fleet.worker(&[]));
    let peak = peak_of_a_million(&Admin::start(&fleet, &LIMITS));
    assert!(peak < 300_000, "{peak} kB with Postgres");
    let folder = tempfile::tempdir().unwrap();
    let words = ["standalone", "--json", "--threads", "1", "--api", "127.0.0.1:0"];
    let service = Admin::run(alone(folder.path(), &[&words[..], &LIMITS].concat()));
    let model = service.peak_kb();
    let peak = peak_of_a_million(&service);
    assert!(peak < 300_000 + model, "{peak} kB with SQLite, {model} kB of them with the model");
}
