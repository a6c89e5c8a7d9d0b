//! Batches that are paused, resumed and retried, with Postgres and Redis, and with SQLite in one process.

use std::{collections::HashMap, thread::sleep, time::Duration};

use serde_json::{Value, json};

use crate::{
    batches::{by_name, embedded, lines},
    fleet::{Fleet, eventually},
    rig::{Admin, Answer, Caller, OURS, key},
    standalone::alone,
};

/// Slow enough that a batch runs for some seconds.
const SLOW: [&str; 2] = ["--isa", "scalar"];
const ALONE: [&str; 6] = ["standalone", "--json", "--threads", "1", "--api", "127.0.0.1:0"];

/// Runs a test with both stores.
fn with_both_stores(test: impl Fn(&Caller)) {
    let fleet = Fleet::start();
    let _worker = fleet.worker(&SLOW);
    test(&Admin::start(&fleet, &[]).first());
    let folder = tempfile::tempdir().unwrap();
    let words = [&ALONE[..], &SLOW].concat();
    test(&Admin::run(alone(folder.path(), &words)).first());
}

fn get(caller: &Caller, id: &str) -> Value {
    caller.get(&format!("/v1/batches/{id}")).json()
}

fn change(caller: &Caller, id: &str, what: &str, body: Value) -> Answer {
    caller.post(&format!("/v1/batches/{id}/{what}"), &body)
}

/// Changes a batch as its state allows; returns the batch.
fn changed(caller: &Caller, id: &str, what: &str, body: Value) -> Value {
    let answer = change(caller, id, what, body);
    assert_eq!(answer.status, 200, "{what}: {}", answer.text());
    answer.json()
}

fn completed(batch: &Value) -> u64 {
    batch["request_counts"]["completed"].as_u64().unwrap()
}

/// Waits until the batch has some answers.
fn some_answers(caller: &Caller, id: &str) {
    eventually("something is answered", || completed(&get(caller, id)) > 3);
}

/// Checks that a batch has these answers, each once, and no errors.
fn check_answers(caller: &Caller, batch: &Value, expected: &HashMap<String, Value>) {
    assert_eq!(batch["status"], "completed", "{batch}");
    let total = expected.len();
    let counts = json!({ "total": total, "completed": total, "failed": 0 });
    assert_eq!(batch["request_counts"], counts);
    assert_eq!(&by_name(&caller.lines(&batch["output_file_id"])), expected);
    assert_eq!(batch["error_file_id"], Value::Null);
}

#[test]
fn paused_batch_stands_still_and_goes_on_exactly() {
    const LINES: usize = 250;
    let content = lines(LINES);
    let expected = embedded(&content);
    with_both_stores(|caller| {
        for now in [false, true] {
            let id = caller.batch(content.as_bytes(), "24h");
            some_answers(caller, &id);
            let before = get(caller, &id);
            let paused = changed(caller, &id, "pause", json!({ "now": now }));
            assert_eq!((&paused["status"], paused["paused_at"].is_u64()), (&json!("paused"), true));
            // Running lines go to their end, and are counted some seconds later.
            sleep(Duration::from_secs(8));
            let still = completed(&get(caller, &id));
            sleep(Duration::from_secs(4));
            assert_eq!(completed(&get(caller, &id)), still);
            assert!(still < LINES as u64, "the batch ended before it was paused");
            let again = changed(caller, &id, "pause", json!({}));
            assert_eq!(again["status"], "paused", "a second pause changes nothing");
            let resumed = changed(caller, &id, "resume", json!({}));
            assert!(resumed["paused_at"].is_null());
            let moved = |batch: &Value| batch["expires_at"].as_i64().unwrap();
            let by = moved(&resumed) - moved(&before);
            assert!((11..=60).contains(&by), "the deadline moved by {by} s");
            check_answers(caller, &caller.finished(&id), &expected);
            for what in ["pause", "resume"] {
                let refused = change(caller, &id, what, json!({}));
                assert_eq!(refused.error(), (409, "invalid_state".to_owned()));
                assert!(refused.text().contains("'completed'"), "{}", refused.text());
            }
        }
        // Before its lines are checked, too.
        let content = lines(50);
        let id = caller.batch(content.as_bytes(), "24h");
        changed(caller, &id, "pause", json!({ "now": true }));
        changed(caller, &id, "resume", json!({}));
        assert_eq!(change(caller, &id, "resume", json!({})).status, 409, "it runs");
        check_answers(caller, &caller.finished(&id), &embedded(&content));
    });
}

#[test]
fn cancelled_batch_is_resumed_with_its_cancelled_lines() {
    let content = lines(200);
    let expected = embedded(&content);
    with_both_stores(|caller| {
        let id = caller.batch(content.as_bytes(), "24h");
        some_answers(caller, &id);
        changed(caller, &id, "cancel", json!({}));
        let cancelled = caller.finished(&id);
        assert_eq!(cancelled["status"], "cancelled");
        let answered = completed(&cancelled);
        assert!((1..200).contains(&answered), "{answered}");
        let resumed = changed(caller, &id, "resume", json!({}));
        assert!(resumed["cancelled_at"].is_null() && resumed["cancelling_at"].is_null());
        assert_eq!(resumed["output_file_id"], cancelled["output_file_id"], "kept meanwhile");
        let batch = caller.finished(&id);
        check_answers(caller, &batch, &expected);
        for file in ["output_file_id", "error_file_id"] {
            let old = cancelled[file].as_str().unwrap();
            let gone = caller.get(&format!("/v1/files/{old}"));
            assert_eq!(gone.status, 404, "{file} is replaced");
        }
    });
}

#[test]
fn named_lines_run_again_once_and_others_stay() {
    let content = lines(6);
    let bad = lines(8)[lines(7).len()..].replace("\"temperature\":1.0", "\"temperature\":\"warm\"");
    let expected = embedded(&content);
    with_both_stores(|caller| {
        let id = caller.batch(format!("{content}{bad}").as_bytes(), "24h");
        let first = caller.finished(&id);
        assert_eq!(first["request_counts"], json!({ "total": 7, "completed": 6, "failed": 1 }));
        let retry = |body: Value| change(caller, &id, "retry", body);
        let check = |body: Value, status: u16, code: &str, param: &str| {
            let refused = retry(body);
            assert_eq!(refused.error(), (status, code.to_owned()), "{}", refused.text());
            assert_eq!(refused.json()["error"]["param"], param, "{}", refused.text());
        };
        let ids = |names: &[&str]| json!({ "custom_ids": names });
        check(ids(&["q1", "none"]), 409, "line_answered", "custom_ids[0]");
        check(
            json!({ "custom_ids": ["q1", "none"], "force": true }),
            400,
            "unknown_custom_id",
            "custom_ids[1]",
        );
        check(ids(&["q7"]), 400, "refused_line", "custom_ids[0]");
        check(json!({ "custom_ids": [] }), 400, "invalid_value", "custom_ids");
        check(json!({ "line": 3 }), 400, "unknown_parameter", "line");
        assert_eq!(get(caller, &id), first, "nothing was half done");
        // With a key the lines run again once.
        let body = json!({ "custom_ids": ["q2", "q4"], "force": true }).to_string();
        let headers = format!(
            "Idempotency-Key: again\r\nContent-Type: application/json\r\nContent-Length: {}\r\n",
            body.len()
        );
        let path = format!("/v1/batches/{id}/retry");
        let request = caller.head("POST", &path, &headers) + &body;
        let opened = caller.send(request.as_bytes());
        assert_eq!(opened.status, 200, "{}", opened.text());
        assert!(opened.json()["completed_at"].is_null());
        let second = caller.finished(&id);
        assert_eq!(second["request_counts"], first["request_counts"]);
        assert_eq!(by_name(&caller.lines(&second["output_file_id"])), expected);
        assert_ne!(second["output_file_id"], first["output_file_id"]);
        assert_eq!(caller.send(request.as_bytes()).json(), second, "it ran already");
        // All lines without an answer: the refused one stays refused.
        assert_eq!(retry(json!({})).status, 200);
        let third = caller.finished(&id);
        assert_eq!(third["request_counts"], first["request_counts"]);
        // Without its file it cannot be opened again.
        let input = third["input_file_id"].as_str().unwrap();
        assert_eq!(caller.delete(&format!("/v1/files/{input}")).status, 200);
        check(json!({}), 409, "file_not_found", "input_file_id");
    });
}

#[test]
fn expired_lines_run_again_in_a_new_window() {
    let (fleet, admin) = Admin::without_worker();
    let caller = &admin.first();
    let content = lines(40);
    let id = caller.batch(content.as_bytes(), "3s");
    assert_eq!(caller.finished(&id)["status"], "expired");
    let _worker = fleet.worker(&[]);
    // One line first: the others stay expired.
    changed(caller, &id, "retry", json!({ "custom_ids": ["q3"] }));
    let one = caller.finished(&id);
    assert_eq!((&one["status"], completed(&one)), (&json!("expired"), 1), "{one}");
    let errors = caller.lines(&one["error_file_id"]);
    assert!(errors.iter().all(|line| line["error"]["code"] == "batch_expired"));
    // As often as the window is too short for all.
    let mut batch = one;
    for _ in 0..20 {
        if batch["status"] == "completed" {
            break;
        }
        changed(caller, &id, "retry", json!({}));
        let next = caller.finished(&id);
        assert!(completed(&next) >= completed(&batch), "an answer is kept: {next}");
        batch = next;
    }
    check_answers(caller, &batch, &embedded(&content));
    assert_eq!(fleet.rows(&["all_jobs"]), 40, "no line became two jobs");
}

#[test]
fn random_changes_lose_and_double_nothing() {
    const LINES: usize = 150;
    let content = lines(LINES);
    let expected = embedded(&content);
    with_both_stores(|caller| {
        let seed = fastrand::u64(..);
        eprintln!("seed {seed}");
        let mut random = fastrand::Rng::with_seed(seed);
        let id = caller.batch(content.as_bytes(), "24h");
        for _ in 0..40 {
            let (what, body) = match random.u32(..6) {
                0 => ("pause", json!({})),
                1 => ("pause", json!({ "now": true })),
                2 | 3 => ("resume", json!({})),
                4 => ("retry", json!({})),
                _ => ("cancel", json!({})),
            };
            let answer = change(caller, &id, what, body);
            assert!(matches!(answer.status, 200 | 400 | 409), "{what}: {}", answer.text());
            sleep(Duration::from_millis(random.u64(..400)));
        }
        // Until everything is answered.
        for _ in 0..60 {
            let batch = get(caller, &id);
            match batch["status"].as_str().unwrap() {
                "completed" if completed(&batch) == LINES as u64 => break,
                "completed" => changed(caller, &id, "retry", json!({})),
                "paused" | "cancelled" => changed(caller, &id, "resume", json!({})),
                _ => {
                    sleep(Duration::from_secs(1));
                    continue;
                }
            };
        }
        check_answers(caller, &get(caller, &id), &expected);
    });
}

#[test]
fn operators_pause_resume_and_retry_batches_of_all_tenants() {
    let (fleet, admin) = Admin::without_worker();
    let acme = &admin.with(&key(&fleet, "acme", "submit"));
    let operator = admin.first();
    let id = acme.batch(lines(3).as_bytes(), "24h");
    let state = || get(acme, &id)["status"].as_str().unwrap().to_owned();
    eventually("the batch is in progress", || state() == "in_progress");
    // From the command line.
    let run = |words: &[&str], code: i32, said: &str| {
        let (found, _, stderr) = fleet.run(&[&["batches"], words, &[&id]].concat());
        assert!(found == Some(code) && stderr.contains(said), "{words:?} {found:?}: {stderr}");
    };
    run(&["pause", "--now"], 0, "paused");
    assert_eq!(state(), "paused");
    let listed = fleet.run(&["batches", "list", "--state", "paused"]).1;
    assert!(listed.contains(&id), "{listed}");
    run(&["resume"], 0, "resumed");
    run(&["resume"], 2, "not resumed, it is");
    eventually("it goes on", || state() == "in_progress");
    let of_tenant = |what: &str| fleet.run(&["batches", what, "--tenant", "acme"]);
    assert!(of_tenant("pause").2.contains(&format!("{id}: paused")));
    assert!(fleet.run(&["batches", "resume", "--tenant", "other"]).2.is_empty());
    assert!(of_tenant("resume").2.contains(&format!("{id}: resumed")));
    eventually("it goes on", || state() == "in_progress");
    run(&["retry", "--custom-id", "q1"], 1, "custom_ids[0]: 'q1' has not ended: it is ");
    run(&["retry", "--custom-id", "x"], 1, "custom_ids[0]: 'x' is not in the batch");
    run(&["retry"], 0, "retried");
    // Over HTTP.
    let asked = |what: &str| operator.post(&format!("/admin/v1/batches/{id}/{what}"), &json!({}));
    assert_eq!(asked("pause").json()["tenant"], "acme");
    assert_eq!((asked("resume").status, asked("retry").status), (200, 200));
    assert_eq!(acme.post(&format!("/admin/v1/batches/{id}/pause"), &json!({})).status, 403);
    // On the dashboard.
    let pages = admin.with("");
    let session = pages.log_in(operator.key());
    let path = format!("/dashboard/batches/{id}");
    let form = |what: &str| {
        assert_eq!(pages.form(&format!("{path}/{what}"), &session, OURS, "").status, 303);
        pages.page(&path, &session).text()
    };
    eventually("it goes on again", || state() == "in_progress");
    let page = form("pause");
    assert!(page.contains(">Resume<") && !page.contains(">Pause<"), "{page}");
    let page = form("resume");
    assert!(page.contains(">Pause<") && !page.contains(">Resume<"), "{page}");
    form("cancel");
    assert_eq!(acme.finished(&id)["status"], "cancelled");
    let page = pages.page(&path, &session).text();
    assert!(page.contains(">Resume<") && page.contains(">Retry failed lines<"), "{page}");
    form("retry");
    eventually("it is open again", || state() == "in_progress");
    let log = operator.get("/admin/v1/audit").json().to_string();
    for (action, times) in [("pause", 4), ("resume", 5), ("retry", 3), ("cancel", 1)] {
        assert_eq!(log.matches(&format!("\"batch.{action}\"")).count(), times, "{action}: {log}");
    }
}
