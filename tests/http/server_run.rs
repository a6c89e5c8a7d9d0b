//! `batch run --server` gives the answers of an embedded run over HTTP.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
    time::Duration,
};

use serde_json::{Value, json};
use tritmill_servers::{Port, Signal};

use crate::{
    batches::{by_name, embedded, lines},
    rig::Admin,
    standalone::alone,
};

/// A standalone service with a SQLite store, always at the same address.
struct Service {
    folder: tempfile::TempDir,
    _port: Port,
    listen: String,
    key: String,
    admin: Option<Admin>,
}

impl Service {
    fn start() -> Self {
        let port = Port::claim().unwrap();
        let listen = format!("127.0.0.1:{}", port.number());
        let folder = tempfile::tempdir().unwrap();
        let mut service = Self { folder, _port: port, listen, key: String::new(), admin: None };
        service.start_again();
        service.key = service.admin().first_key.clone().unwrap();
        service
    }

    fn start_again(&mut self) {
        self.admin = None;
        let words = ["standalone", "--json", "--threads", "1", "--api", &self.listen];
        self.admin = Some(Admin::run(alone(self.folder.path(), &words)));
    }

    fn admin(&self) -> &Admin {
        self.admin.as_ref().unwrap()
    }

    /// `batch run` of a file with this service.
    fn command(&self, input: &Path, output: &Path) -> Command {
        self.command_to(&format!("http://{}", self.listen), input, output)
    }

    /// `batch run` of a file with the server at this URL.
    fn command_to(&self, server: &str, input: &Path, output: &Path) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tritmill"));
        command.args(["batch", "run", "--json"]).arg(input).arg("-o").arg(output);
        command.args(["--server", server]);
        command.env("TRITMILL_KEY", &self.key).stdin(Stdio::null());
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    fn run(&self, input: &Path, output: &Path) -> Output {
        self.command(input, output).output().unwrap()
    }

    /// Returns the number of items in a list of the API.
    fn count(&self, path: &str) -> usize {
        self.admin().with(&self.key).get(path).json()["data"].as_array().unwrap().len()
    }
}

fn paths(folder: &Path) -> [PathBuf; 2] {
    ["in.jsonl", "out.jsonl"].map(|name| folder.join(name))
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn read(path: &Path) -> Vec<Value> {
    let text = fs::read_to_string(path).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn every_line_is_answered_once() {
    let service = Service::start();
    let folder = tempfile::tempdir().unwrap();
    let [input, output] = paths(folder.path());
    let good = lines(30);
    let once = json!({ "custom_id": "once", "method": "POST", "url": "/v1/completions",
        "body": { "prompt": "Paid", "max_tokens": 3, "seed": 1 } });
    let warm = json!({ "custom_id": "warm", "method": "POST", "url": "/v1/completions",
        "body": { "prompt": "Paid", "temperature": "warm" } });
    let (plain, first) = (json!({ "prompt": "Paid on the 3rd of March, 2024" }), lines(1));
    let other = json!({ "custom_id": "other", "method": "POST", "url": "/v1/messages",
        "body": { "model": "none", "max_tokens": 3, "messages": [{ "role": "user", "content": "x" }] } });
    let content = format!("{plain}\n\n{{\n{good}{once}\n{first}{warm}\n{other}\n");
    fs::write(&input, &content).unwrap();
    let run = service.run(&input, &output);
    assert_eq!(run.status.code(), Some(2), "{}", said(&run));
    let summary: Value = serde_json::from_slice(&run.stdout).unwrap();
    assert_eq!(
        (&summary["lines"], &summary["completed"], &summary["failed"]),
        (&json!(36), &json!(32), &json!(4))
    );
    assert!(summary["tokens"].as_u64().unwrap() > 0);
    let answers = read(&output);
    let text = |line: &Value| line["response"]["body"]["choices"][0]["message"]["content"].clone();
    assert_eq!((answers.len(), text(&answers[0])), (36, json!("2024-03-03")));
    assert!(summary["prompt_tokens"].as_u64().unwrap() > 0, "{summary}");
    assert_eq!(answers[0]["custom_id"], "line-1", "output has the input order");
    let error = |line: &Value| (line["error"]["code"].clone(), line["error"]["line"].clone());
    assert_eq!(error(&answers[1]), (json!("invalid_json"), json!(3)));
    assert_eq!(by_name(&answers[2..32]), embedded(&good), "equal to the embedded run");
    assert_eq!(answers[32]["response"]["body"]["object"], "text_completion");
    assert_eq!(error(&answers[33]), (json!("duplicate_custom_id"), json!(35)));
    assert_eq!(answers[34]["response"]["body"]["error"]["param"], "temperature");
    let unserved = &answers[35]["response"];
    assert_eq!(
        (&unserved["status_code"], &answers[35]["custom_id"]),
        (&json!(404), &json!("other"))
    );
    assert_eq!(
        unserved["body"]["error"]["type"], "not_found_error",
        "it has the shape of messages"
    );
    assert_eq!(service.count("/v1/batches"), 2, "one batch for each endpoint");

    // A second run sends nothing and restores a changed output.
    let whole = fs::read(&output).unwrap();
    for change in [None, Some("torn")] {
        if let Some(change) = change {
            fs::write(&output, change).unwrap();
        }
        let again = service.run(&input, &output);
        let summary: Value = serde_json::from_slice(&again.stdout).unwrap();
        assert_eq!((again.status.code(), &summary["completed"]), (Some(2), &json!(32)));
        assert_eq!(fs::read(&output).unwrap(), whole);
    }
    assert_eq!(service.count("/v1/batches"), 2);
    fs::write(&input, lines(3)).unwrap();
    let other = service.run(&input, &output);
    assert!(said(&other).contains("--restart"), "{}", said(&other));
    let mut restarted = service.command(&input, &output);
    assert_eq!(restarted.arg("--restart").output().unwrap().status.code(), Some(0));
    assert_eq!(read(&output).len(), 3);
}

#[test]
fn killed_runs_send_nothing_twice() {
    let mut service = Service::start();
    let folder = tempfile::tempdir().unwrap();
    let [input, output] = paths(folder.path());
    let content = lines(1500);
    fs::write(&input, &content).unwrap();
    // Kills at many moments of the first second; each run resumes the one before.
    for kill in 0..16 {
        let mut child = service.command(&input, &output).spawn().unwrap();
        std::thread::sleep(Duration::from_millis(20 + kill * 47 % 600));
        let _ = child.kill();
        child.wait().unwrap();
        if kill % 5 == 4 {
            service.admin().signal(Signal::Kill);
            service.start_again();
        }
    }
    // The server is killed during this run. A run that starts too late to connect ends with an error.
    let mut delays = [300, 1_000, 5_000].into_iter().map(Duration::from_millis);
    loop {
        let child = service.command(&input, &output).spawn().unwrap();
        std::thread::sleep(delays.next().expect("a run connects within seconds"));
        service.admin().signal(Signal::Kill);
        std::thread::sleep(Duration::from_millis(700));
        service.start_again();
        let run = child.wait_with_output().unwrap();
        if run.status.code() == Some(0) {
            break;
        }
        assert!(said(&run).starts_with("error: cannot connect"), "{}", said(&run));
    }
    let answers = read(&output);
    assert_eq!(by_name(&answers), embedded(&content));
    assert_eq!(service.count("/v1/batches"), 1, "one batch");
    assert_eq!(service.count("/v1/files?purpose=batch"), 1, "one file");
    let left = fs::read_dir(folder.path().join("out.jsonl.tritmill-server")).unwrap().count();
    assert_eq!(left, 1, "only the state file is left");
}

#[test]
fn run_killed_at_each_step_creates_one_batch() {
    const RUNS: u64 = 20;
    let service = Service::start();
    let folder = tempfile::tempdir().unwrap();
    let [input, _] = paths(folder.path());
    fs::write(&input, lines(8)).unwrap();
    for run in 0..RUNS {
        let output = folder.path().join(format!("out-{run}.jsonl"));
        let mut child = service.command(&input, &output).spawn().unwrap();
        std::thread::sleep(Duration::from_millis(4 + run * 9));
        let _ = child.kill();
        child.wait().unwrap();
        assert_eq!(service.run(&input, &output).status.code(), Some(0));
        assert_eq!(read(&output).len(), 8);
    }
    assert_eq!(service.count("/v1/batches?limit=100"), RUNS as usize);
    assert_eq!(service.count("/v1/files?purpose=batch"), RUNS as usize);
}

#[test]
fn errors_are_one_line_without_the_key() {
    let service = Service::start();
    let folder = tempfile::tempdir().unwrap();
    let [input, output] = paths(folder.path());
    fs::write(&input, lines(2)).unwrap();
    let refused = |mut command: Command, message: &str| {
        let run = command.output().unwrap();
        let said = said(&run);
        assert_eq!(run.status.code(), Some(1), "{said}");
        assert!(said.contains(message) && !said.contains("panicked"), "{said}");
        assert_eq!(said.lines().filter(|line| line.starts_with("error: ")).count(), 1, "{said}");
        assert!(!said.contains(&service.key), "{said}");
    };
    let keyed = |key: &str| {
        let mut command = service.command(&input, &output);
        command.env("TRITMILL_KEY", key);
        command
    };
    refused(keyed("tm-0"), "401 invalid_api_key");
    refused(keyed("two\nlines"), "not allowed in an HTTP header");
    refused(keyed(""), "--key");
    let to = |server: &str| service.command_to(server, &input, &output);
    refused(to("http://127.0.0.1:1"), "cannot connect to 127.0.0.1:1");
    refused(to("here"), "'here' is not an http:// or https:// URL");
    refused(to("ftp://x"), "'ftp://x' is not an http:// or https:// URL");
    refused(to(&format!("https://{}", service.listen)), "no secure connection");
    refused(to(&format!("http://{}/other", service.listen)), "404 unknown_url");
    let mut other = service.command(&input, &output);
    other.args(["--ca", "/nowhere.pem"]);
    refused(other, "/nowhere.pem");
    let unknown = lines(1).replace("\"model\":\"demo\"", "\"model\":\"none\"");
    fs::write(&input, unknown).unwrap();
    let mut other = service.command(&input, &folder.path().join("other.jsonl"));
    let run = other.output().unwrap();
    assert!(said(&run).contains("serves no model 'none': it serves demo"), "{}", said(&run));
}
