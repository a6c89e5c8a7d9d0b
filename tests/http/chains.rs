//! Batches after other ones, with Postgres and Redis, and with SQLite in one process.

use serde_json::{Value, json};

use crate::{
    batches::lines,
    fleet::Fleet,
    rig::{Admin, Caller, key},
    standalone::alone,
};

const CHAT: &str = "/v1/chat/completions";
const ALONE: [&str; 6] = ["standalone", "--json", "--threads", "1", "--api", "127.0.0.1:0"];

/// A batch that asks about the answers of another one.
fn after(earlier: &str, content: &str) -> Value {
    let body = json!({
        "model": "{{ previous.body.model }}",
        "messages": [{ "role": "user", "content": content }],
        "temperature": 0,
        "max_tokens": 14,
    });
    let lines = json!({ "custom_id": "{{ previous.custom_id }}-2", "url": CHAT, "body": body });
    json!({
        "endpoint": CHAT,
        "completion_window": "24h",
        "after": { "batch_id": earlier, "lines": lines },
    })
}

fn create(caller: &Caller, asked: &Value) -> Value {
    let answer = caller.post("/v1/batches", asked);
    assert_eq!(answer.status, 200, "{}", answer.text());
    answer.json()
}

/// A chain of three batches of one call, made before the first one has ended.
fn check_chain(caller: &Caller) {
    let bad = lines(1).replace("q0", "bad").replace("\"max_tokens\":14", "\"max_tokens\":-1");
    assert!(bad.contains("-1"), "{bad}");
    let first = caller.batch(format!("{}{bad}", lines(6)).as_bytes(), "24h");
    let text = "Paid on {{ previous.content }}";
    let second = create(caller, &after(&first, text));
    let id = second["id"].as_str().unwrap();
    assert_eq!((&second["status"], &second["input_file_id"]), (&json!("validating"), &Value::Null));
    assert_eq!(
        (&second["after"]["batch_id"], &second["after"]["began_at"]),
        (&json!(first), &Value::Null)
    );
    let third =
        create(caller, &after(id, "{{ previous.body.messages.0.content }} {{ previous.content }}"));
    let path = format!("/v1/batches/{first}");
    assert_eq!(caller.delete(&path).status, 409, "it runs, or one waits for it");
    let third = caller.finished(third["id"].as_str().unwrap());
    let second = caller.finished(id);
    let first = caller.finished(&first);
    let counts = json!({ "total": 7, "completed": 6, "failed": 1 });
    for batch in [&first, &second, &third] {
        assert_eq!(
            (&batch["status"], &batch["request_counts"]),
            (&json!("completed"), &counts),
            "{batch}"
        );
    }
    assert!(second["after"]["began_at"].as_u64() >= first["completed_at"].as_u64());
    assert_eq!(second["after"]["lines"]["body"]["messages"][0]["content"], text);
    // Each line has the answer of the one before it.
    let content =
        |line: &Value| line["response"]["body"]["choices"][0]["message"]["content"].clone();
    let (answers, made) =
        (caller.lines(&first["output_file_id"]), caller.lines(&second["input_file_id"]));
    let later = caller.lines(&second["output_file_id"]);
    for ((answer, made), later) in answers.iter().zip(&made).zip(&later) {
        let said = content(answer).as_str().unwrap().to_owned();
        assert_eq!(made["body"]["messages"][0]["content"], format!("Paid on {said}"));
        assert_eq!(made["body"]["model"], "demo");
        let name = format!("{}-2", answer["custom_id"].as_str().unwrap());
        assert_eq!((&made["custom_id"], &later["custom_id"]), (&json!(name), &json!(name)));
        assert!(content(later).is_string(), "{later}");
    }
    let made = caller.lines(&third["input_file_id"]);
    let expected = format!(
        "Paid on {} {}",
        content(&answers[0]).as_str().unwrap(),
        content(&later[0]).as_str().unwrap()
    );
    assert_eq!(made[0]["body"]["messages"][0]["content"], expected);
    let errors = caller.lines(&third["error_file_id"]);
    assert_eq!((errors.len(), &errors[0]["custom_id"]), (1, &json!("bad")));
    assert_eq!(errors[0]["response"]["status_code"], 424);
    assert_eq!(errors[0]["response"]["body"]["error"]["code"], "previous_line_failed");
    // Nothing waits for it any more.
    assert_eq!(caller.delete(&path).status, 200);
}

#[test]
fn chain_of_batches_is_answered_on_a_fleet() {
    let (_fleet, _worker, admin) = Admin::with_worker();
    check_chain(&admin.first());
}

#[test]
fn chain_of_batches_is_answered_in_one_process() {
    let folder = tempfile::tempdir().unwrap();
    check_chain(&Admin::run(alone(folder.path(), &ALONE)).first());
}

#[test]
fn batch_after_another_is_refused_where_it_cannot_be_made() {
    let fleet = Fleet::start();
    drop(fleet.worker(&[]));
    let admin = Admin::start(&fleet, &[]);
    let (caller, other) = (admin.first(), admin.with(&key(&fleet, "other", "submit")));
    // No worker: it stays.
    let first = caller.batch(lines(2).as_bytes(), "24h");
    let fine = after(&first, "{{ previous.content }}");
    let refused = |caller: &Caller, asked: &Value| {
        let answer = caller.post("/v1/batches", asked);
        let error = answer.json()["error"].clone();
        (answer.status, error["code"].as_str().unwrap().to_owned(), error["param"].clone())
    };
    let check = |asked: Value, status: u16, code: &str, param: &str| {
        assert_eq!(refused(&caller, &asked), (status, code.to_owned(), json!(param)), "{asked}");
    };
    let foreign = refused(&other, &fine);
    assert_eq!(foreign, (404, "not_found".to_owned(), json!("after.batch_id")));
    let unknown = "batch_00000000000000000000000000000000";
    check(after(unknown, "{{ previous.content }}"), 404, "not_found", "after.batch_id");
    let place = "after.lines.body.messages[0].content";
    check(after(&first, "{{ previous.contnet }}"), 400, "invalid_template", place);
    check(after(&first, "{{ previous.content"), 400, "invalid_template", place);
    let with = |name: &str, value: Value| {
        let mut asked = fine.clone();
        asked[name] = value;
        asked
    };
    check(with("open", json!(true)), 400, "invalid_value", "open");
    check(with("input_file_id", json!("file-0")), 400, "invalid_value", "input_file_id");
    check(with("endpoint", json!("/v1/completions")), 400, "invalid_url", "after.lines.url");
    let estimate = caller.post("/v1/batches/estimate", &fine);
    assert_eq!(estimate.error(), (400, "invalid_value".to_owned()));
    let schedule = json!({ "cron": "0 0 * * *", "batch": fine });
    assert_eq!(caller.post("/v1/schedules", &schedule).json()["error"]["param"], "batch.after");
    let listed = caller.get("/v1/batches").json();
    assert_eq!(listed["data"].as_array().unwrap().len(), 1, "nothing half done");
    // By an operator, on the command line.
    let template = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(template.path(), fine["after"]["lines"].to_string()).unwrap();
    let path = template.path().to_str().unwrap();
    let create =
        |earlier: &str| fleet.run(&["batches", "create", "--after", earlier, "--template", path]);
    let (code, said, _) = create(&first);
    assert_eq!(code, Some(0), "{said}");
    let id = said.trim().to_owned();
    assert_eq!(create(unknown).0, Some(1));
    let batch = caller.get(&format!("/v1/batches/{id}")).json();
    assert_eq!((&batch["after"]["batch_id"], &batch["endpoint"]), (&json!(first), &json!(CHAT)));
    // The earlier batch is kept while it waits.
    caller.post(&format!("/v1/batches/{id}/pause"), &json!({}));
    caller.post(&format!("/v1/batches/{first}/cancel"), &json!({}));
    caller.finished(&first);
    let kept = caller.delete(&format!("/v1/batches/{first}"));
    assert_eq!(kept.error(), (409, "batch_awaited".to_owned()));
    assert!(kept.text().contains(&id), "{}", kept.text());
    let pages = admin.with("");
    let session = pages.log_in(caller.key());
    let page = pages.page(&format!("/dashboard/batches/{id}"), &session).text();
    assert!(
        page.contains(&format!("after <a class=\"id\" href=\"/dashboard/batches/{first}\">")),
        "{page}"
    );
    let refused = fleet.run(&["batches", "delete", &first]);
    assert!(refused.2.contains(&format!("{id} waits")), "{}", refused.2);
}
