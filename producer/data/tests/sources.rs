//! Sources of every kind become lines of a batch, and answers become files of every kind.

#![allow(clippy::unwrap_used, reason = "a failed step of a test is a failed test")]

use std::{
    fs::{self, File},
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::TcpListener,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

use flate2::{Compression, write::GzEncoder};
use serde_json::{Map, Value, json};
use tempfile::TempDir;
use tokio::runtime::Runtime;
use tritmill_data::{Address, Columns, DataError, DataRun, DataSettings, EndpointOfRows};

/// A folder and a runtime for one test.
struct Rig {
    folder: TempDir,
    runtime: Runtime,
}

impl Rig {
    fn new() -> Self {
        Self { folder: tempfile::tempdir().unwrap(), runtime: Runtime::new().unwrap() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn write(&self, name: &str, content: impl AsRef<[u8]>) -> String {
        let path = self.path(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, content).unwrap();
        path.to_str().unwrap().to_owned()
    }

    fn settings(&self, input: &str, output: &str) -> DataSettings {
        let (prompt, id, body) = (None, None, Map::new());
        DataSettings {
            input: Address::parse(input).unwrap(),
            output: Address::parse(self.path(output).to_str().unwrap()).unwrap(),
            input_format: None,
            output_format: None,
            split: None,
            columns: Columns { prompt, id, endpoint: EndpointOfRows::Chat, body, of_lines: false },
            state: None,
            restart: false,
        }
    }

    fn open(&self, settings: DataSettings) -> Result<DataRun, DataError> {
        DataRun::open(settings, self.runtime.handle(), &mut |_| {})
    }
}

fn lines(path: &Path) -> Vec<Value> {
    fs::read_to_string(path).unwrap().lines().map(|l| serde_json::from_str(l).unwrap()).collect()
}

fn prompts(run: &DataRun) -> Vec<String> {
    let of =
        |line: &Value| line["body"]["messages"][0]["content"].as_str().unwrap_or("-").to_owned();
    lines(&run.input()).iter().map(of).collect()
}

/// Answers every line as a run does.
fn answer(run: &DataRun) {
    let answer = |line: Value| {
        let content =
            format!("to {}", line["body"]["messages"][0]["content"].as_str().unwrap_or("?"));
        let choice =
            json!({ "message": { "content": content }, "finish_reason": "stop", "logprobs": null });
        let usage = json!({ "prompt_tokens": 3, "completion_tokens": 2 });
        let response =
            json!({ "status_code": 200, "body": { "choices": [choice], "usage": usage } });
        match line.get("row_error") {
            Some(error) => {
                json!({ "custom_id": line["custom_id"], "response": null, "error": error })
            }
            None => json!({ "custom_id": line["custom_id"], "response": response, "error": null }),
        }
    };
    let text: String =
        lines(&run.input()).into_iter().map(|l| format!("{}\n", answer(l))).collect();
    fs::write(run.output(), text).unwrap();
}

fn gzip(text: &str) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(text.as_bytes()).unwrap();
    encoder.finish().unwrap()
}

const WITNESS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/pyarrow.parquet");

#[test]
fn parquet_of_another_implementation_is_read_and_ours_is_read_back() {
    let rig = Rig::new();
    let mut settings = rig.settings(WITNESS, "out.parquet");
    settings.columns.prompt = Some("question".to_owned());
    settings.columns.id = Some("id".to_owned());
    let mut run = rig.open(settings).unwrap();
    assert_eq!(prompts(&run)[..2], ["what is 0?", "what is 1?"]);
    let refused = &lines(&run.input())[2];
    assert_eq!(refused["custom_id"], "2");
    let message = refused["row_error"]["message"].as_str().unwrap();
    assert!(message.ends_with("pyarrow.parquet row 3: column 'question' is null"), "{message}");
    answer(&run);
    assert_eq!(run.finish(rig.runtime.handle()).unwrap(), None);

    // Our file as a source: every column is there.
    let mut settings = rig.settings(rig.path("out.parquet").to_str().unwrap(), "again.jsonl");
    settings.columns.prompt = Some("content".to_owned());
    settings.columns.id = Some("custom_id".to_owned());
    let mut again = rig.open(settings).unwrap();
    assert_eq!(prompts(&again)[4..], ["to what is 4?", "to what is 5?"]);
    assert!(lines(&again.input())[2]["row_error"]["message"].as_str().unwrap().contains("is null"));
    answer(&again);
    again.finish(rig.runtime.handle()).unwrap();
    let row = &lines(&rig.path("again.jsonl"))[5]["row"];
    let expected = json!({
        "finish_reason": "stop", "prompt_tokens": 3, "completion_tokens": 2, "logprobs": null, "error": null,
        "error_code": null, "messages": "[{\"role\":\"user\",\"content\":\"say 5\",\"name\":null}]", "score": 1.25,
        "tags": "[\"a\",\"é\"]", "meta": "{\"source\":\"web\",\"rank\":5}", "is_checked": false,
        "seen": "2026-01-02 03:04:05.000 +00:00",
    });
    assert_eq!(row, &expected);
}

#[test]
fn messages_of_parquet_are_a_conversation() {
    let rig = Rig::new();
    let run = rig.open(rig.settings(WITNESS, "out.csv")).unwrap();
    let first = &lines(&run.input())[0];
    let expected = json!([{ "role": "user", "content": "say 0" }]);
    assert_eq!((&first["custom_id"], &first["body"]["messages"]), (&json!("row-1"), &expected));
}

#[test]
fn csv_carries_its_columns_to_csv_and_the_old_output_is_kept() {
    let rig = Rig::new();
    let input = rig.write("in.csv", "prompt,city,content\nhi,Rome,x\nho,\"Bonn, old\",y\n");
    rig.write("out.csv.gz", "old");
    let mut run = rig.open(rig.settings(&input, "out.csv.gz")).unwrap();
    answer(&run);
    let old = run.finish(rig.runtime.handle()).unwrap().unwrap();
    assert_eq!(fs::read_to_string(old).unwrap(), "old");
    let mut text = String::new();
    let file = File::open(rig.path("out.csv.gz")).unwrap();
    flate2::read::GzDecoder::new(file).read_to_string(&mut text).unwrap();
    let expected = "custom_id,content,finish_reason,prompt_tokens,completion_tokens,logprobs,error,error_code,city,row_content\n\
        row-1,to hi,stop,3,2,,,,Rome,x\nrow-2,to ho,stop,3,2,,,,\"Bonn, old\",y\n";
    assert_eq!(text, expected);
    assert_eq!(run.finish(rig.runtime.handle()).unwrap(), None, "our own output is replaced");
}

#[test]
fn folder_of_a_dataset_is_one_source_in_the_order_of_names() {
    let rig = Rig::new();
    rig.write("set/data/train-00001-of-00002.jsonl", "{\"prompt\": \"c\"}\n");
    rig.write(
        "set/data/train-00000-of-00002.jsonl.gz",
        gzip("{\"prompt\": \"a\", \"n\": 1}\n{\"prompt\": \"b\"}"),
    );
    rig.write("set/data/test-00000-of-00001.jsonl", "{\"prompt\": \"t\"}\n");
    rig.write("set/README.md", "# Data");
    let folder = rig.path("set").to_str().unwrap().to_owned();
    let run = rig.open(rig.settings(&folder, "out.jsonl")).unwrap();
    assert_eq!(prompts(&run), ["a", "b", "c"]);
    drop(run);
    let split = Some("test".to_owned());
    let run = rig.open(DataSettings { split, ..rig.settings(&folder, "out.jsonl") }).unwrap();
    assert_eq!(prompts(&run), ["t"], "another split is another source");
    drop(run);
    let split = Some("dev".to_owned());
    let error = rig.open(DataSettings { split, ..rig.settings(&folder, "out.jsonl") }).unwrap_err();
    assert!(error.to_string().ends_with("of the split 'dev'"), "{error}");
}

#[test]
fn source_that_ends_in_the_middle_keeps_its_whole_lines() {
    let rig = Rig::new();
    // Letters that do not repeat, so that the rest is long.
    let noise = |at: u64| at.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 24;
    let line = |at| format!("{{\"prompt\": \"{at} {:x}\"}}\n", noise(at));
    let text: String = (0..20_000).map(line).collect();
    let whole = gzip(&text);
    let input = rig.write("in.jsonl.gz", &whole[..whole.len() / 2]);
    let mut run = rig.open(rig.settings(&input, "out.jsonl")).unwrap();
    let (ended, count) = run.take_ended().unwrap();
    assert!(
        ended.to_string().contains("in.jsonl.gz: the gzip content ends in the middle"),
        "{ended}"
    );
    assert!((1000..19_000).contains(&count), "{count}");
    let kept = fs::read_to_string(run.input()).unwrap();
    assert!(text.starts_with(&kept) && kept.ends_with('\n'));
    assert_eq!(kept.lines().count() as u64, count);
    drop(run);

    rig.write("in.jsonl.gz", &whole);
    let mut run = rig.open(rig.settings(&input, "out.jsonl")).unwrap();
    assert!(run.take_ended().is_none());
    assert_eq!(fs::read_to_string(run.input()).unwrap(), text);
    drop(run);

    rig.write("in.jsonl.gz", &whole[..whole.len() / 3]);
    let error = rig.open(rig.settings(&input, "out.jsonl")).unwrap_err();
    assert!(matches!(error, DataError::Shorter { earlier: 20_000, .. }), "{error}");
}

#[test]
fn unusable_sources_and_sinks_are_named_and_leave_nothing() {
    let rig = Rig::new();
    let csv = rig.write("in.csv", "question\nx\n");
    let broken = rig.write("broken.parquet", "PAR1 and nothing more");
    let fails = |input: &str, output: &str, message: &str| {
        let error = rig.open(rig.settings(input, output)).unwrap_err().to_string();
        assert!(error.contains(message), "{error}");
        assert!(!rig.path(&format!("{output}.tritmill-data")).exists(), "{message}");
    };
    fails(&csv, "a.jsonl", "in.csv has no column 'prompt', 'text' or 'messages'");
    fails(WITNESS, "a.parquet.gz", "Parquet is compressed inside");
    fails(&broken, "a.jsonl", "broken.parquet: not usable as Parquet");
}

/// A web server that sends each file in pieces: it breaks the connection after so many bytes, and continues where asked.
fn serve(
    content: Vec<u8>,
    piece: usize,
    version: Option<&'static str>,
) -> (String, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let calls = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&calls);
    thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut head = BufReader::new(stream.try_clone().unwrap()).lines();
            let mut from = 0;
            let target = head.next().unwrap().unwrap();
            for line in head.map_while(Result::ok).take_while(|line| !line.is_empty()) {
                if let Some(range) = line.strip_prefix("range: bytes=") {
                    from = range.trim_end_matches('-').parse().unwrap();
                }
            }
            counted.fetch_add(1, Ordering::Relaxed);
            if target.contains("/moved") {
                let _ = stream.write_all(
                    b"HTTP/1.1 302 Found\r\nLocation: /in.csv?key=1\r\nConnection: close\r\nContent-Length: 0\r\n\r\n",
                );
                continue;
            }
            let rest = &content[from..];
            let status = if from == 0 { "200 OK" } else { "206 Partial Content" };
            let tag = version.map_or(String::new(), |tag| format!("ETag: {tag}\r\n"));
            let head = format!(
                "HTTP/1.1 {status}\r\nConnection: close\r\nContent-Length: {}\r\n{tag}\r\n",
                rest.len()
            );
            let _ = stream.write_all(head.as_bytes());
            let _ = stream.write_all(&rest[..piece.min(rest.len())]);
        }
    });
    (format!("http://{address}"), calls)
}

#[test]
fn file_of_a_web_server_goes_on_after_broken_connections() {
    let rig = Rig::new();
    let text: String = (0..3000).map(|at| format!("question {at}\n")).collect();
    let content = format!("prompt\n{text}").into_bytes();
    let (server, calls) = serve(content.clone(), content.len() / 3 + 1, Some("\"v1\""));
    let run = rig.open(rig.settings(&format!("{server}/moved.csv"), "out.jsonl")).unwrap();
    assert_eq!(prompts(&run).len(), 3000);
    assert_eq!(calls.load(Ordering::Relaxed), 6, "three pieces, each after a redirect");
    drop(run);

    // Without a version nothing says that the rest belongs to the begin.
    let (server, _) = serve(content.clone(), content.len() / 2, None);
    let mut run = rig.open(rig.settings(&format!("{server}/in.csv"), "cut.jsonl")).unwrap();
    let (ended, count) = run.take_ended().unwrap();
    assert!((1000..2000).contains(&count), "{count}: {ended}");
}
