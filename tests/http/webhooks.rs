//! Webhooks: a batch's creator hears of its end, at least once, and nobody else is called.

use std::{
    io::{BufReader, Write as _},
    net::TcpListener,
    path::Path,
    process::{Command, Stdio},
    sync::{Arc, Mutex},
    time::Duration,
};

use serde_json::{Value, json};
use tritmill_servers::Signal;

use crate::{
    batches::lines,
    fleet::{Fleet, eventually},
    openai::PYTHON,
    rig::{Admin, Caller},
    standalone::alone,
};

/// What a receiver does with a call.
#[derive(Clone, Copy)]
enum Does {
    Answer(u16),
    HangUp,
    /// Holds the connection and says nothing.
    Wait,
}

/// A call that came.
#[derive(Debug, Clone)]
struct Call {
    headers: Value,
    body: String,
}

/// Somebody who is called.
struct Receiver {
    port: u16,
    calls: Arc<Mutex<Vec<Call>>>,
}

impl Receiver {
    /// Treats one call after the other as told, and those after the last like it.
    fn start(script: &'static [Does]) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let calls = Arc::new(Mutex::new(Vec::new()));
        let heard = Arc::clone(&calls);
        std::thread::spawn(move || {
            for (number, stream) in listener.incoming().enumerate() {
                let (heard, mut stream) = (Arc::clone(&heard), stream.unwrap());
                std::thread::spawn(move || {
                    heard.lock().unwrap().push(call(&mut BufReader::new(&stream)));
                    match script[number.min(script.len() - 1)] {
                        Does::Answer(status) => {
                            let head =
                                format!("HTTP/1.1 {status} X\r\nLocation: http://127.0.0.1/\r\n");
                            write!(stream, "{head}Content-Length: 0\r\n\r\n").unwrap();
                        }
                        Does::HangUp => {}
                        Does::Wait => std::thread::sleep(Duration::from_secs(3600)),
                    }
                });
            }
        });
        Self { port, calls }
    }

    fn url(&self, host: &str) -> String {
        format!("http://{host}:{}/hook?of=mine", self.port)
    }

    fn calls(&self) -> Vec<Call> {
        self.calls.lock().unwrap().clone()
    }
}

fn call(reader: &mut impl std::io::BufRead) -> Call {
    let mut headers = serde_json::Map::new();
    let mut line = String::new();
    reader.read_line(&mut line).unwrap();
    assert_eq!(line.trim_end(), "POST /hook?of=mine HTTP/1.1");
    loop {
        line.clear();
        reader.read_line(&mut line).unwrap();
        let Some((name, value)) = line.trim_end().split_once(": ") else { break };
        headers.insert(name.to_lowercase(), json!(value));
    }
    let length = headers["content-length"].as_str().unwrap().parse().unwrap();
    let mut body = vec![0; length];
    reader.read_exact(&mut body).unwrap();
    Call { headers: headers.into(), body: String::from_utf8(body).unwrap() }
}

/// Asks for a batch whose end is told at this address.
fn ask(caller: &Caller, url: &str) -> Value {
    let file = caller.upload(lines(2).as_bytes()).json()["id"].clone();
    let asked = json!({
        "input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": "1h",
        "webhook": { "url": url },
    });
    caller.post("/v1/batches", &asked).json()
}

fn webhook(caller: &Caller, batch: &Value) -> Value {
    let id = batch["id"].as_str().unwrap();
    caller.get(&format!("/v1/batches/{id}")).json()["webhook"].clone()
}

/// The program on one file, whose webhooks may call this machine.
fn service(folder: &Path) -> Admin {
    let words = ["standalone", "--json", "--threads", "1", "--api", "127.0.0.1:0"];
    Admin::of(alone(folder, &[&words[..], &["--webhook-allow-private"]].concat()))
}

/// Whether the openai package takes a call for one of its own.
fn is_signed(call: &Call, secret: &str) -> bool {
    let code = "import json, sys, openai\n\
        given = json.load(sys.stdin)\n\
        client = openai.OpenAI(api_key='x', webhook_secret=given['secret'])\n\
        event = client.webhooks.unwrap(given['body'], given['headers'])\n\
        assert event.type == 'batch.completed' and event.data.id.startswith('batch_'), event\n";
    let mut python = Command::new(PYTHON);
    python.args(["-c", code]).stdin(Stdio::piped()).stderr(Stdio::null());
    let mut python = python.spawn().unwrap();
    let given = json!({ "secret": secret, "body": call.body, "headers": call.headers });
    python.stdin.take().unwrap().write_all(given.to_string().as_bytes()).unwrap();
    python.wait().unwrap().success()
}

#[test]
fn the_end_is_told_signed_and_again_until_it_is_heard() {
    let folder = tempfile::tempdir().unwrap();
    let service = service(folder.path());
    let caller = service.first();
    let receiver = Receiver::start(&[Does::Answer(302), Does::HangUp, Does::Answer(204)]);
    let batch = ask(&caller, &receiver.url("127.0.0.1"));
    let secret = batch["webhook"]["secret"].as_str().unwrap().to_owned();
    assert!(secret.starts_with("whsec_"), "{batch}");
    eventually("it is heard", || webhook(&caller, &batch)["status"] == "delivered");
    let known = webhook(&caller, &batch);
    assert_eq!((&known["attempts"], &known["error"]), (&json!(3), &Value::Null), "{known}");
    assert!(known.get("secret").is_none(), "it is shown once");
    let calls = receiver.calls();
    assert_eq!(calls.len(), 3, "no redirect is followed");
    for call in &calls {
        let body: Value = serde_json::from_str(&call.body).unwrap();
        assert_eq!((&body["type"], &body["data"]["id"]), (&json!("batch.completed"), &batch["id"]));
        assert_eq!(body["data"]["request_counts"]["completed"], 2);
        assert_eq!(call.headers["webhook-id"], body["id"], "the same each time");
        assert!(!call.body.contains(&secret));
    }
    if !Path::new(PYTHON).exists() {
        eprintln!("SKIPPED: no openai package at {PYTHON}; cargo xtask test installs it");
        return;
    }
    let other = format!("whsec_{}", "A".repeat(44));
    for call in &calls {
        assert!(is_signed(call, &secret) && !is_signed(call, &other));
    }
}

#[test]
fn a_call_that_an_admin_died_in_is_made_again_by_another() {
    let fleet = Fleet::start();
    let _worker = fleet.worker(&[]);
    let admins = [0, 1].map(|_| Admin::start(&fleet, &["--webhook-allow-private"]));
    let key = admins.iter().find_map(|admin| admin.first_key.clone()).unwrap();
    let receiver = Receiver::start(&[Does::Wait, Does::Answer(200)]);
    let batch = ask(&admins[0].with(&key), &receiver.url("127.0.0.1"));
    eventually("it is called", || receiver.calls().len() == 1);
    let owner = fleet.sql("SELECT owner FROM batches");
    let pid = |admin: &Admin| format!("-{}-", admin.pid());
    let dies = usize::from(!owner.contains(&pid(&admins[0])));
    assert!(owner.contains(&pid(&admins[dies])), "{owner}");
    admins[dies].signal(Signal::Kill);
    let caller = admins[1 - dies].with(&key);
    eventually("the other calls", || webhook(&caller, &batch)["status"] == "delivered");
    assert_eq!(receiver.calls().len(), 2);
    assert_eq!(
        receiver.calls()[0].headers["webhook-id"],
        receiver.calls()[1].headers["webhook-id"]
    );
}

#[test]
fn this_machine_and_its_networks_are_not_called() {
    let folder = tempfile::tempdir().unwrap();
    let words = ["standalone", "--json", "--threads", "1", "--api", "127.0.0.1:0"];
    let service = Admin::of(alone(folder.path(), &words));
    let caller = service.first();
    let receiver = Receiver::start(&[Does::Answer(200)]);
    for host in ["127.0.0.1", "[::1]", "169.254.169.254", "[::ffff:127.0.0.1]", "0.0.0.0"] {
        let refused = ask(&caller, &receiver.url(host));
        assert_eq!(refused["error"]["param"], "webhook.url", "{host}: {refused}");
    }
    // A name is looked up when it is called.
    let batch = ask(&caller, &receiver.url("localhost"));
    eventually("it was tried", || webhook(&caller, &batch)["attempts"].as_u64() > Some(0));
    let known = webhook(&caller, &batch);
    assert!(known["error"].as_str().unwrap().contains("not public"), "{known}");
    assert!(receiver.calls().is_empty());
}
