//! Batches of which the driver reads the lines from a web server: whole, by several processes one after another, and not at all.

use std::io::Write as _;

use flate2::{Compression, write::GzEncoder};
use serde_json::{Value, json};
use tritmill_admin::{Limits, Settings, data_urls::InputUrl, store::batches::BatchDeletion};
use tritmill_data::AllowedAddresses;
use tritmill_servers::{Web, WebFile};

use super::{
    chains::{content, refused_lines},
    driven::Service,
    *,
};

/// Settings that allow batches to read a server.
fn allowing(web: &Web) -> Settings {
    let prefix = web.url("/sets/").parse().unwrap();
    Settings { urls: AllowedAddresses::new(vec![prefix]), ..Settings::default() }
}

fn service(rig: Rig, web: &Web) -> Service {
    Service::start_with(rig, 1000, allowing(web))
}

fn from_url(owner: &Tenant, url: &str, options: Value) -> Batch {
    let input = InputUrl::parse(url.to_owned(), Some(options), "/v1/completions").unwrap();
    Batch { input_url: Some(Box::new(input)), ..batch(owner, FileId::generate()) }
}

async fn create_from(service: &Service, url: &str, options: Value) -> BatchId {
    let new = from_url(&tenant("acme"), url, options);
    assert_eq!(service.rig.store.create_batch(&new, MANY).await.unwrap(), Creation::New);
    new.id
}

fn lines(count: usize) -> String {
    let line = |number| {
        let body = json!({ "model": "tiny", "prompt": "a" });
        let url = "/v1/completions";
        let line = json!({ "custom_id": format!("q{number}"), "method": "POST", "url": url, "body": body });
        format!("{line}\n")
    };
    (1..=count).map(line).collect()
}

fn gzip(text: &str) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(text.as_bytes()).unwrap();
    encoder.finish().unwrap()
}

/// Options of rows.
fn rows() -> Value {
    json!({ "prompt_column": "question", "id_column": "id", "body": { "model": "tiny", "max_tokens": 5 } })
}

#[tokio::test]
async fn lines_and_rows_of_a_web_server_are_answered() {
    all(async |rig: Rig| {
        let web = Web::start().unwrap();
        // The last line has no end.
        let text = lines(5);
        web.put("/sets/lines.jsonl.gz", WebFile::new(gzip(text.trim_end())));
        web.put(
            "/sets/rows.csv?sig=secret",
            WebFile::new("id,question,city\na,hi,Rome\nb\nc,ho,\n"),
        );
        let mut service = service(rig, &web);
        let store = service.rig.store.clone();
        let first = create_from(&service, &web.url("/sets/lines.jsonl.gz"), json!({})).await;
        let waiting = service.get(first).await;
        assert!(!waiting.has_input() && waiting.awaited().is_none());
        let ended = service.until(first, BatchState::Completed, &["q2"]).await;
        assert_eq!((ended.completed, ended.failed, ended.total_lines()), (4, 1, 5));
        assert!(ended.input_url.as_ref().unwrap().fetched_at.is_some());
        let read: String =
            content(&store, ended.input).await.iter().map(|line| format!("{line}\n")).collect();
        assert_eq!(read, text);

        let url = web.url("/sets/rows.csv?sig=secret");
        let second = create_from(&service, &url, rows()).await;
        let ended = service.until(second, BatchState::Completed, &[]).await;
        assert_eq!((ended.completed, ended.failed, ended.refused), (2, 1, 1));
        assert_eq!(ended.input_url.unwrap().shown(), web.url("/sets/rows.csv"));
        let read = content(&store, ended.input).await;
        let line = json!({
            "custom_id": "a", "method": "POST", "url": "/v1/completions", "row": { "city": "Rome" },
            "body": { "prompt": "hi", "model": "tiny", "max_tokens": 5 },
        });
        assert_eq!(read[0], line);
        let errors = content(&store, ended.error_file.unwrap()).await;
        assert_eq!(errors[0]["response"]["status_code"], 400);
        let message = errors[0]["response"]["body"]["error"]["message"].as_str().unwrap();
        assert!(
            message.ends_with("rows.csv row 2: has 1 values, the file has 3 columns"),
            "{message}"
        );
        // Run again, it reads what it has.
        service.change(second, BatchChange::retry_all()).await;
        service.until(second, BatchState::Completed, &[]).await;
        assert_eq!(web.calls("/sets/rows.csv?sig=secret"), 1);
        assert_eq!(
            store.delete_batch(&tenant("acme"), second).await.unwrap(),
            BatchDeletion::Deleted
        );
        assert_eq!(store.chunk(ended.input, 0).await.unwrap(), None, "its file goes with it");
        service.stop().await;
    })
    .await;
}

#[tokio::test]
async fn source_that_cannot_be_read_fails_its_batch_by_name() {
    all(async |rig: Rig| {
        let (web, other) = (Web::start().unwrap(), Web::start().unwrap());
        let status = |status| WebFile { status: Some(status), ..WebFile::default() };
        let text = lines(6000);
        let half = gzip(&text)[..1000].to_vec();
        let to = |location: String| WebFile { location: Some(location), ..status("302 Found") };
        for (name, file) in [
            ("forbidden.jsonl", status("403 Forbidden")),
            ("moved.jsonl", to(web.url("/sets/lines.jsonl"))),
            ("away.jsonl", to(other.url("/secret.jsonl"))),
            ("half.jsonl.gz", WebFile::new(half)),
            ("archive.jsonl", WebFile::new("PK\x03\x04 and more")),
            ("other.csv", WebFile::new("id,answer\na,b\n")),
            ("open.csv", WebFile::new("id,question\na,b\n\"".to_owned() + &"x".repeat(9 << 20))),
            ("broken.parquet", WebFile::new("PAR1 and nothing more")),
            ("empty.jsonl", WebFile::new("")),
            ("blank.jsonl", WebFile::new("\n\n")),
            ("page.jsonl", WebFile::new("<html>\n")),
            ("large.jsonl", WebFile::new(text.clone())),
            ("large.parquet", WebFile::new(text.clone())),
            ("bomb.jsonl.gz", WebFile::new(gzip(&" ".repeat(10 << 20)))),
            ("many.jsonl", WebFile::new(lines(101))),
        ] {
            web.put(&format!("/sets/{name}"), file);
        }
        let limits = Limits { file_bytes_max: 500_000, batch_lines_max: 100, ..Limits::default() };
        let settings = Settings { limits, ..allowing(&web) };
        let mut service = Service::start_with(rig, 1000, settings);
        let tables = ["csv", "parquet"];
        for (name, code, line, reason) in [
            ("none.jsonl", "input_not_found", None, "nothing is at"),
            ("forbidden.jsonl", "input_unreadable", None, "status 403"),
            ("moved.jsonl", "input_unreadable", None, "a redirect (status 302)"),
            ("away.jsonl", "input_unreadable", None, "a redirect (status 302)"),
            ("half.jsonl.gz", "input_unreadable", Some(()), "ends in the middle"),
            ("archive.jsonl", "input_unreadable", None, "it is zip"),
            ("other.csv", "input_without_column", None, "no column 'question'"),
            ("open.csv", "input_unreadable", Some(()), "is a quote not closed? (after row 1)"),
            ("broken.parquet", "input_unreadable", None, "not usable as Parquet"),
            ("empty.jsonl", "empty_file", None, "has no lines"),
            ("blank.jsonl", "empty_file", None, "has no lines"),
            ("page.jsonl", "invalid_json_line", Some(()), "is not JSON"),
            ("large.jsonl", "file_too_large", None, "larger than 500000 bytes"),
            ("large.parquet", "file_too_large", None, "more than 500000 bytes"),
            ("bomb.jsonl.gz", "file_too_large", None, "larger than 500000 bytes"),
            ("many.jsonl", "too_many_tasks", Some(()), "more than 100 lines"),
        ] {
            let is_table = tables.iter().any(|end| name.ends_with(end));
            let options = if is_table { rows() } else { json!({}) };
            let id = create_from(&service, &web.url(&format!("/sets/{name}")), options).await;
            let failed = service.turns(id, BatchState::Failed, 0, &[]).await;
            let error = &failed.errors[0];
            assert_eq!((error.code.as_str(), error.line.map(drop)), (code, line), "{error:?}");
            assert!(error.message.contains(reason), "{error:?}");
            let is_of_line = code == "invalid_json_line";
            assert_eq!(error.param.as_deref(), (!is_of_line).then_some("input_url"), "{error:?}");
            assert!(
                !failed.has_input()
                    || is_of_line
                    || code == "too_many_tasks"
                    || name == "blank.jsonl"
            );
        }
        assert_eq!((other.calls("/secret.jsonl"), web.calls("/sets/lines.jsonl")), (0, 0));
        // What is not allowed is not asked for, though the batch is there.
        for url in
            [other.url("/sets/a.jsonl"), web.url("/other.jsonl"), web.url("/sets/../a.jsonl")]
        {
            let id = create_from(&service, &url, json!({})).await;
            let failed = service.turns(id, BatchState::Failed, 0, &[]).await;
            assert_eq!(failed.errors[0].code, "address_not_allowed");
        }
        assert_eq!((other.calls("/sets/a.jsonl"), web.calls("/other.jsonl")), (0, 0));
        service.stop().await;
    })
    .await;
}

#[tokio::test]
async fn source_that_fails_for_a_while_is_tried_again() {
    all(async |rig: Rig| {
        let web = Web::start().unwrap();
        let busy = WebFile { status: Some("503 Service Unavailable"), ..WebFile::default() };
        web.put("/sets/busy.jsonl", busy.clone());
        // Without a version the rest cannot be asked for.
        let cut = WebFile { breaks_after: Some(300), ..WebFile::new(lines(5)) };
        web.put("/sets/cut.jsonl", cut);
        let mut service = service(rig, &web);
        let id = create_from(&service, &web.url("/sets/busy.jsonl"), json!({})).await;
        let cut = create_from(&service, &web.url("/sets/cut.jsonl"), json!({})).await;
        let failures = async |service: &Service, id| {
            let fetching = service.get(id).await.steps.fetching;
            fetching.map_or(0, |state| state.tries.failures)
        };
        while failures(&service, id).await < 3 || failures(&service, cut).await < 3 {
            service.turn(0, &[]).await;
        }
        assert_eq!(service.get(id).await.state, BatchState::Validating);
        web.put("/sets/busy.jsonl", WebFile::new(lines(5)));
        service.rig.advance(Duration::from_secs(8));
        let ended = service.until(id, BatchState::Completed, &[]).await;
        assert_eq!(ended.completed, 5);
        for _ in 0..12 {
            service.rig.advance(Duration::from_secs(60));
            service.turn(0, &[]).await;
        }
        let failed = service.turns(cut, BatchState::Failed, 0, &[]).await;
        assert_eq!(failed.errors[0].code, "input_unreadable");
        assert!(failed.errors[0].message.contains("after 300 bytes"), "{:?}", failed.errors);
        service.stop().await;
    })
    .await;
}

/// Reads a source of some MiB in two processes; between them its content may change.
async fn read_by_two(rig: Rig, changed: Option<String>) {
    // 12 MiB, in lines that end without a worker.
    let pad = " ".repeat(4000);
    let text: String = refused_lines(3000).lines().map(|line| format!("{line}{pad}\n")).collect();
    let web = Web::start().unwrap();
    let file = WebFile { holds_after: Some(9 << 20), ..WebFile::new(text.clone()) };
    web.put("/sets/large.jsonl", file.clone());
    let mut first = service(rig, &web);
    let id = create_from(&first, &web.url("/sets/large.jsonl"), json!({})).await;
    // The first process ends when it has saved what it got.
    let saved = loop {
        let part = first.get(id).await.steps.fetching.and_then(|state| state.file);
        match part.filter(|part| part.size_bytes >= 8 << 20) {
            Some(part) => break part,
            None => first.turn(0, &[]).await,
        }
    };
    let rig = first.halt().await;
    let expected = changed.clone().unwrap_or(text);
    web.put("/sets/large.jsonl", WebFile::new(expected.clone()));
    web.release();
    let mut second = service(rig, &web);
    let ended = second.turns(id, BatchState::Completed, 0, &[]).await;
    assert_eq!(ended.failed, expected.lines().count() as u64);
    assert_eq!(ended.input == saved.file, changed.is_none(), "it goes on, or begins again");
    let read = content(&second.rig.store, ended.input).await;
    let names = |line: &Value| line["custom_id"].as_str().unwrap().to_owned();
    let same = expected.lines().map(|line| names(&serde_json::from_str(line).unwrap()));
    assert!(read.iter().map(names).eq(same));
    let calls = if changed.is_none() { 2 } else { 3 };
    assert_eq!(web.calls("/sets/large.jsonl"), calls);
    second.stop().await;
}

#[tokio::test]
async fn another_process_reads_on_where_one_has_ended() {
    all(async |rig: Rig| read_by_two(rig, None).await).await;
}

#[tokio::test]
async fn source_that_has_changed_meanwhile_is_read_from_its_begin() {
    let changed = || Some(refused_lines(2000).replace("\"q", "\"other-q"));
    all(async |rig: Rig| read_by_two(rig, changed()).await).await;
}

#[tokio::test]
async fn batch_is_paused_and_cancelled_while_its_source_is_read() {
    all(async |rig: Rig| {
        let web = Web::start().unwrap();
        let file = WebFile { holds_after: Some(10), ..WebFile::new(lines(5)) };
        web.put("/sets/slow.jsonl", file);
        let mut service = service(rig, &web);
        let url = web.url("/sets/slow.jsonl");
        let id = create_from(&service, &url, json!({})).await;
        while web.held() == 0 {
            service.turn(0, &[]).await;
        }
        service.change(id, BatchChange::Pause { now: false }).await;
        service.turn(0, &[]).await;
        service.change(id, BatchChange::Resume).await;
        service.change(id, BatchChange::Cancel).await;
        let cancelled = service.turns(id, BatchState::Cancelled, 0, &[]).await;
        assert_eq!((cancelled.output, cancelled.total_lines()), (None, 0));
        web.release();
        service.change(id, BatchChange::Resume).await;
        let ended = service.until(id, BatchState::Completed, &[]).await;
        assert_eq!(ended.completed, 5);
        service.stop().await;
    })
    .await;
}
