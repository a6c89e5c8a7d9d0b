//! Batches of data where it lies: in a bucket and on a web server.

use std::path::Path;

use serde_json::{Value, json};
use tokio::runtime::Runtime;
use tritmill_client::{
    http::HttpClient,
    remote::{Api, UrlBatch},
};
use tritmill_servers::{Moto, Signal, Web, WebFile};

use crate::{
    batches::{by_name, embedded, lines},
    fleet::{Fleet, eventually},
    rig::{Admin, Caller, key},
    standalone::alone,
};

const CHAT: &str = "/v1/chat/completions";
const WITNESS: &str =
    concat!(env!("CARGO_MANIFEST_DIR"), "/producer/data/tests/golden/pyarrow.parquet");

/// Options of rows.
fn rows() -> Value {
    json!({
        "prompt_column": "question", "id_column": "id",
        "body": { "model": "demo", "max_tokens": 3, "temperature": 0 },
    })
}

fn asked(url: &str, options: &Value) -> Value {
    json!({
        "input_url": url, "input_options": options, "endpoint": CHAT, "completion_window": "24h",
    })
}

fn create(caller: &Caller, asked: &Value) -> String {
    let answer = caller.post("/v1/batches", asked);
    assert_eq!(answer.status, 200, "{}", answer.text());
    answer.json()["id"].as_str().unwrap().to_owned()
}

/// Returns status, code and field of a refusal.
fn refused(caller: &Caller, path: &str, asked: &Value) -> (u16, String, String) {
    let answer = caller.post(path, asked);
    let param = answer.json()["error"]["param"].as_str().unwrap_or_default().to_owned();
    (answer.error().0, answer.error().1, param)
}

fn standalone(folder: &Path, moto: &Moto, more: &[&str]) -> Admin {
    let words = ["standalone", "--json", "--threads", "1", "--api", "127.0.0.1:0"];
    let mut command = alone(folder, &[&words[..], more].concat());
    command.envs(moto.variables());
    Admin::run(command)
}

#[test]
fn rows_of_a_bucket_are_answered_and_other_places_are_refused() {
    if Moto::program().is_none() {
        return tritmill_servers::skip("moto_server (cargo xtask test installs it)");
    }
    let moto = Moto::start(&["data"]).unwrap();
    moto.put("data/default/set/train-0.parquet", &std::fs::read(WITNESS).unwrap()).unwrap();
    moto.put("data/default/lines.jsonl", lines(7).as_bytes()).unwrap();
    moto.put("data/other/lines.jsonl", lines(7).as_bytes()).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let service = standalone(folder.path(), &moto, &["--allow-url", "s3://data/{tenant}/"]);
    let caller = service.first();
    let first = create(&caller, &asked("s3://data/default/lines.jsonl", &Value::Null));
    let second = create(&caller, &asked("s3://data/default/set/", &rows()));
    let first = caller.finished(&first);
    assert_eq!(first["input_url"], "s3://data/default/lines.jsonl");
    assert_eq!(by_name(&caller.lines(&first["output_file_id"])), embedded(&lines(7)));
    let second = caller.finished(&second);
    assert_eq!(second["status"], "completed", "{second}");
    assert_eq!(second["input_options"], rows());
    let counts = json!({ "total": 6, "completed": 5, "failed": 1 });
    assert_eq!(second["request_counts"], counts, "one row has no question");
    let made = caller.lines(&second["input_file_id"]);
    assert_eq!((&made[5]["custom_id"], &made[5]["row"]["score"]), (&json!("5"), &json!(1.25)));

    let check = |url: &str, code: &str| {
        let found = refused(&caller, "/v1/batches", &asked(url, &Value::Null));
        assert_eq!(found, (400, code.to_owned(), "input_url".to_owned()), "{url}");
    };
    check("s3://data/other/lines.jsonl", "address_not_allowed");
    check("s3://data/default/../other/lines.jsonl", "invalid_value");
    check("s3://data/default%2f..%2fother/lines.jsonl", "invalid_value");
    check("https://data/default/lines.jsonl", "address_not_allowed");
    check("/data/default/lines.jsonl", "invalid_value");
    let fine = asked("s3://data/default/lines.jsonl", &Value::Null);
    let estimate = refused(&caller, "/v1/batches/estimate", &fine);
    assert_eq!(estimate, (400, "invalid_value".to_owned(), "input_url".to_owned()));
    let schedule = json!({ "cron": "0 0 1 1 *", "batch": fine });
    assert_eq!(caller.post("/v1/schedules", &schedule).status, 200);
    let missing = create(&caller, &asked("s3://data/default/none.jsonl", &Value::Null));
    let missing = caller.finished(&missing);
    let error = &missing["errors"]["data"][0];
    assert_eq!((&error["code"], &error["param"]), (&json!("input_not_found"), &json!("input_url")));

    // The same key again is the same batch, by the client library.
    let server = format!("http://{}", service.listen);
    let keyed = |url: &str| {
        let api =
            Api::new(HttpClient::of_trusted_server().unwrap(), &server, caller.key()).unwrap();
        let (options, output_url, idempotency_key) = (&Value::Null, None, "k");
        let (endpoint, window, priority) = (CHAT, "24h", "normal");
        let new =
            UrlBatch { url, output_url, options, endpoint, window, priority, idempotency_key };
        Runtime::new().unwrap().block_on(api.create_from_url(&new))
    };
    let one = keyed("s3://data/default/lines.jsonl").unwrap();
    caller.finished(&one.id);
    assert_eq!(keyed("s3://data/default/lines.jsonl").unwrap().id, one.id);
    assert!(keyed("s3://data/default/set/").unwrap_err().to_string().contains("idempotency key"));
    let pages = service.with("");
    let page = pages.page(&format!("/dashboard/batches/{}", one.id), &pages.log_in(caller.key()));
    assert!(page.text().contains("s3://data/default/lines.jsonl"), "{}", page.text());

    moto.require_rights().unwrap();
    let denied = caller.finished(&create(&caller, &fine));
    assert_eq!(denied["errors"]["data"][0]["code"], "input_denied", "{denied}");
    let key = service.first_key.clone().unwrap();
    drop(service);
    // Without prefixes nothing is read.
    let service = standalone(folder.path(), &moto, &[]);
    let found = refused(&service.with(&key), "/v1/batches", &fine);
    assert_eq!(found, (400, "address_not_allowed".to_owned(), "input_url".to_owned()));
}

/// Rows of a table, of which one has no prompt, to tables and lines, on SQLite or Postgres.
fn check_outputs(caller: &Caller, moto: &Moto) {
    moto.put("data/default/in.csv", b"question,city\nhi,Rome\n\nho\nha,\"Bonn, old\"\n").unwrap();
    let mut table = asked("s3://data/default/in.csv", &rows());
    table["input_options"].as_object_mut().unwrap().remove("id_column");
    let to = |asked: &Value, url: &str, format: Value| {
        let mut asked = asked.clone();
        (asked["output_url"], asked["output_format"]) = (json!(url), format);
        asked
    };
    let csv = create(caller, &to(&table, "s3://data/default/out.csv", Value::Null));
    let lines_of = create(caller, &to(&table, "s3://data/default/out", json!("jsonl")));
    let nowhere = create(caller, &to(&table, "s3://missing/out.csv", Value::Null));
    let csv = caller.finished(&csv);
    let counts = json!({ "total": 3, "completed": 2, "failed": 1 });
    assert_eq!(
        (&csv["request_counts"], &csv["output_url_error"]),
        (&counts, &Value::Null),
        "{csv}"
    );
    assert_eq!(csv["output_url"], "s3://data/default/out.csv");
    let object = |name: &str| String::from_utf8(moto.get(name).unwrap()).unwrap();
    let written = object("data/default/out.csv");
    let rows: Vec<&str> = written.lines().collect();
    assert_eq!(rows.len(), 4, "{written}");
    assert!(rows[0].starts_with("custom_id,content,") && rows[0].ends_with(",city"), "{written}");
    assert!(rows[1].starts_with("row-1,") && rows[1].ends_with(",Rome"), "{written}");
    assert!(rows[2].starts_with("row-2,,") && rows[2].contains("has 1 values"), "{written}");
    assert!(rows[3].ends_with(",\"Bonn, old\""), "{written}");
    caller.finished(&lines_of);
    let written = object("data/default/out");
    let written: Vec<Value> =
        written.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(written[0]["row"], json!({ "city": "Rome" }));
    assert_eq!(written[1]["response"]["status_code"], 400);
    let answers = caller.lines(&csv["output_file_id"]);
    assert_eq!(
        written[2]["response"]["body"]["choices"],
        answers[1]["response"]["body"]["choices"]
    );
    // What cannot be written is shown, and the files are there.
    let nowhere = caller.finished(&nowhere);
    assert_eq!(nowhere["status"], "completed");
    let error = nowhere["output_url_error"].as_str().unwrap();
    assert!(error.contains("cannot use s3://missing/out.csv: NoSuchBucket"), "{error}");
    assert_eq!(caller.lines(&nowhere["output_file_id"]).len(), 2);
    // A cancelled batch has what was answered, and is written again when it ends again.
    let open = json!({
        "open": true, "endpoint": CHAT, "completion_window": "24h",
        "output_url": "s3://data/default/open.parquet",
    });
    let open = create(caller, &open);
    let path = format!("/v1/batches/{open}");
    eventually("it runs", || caller.get(&path).json()["status"] == "in_progress");
    let added = caller.request("POST", &format!("{path}/lines"), "text/plain", lines(3).as_bytes());
    assert_eq!(added.status, 200, "{}", added.text());
    caller.post(&format!("{path}/cancel"), &json!({}));
    let cancelled = caller.finished(&open);
    assert_eq!(
        (&cancelled["status"], &cancelled["output_url_error"]),
        (&json!("cancelled"), &Value::Null)
    );
    let before = moto.get("data/default/open.parquet").unwrap();
    assert!(before.starts_with(b"PAR1"));
    caller.post(&format!("{path}/resume"), &json!({}));
    assert_eq!(caller.finished(&open)["request_counts"]["completed"], 3);
    let after = moto.get("data/default/open.parquet").unwrap();
    let read = create(
        caller,
        &asked(
            "s3://data/default/open.parquet",
            &json!({
                "prompt_column": "content", "id_column": "custom_id",
                "body": { "model": "demo", "max_tokens": 2, "temperature": 0 },
            }),
        ),
    );
    assert_eq!(caller.finished(&read)["request_counts"]["completed"], 3, "our own file is read");
    assert!(cancelled["request_counts"]["completed"] == 3 || before != after);
}

const OUTPUTS: [&str; 4] = ["--allow-url", "s3://data/{tenant}/", "--allow-url", "s3://missing/"];

#[test]
fn answers_are_written_to_a_bucket_in_one_process() {
    if Moto::program().is_none() {
        return tritmill_servers::skip("moto_server (cargo xtask test installs it)");
    }
    let moto = Moto::start(&["data"]).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let service = standalone(folder.path(), &moto, &OUTPUTS);
    check_outputs(&service.first(), &moto);
}

#[test]
fn answers_are_written_to_a_bucket_on_a_fleet() {
    if Moto::program().is_none() {
        return tritmill_servers::skip("moto_server (cargo xtask test installs it)");
    }
    let moto = Moto::start(&["data"]).unwrap();
    let fleet = Fleet::start();
    let _worker = fleet.worker(&[]);
    let mut command = fleet.command(&["admin", "--json", "--listen", "127.0.0.1:0"]);
    command.args(OUTPUTS).envs(moto.variables());
    check_outputs(&Admin::run(command).first(), &moto);
}

#[test]
fn another_admin_reads_on_after_a_kill() {
    let fleet = Fleet::start();
    let _worker = fleet.worker(&[]);
    let web = Web::start().unwrap();
    // The first pages are saved before the answer stands still.
    let pad = " ".repeat(100_000);
    let content = lines(40).lines().map(|line| format!("{line}{pad}\n")).collect::<String>();
    let file = WebFile { holds_after: Some(3 << 20), ..WebFile::new(content.clone()) };
    web.put("/sets/lines.jsonl", file);
    let prefix = web.url("/sets/");
    let start = || Admin::start(&fleet, &["--allow-url", &prefix]);
    let first = start();
    let url = web.url("/sets/lines.jsonl");
    let create = |more: &[&str]| {
        fleet.run(&[&["batches", "create", "--tenant", "acme", "--input-url"], more].concat())
    };
    assert_eq!(create(&["lines.jsonl"]).0, Some(1));
    assert_eq!(create(&[&url, "--input-options", r#"{"colour": 1}"#]).0, Some(1));
    let (code, id, said) = create(&[&url]);
    assert_eq!(code, Some(0), "{said}");
    let saved =
        "SELECT count(*) FROM batches WHERE batch -> 'steps' -> 'fetching' -> 'file' IS NOT NULL";
    eventually("some pages are saved", || web.held() == 1 && fleet.sql(saved).trim() == "1");
    first.signal(Signal::Kill);
    drop(first);
    web.put("/sets/lines.jsonl", WebFile::new(content.clone()));
    let second = start();
    let caller = second.with(&key(&fleet, "acme", "submit"));
    let batch = caller.finished(id.trim());
    assert_eq!(batch["request_counts"], json!({ "total": 40, "completed": 40, "failed": 0 }));
    assert_eq!(by_name(&caller.lines(&batch["output_file_id"])), embedded(&lines(40)));
    assert_eq!(web.calls("/sets/lines.jsonl"), 2);
    let files = "SELECT count(*) FROM files WHERE purpose = 'batch'";
    assert_eq!(fleet.sql(files).trim(), "1", "it went on with the file of the first");
}
