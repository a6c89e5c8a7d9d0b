//! Webhooks: delivered at least once at the end of a batch, signed, and never to private addresses.

use std::{
    io::{BufReader, Read as _, Write as _},
    net::TcpListener,
    path::Path,
    process::{Command, Stdio},
    sync::{Arc, Mutex},
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

/// What a receiver does with a request.
#[derive(Clone, Copy)]
enum Reaction {
    Answer(u16),
    HangUp,
    /// Keeps the connection open without an answer.
    Wait,
}

/// A request that was received.
#[derive(Debug, Clone)]
struct Call {
    headers: Value,
    body: String,
}

/// An HTTP server that records webhook requests.
struct Receiver {
    port: u16,
    calls: Arc<Mutex<Vec<Call>>>,
    /// Connections that wait for an answer: now, and at most so far.
    waiting: Arc<Mutex<(usize, usize)>>,
}

impl Receiver {
    /// Starts a server; request `n` is handled as entry `n` of the script says, later ones as the last.
    fn start(script: &'static [Reaction]) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let calls = Arc::new(Mutex::new(Vec::new()));
        let received = Arc::clone(&calls);
        let waiting = Arc::<Mutex<(usize, usize)>>::default();
        let waits = Arc::clone(&waiting);
        std::thread::spawn(move || {
            for (number, stream) in listener.incoming().enumerate() {
                let (received, waits) = (Arc::clone(&received), Arc::clone(&waits));
                let mut stream = stream.unwrap();
                std::thread::spawn(move || {
                    received.lock().unwrap().push(call(&mut BufReader::new(&stream)));
                    match script[number.min(script.len() - 1)] {
                        Reaction::Answer(status) => {
                            let head =
                                format!("HTTP/1.1 {status} X\r\nLocation: http://127.0.0.1/\r\n");
                            write!(stream, "{head}Content-Length: 0\r\n\r\n").unwrap();
                        }
                        Reaction::HangUp => {}
                        Reaction::Wait => {
                            let mut open = waits.lock().unwrap();
                            open.0 += 1;
                            open.1 = open.1.max(open.0);
                            drop(open);
                            // Until the client gives up.
                            let _ = stream.read(&mut [0]);
                            waits.lock().unwrap().0 -= 1;
                        }
                    }
                });
            }
        });
        Self { port, calls, waiting }
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

/// Creates a batch with a webhook at this URL.
fn create(caller: &Caller, url: &str) -> Value {
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

/// Returns a standalone service that may call webhooks on this machine.
fn service(folder: &Path) -> Admin {
    let words = ["standalone", "--json", "--threads", "1", "--api", "127.0.0.1:0"];
    Admin::run(alone(folder, &[&words[..], &["--webhook-allow-private"]].concat()))
}

/// Returns whether the openai package accepts the signature of a request.
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
fn webhook_is_signed_and_retried_until_delivered() {
    let folder = tempfile::tempdir().unwrap();
    let service = service(folder.path());
    let caller = service.first();
    let receiver =
        Receiver::start(&[Reaction::Answer(302), Reaction::HangUp, Reaction::Answer(204)]);
    let batch = create(&caller, &receiver.url("127.0.0.1"));
    let secret = batch["webhook"]["secret"].as_str().unwrap().to_owned();
    assert!(secret.starts_with("whsec_"), "{batch}");
    eventually("the webhook is delivered", || webhook(&caller, &batch)["status"] == "delivered");
    let known = webhook(&caller, &batch);
    assert_eq!((&known["attempts"], &known["error"]), (&json!(3), &Value::Null), "{known}");
    assert!(known.get("secret").is_none(), "the secret is shown once");
    let calls = receiver.calls();
    assert_eq!(calls.len(), 3, "no redirect is followed");
    for call in &calls {
        let body: Value = serde_json::from_str(&call.body).unwrap();
        assert_eq!((&body["type"], &body["data"]["id"]), (&json!("batch.completed"), &batch["id"]));
        assert_eq!(body["data"]["request_counts"]["completed"], 2);
        assert_eq!(call.headers["webhook-id"], body["id"], "the id is the same for every attempt");
        assert!(!call.body.contains(&secret));
    }
    if !Path::new(PYTHON).exists() {
        return tritmill_servers::skip("the openai package (cargo xtask test installs it)");
    }
    let other = format!("whsec_{}", "A".repeat(44));
    for call in &calls {
        assert!(is_signed(call, &secret) && !is_signed(call, &other));
    }
}

#[test]
fn batches_without_a_webhook_call_that_of_their_tenant() {
    let folder = tempfile::tempdir().unwrap();
    let service = service(folder.path());
    let caller = service.first();
    let receiver = Receiver::start(&[Reaction::Answer(200)]);
    let own = Receiver::start(&[Reaction::Answer(200)]);
    assert_eq!(caller.get("/v1/webhook").json()["url"], Value::Null);
    assert_eq!(caller.delete("/v1/webhook").status, 404);
    let refused = caller.post("/v1/webhook", &json!({ "url": "ftp://a.example/" }));
    assert_eq!(refused.json()["error"]["param"], "url", "{}", refused.text());
    let set = caller.post("/v1/webhook", &json!({ "url": receiver.url("127.0.0.1") })).json();
    assert!(set["secret"].as_str().unwrap().starts_with("whsec_"), "{set}");
    let shown = caller.get("/v1/webhook").json();
    assert_eq!(
        (&shown["url"], shown.get("secret")),
        (&set["url"], None),
        "the secret is shown once"
    );
    let id = caller.batch(lines(1).as_bytes(), "1h");
    let batch = caller.get(&format!("/v1/batches/{id}")).json();
    assert_eq!((&batch["webhook"]["url"], batch["webhook"].get("secret")), (&set["url"], None));
    eventually("it is called", || webhook(&caller, &batch)["status"] == "delivered");
    let notices = caller.get("/v1/notices").json();
    let last = &notices["data"][0];
    assert_eq!(
        (&last["type"], &last["status"], &last["batch_id"], &last["receiver"]),
        (&json!("batch.completed"), &json!("delivered"), &batch["id"], &set["url"]),
        "{notices}"
    );
    // One of its own comes first, and a removed one is called no more.
    let other = create(&caller, &own.url("127.0.0.1"));
    eventually("its own is called", || webhook(&caller, &other)["status"] == "delivered");
    assert_eq!(caller.delete("/v1/webhook").status, 200);
    let id = caller.batch(lines(1).as_bytes(), "1h");
    assert_eq!(caller.finished(&id)["webhook"], Value::Null);
    assert_eq!((receiver.calls().len(), own.calls().len()), (1, 1));
}

#[test]
fn receiver_is_told_of_chosen_events_alone() {
    let folder = tempfile::tempdir().unwrap();
    let service = service(folder.path());
    let caller = service.first();
    let receiver = Receiver::start(&[Reaction::Answer(200)]);
    let url = receiver.url("127.0.0.1");
    let refused = caller.post("/v1/webhook", &json!({ "url": url, "events": ["batch.done"] }));
    assert_eq!(refused.json()["error"]["param"], "events[0]");
    assert!(refused.text().contains("batch.completed, batch.failed"), "{}", refused.text());
    let wanted = json!({ "url": url, "events": ["batch.paused", "budget.spent"] });
    let set = caller.post("/v1/webhook", &wanted).json();
    assert_eq!(set["events"], wanted["events"]);
    assert_eq!(caller.get("/v1/webhook").json()["events"], wanted["events"]);
    let asked = json!({
        "open": true, "endpoint": "/v1/chat/completions", "completion_window": "1h",
    });
    let batch = caller.post("/v1/batches", &asked).json();
    assert_eq!(batch["webhook"]["events"], wanted["events"]);
    let own = json!({ "url": url, "events": ["batch.cancelled"] });
    let create = |webhook: &Value| {
        let mut asked = asked.clone();
        asked["webhook"] = webhook.clone();
        caller.post("/v1/batches", &asked)
    };
    let budget = create(&json!({ "url": url, "events": ["budget.spent"] }));
    assert_eq!(budget.json()["error"]["param"], "webhook.events[0]", "{}", budget.text());
    let other = create(&own).json();
    assert_eq!(other["webhook"]["events"], own["events"]);
    for batch in [&batch, &other] {
        for what in ["pause", "resume", "cancel"] {
            let path = format!("/v1/batches/{}/{what}", batch["id"].as_str().unwrap());
            assert_eq!(caller.post(&path, &json!({})).status, 200);
        }
        caller.finished(batch["id"].as_str().unwrap());
    }
    eventually("both are told", || receiver.calls().len() == 2);
    let listed = caller.get("/v1/notices?order=asc").json();
    let told: Vec<&Value> =
        listed["data"].as_array().unwrap().iter().map(|notice| &notice["type"]).collect();
    assert_eq!(told, [&json!("batch.paused"), &json!("batch.cancelled")]);
}

#[test]
fn receiver_is_told_of_pauses_and_answers_410_to_hear_no_more() {
    let folder = tempfile::tempdir().unwrap();
    let service = service(folder.path());
    let caller = service.first();
    let receiver =
        Receiver::start(&[Reaction::Answer(200), Reaction::Answer(410), Reaction::Answer(200)]);
    let set = caller.post("/v1/webhook", &json!({ "url": receiver.url("127.0.0.1") }));
    assert_eq!(set.json()["status"], "active", "{}", set.text());
    let asked = json!({
        "open": true, "endpoint": "/v1/chat/completions", "completion_window": "1h",
    });
    let id = caller.post("/v1/batches", &asked).json()["id"].as_str().unwrap().to_owned();
    let act = |what: &str| caller.post(&format!("/v1/batches/{id}/{what}"), &json!({})).status;
    assert_eq!(act("pause"), 200);
    eventually("the pause is told", || receiver.calls().len() == 1);
    assert_eq!(act("resume"), 200);
    eventually("it is gone", || caller.get("/v1/webhook").json()["status"] == "gone");
    assert_eq!((act("pause"), receiver.calls().len()), (200, 2));
    let told: Vec<Value> =
        receiver.calls().iter().map(|call| serde_json::from_str(&call.body).unwrap()).collect();
    assert_eq!(
        (&told[0]["type"], &told[1]["type"]),
        (&json!("batch.paused"), &json!("batch.resumed"))
    );
    assert_eq!(
        (&told[0]["data"]["status"], &told[0]["data"]["id"]),
        (&json!("paused"), &json!(id))
    );
    assert!(told[0]["timestamp"].as_str().unwrap().ends_with('Z'), "{}", told[0]);
    let page = caller.get("/v1/notices?order=asc").json();
    let states: Vec<&str> =
        page["data"].as_array().unwrap().iter().map(|it| it["status"].as_str().unwrap()).collect();
    assert_eq!(states, ["delivered", "failed", "failed"], "{page}");
    let last = &page["data"][2];
    assert_eq!(last["error"], "not sent: it answered 410");
    assert_eq!(caller.post("/v1/notices/notice_0/redeliver", &json!({})).status, 404);
    let again = format!("/v1/notices/{}/redeliver", last["id"].as_str().unwrap());
    assert_eq!(caller.post(&again, &json!({})).json()["status"], "pending");
    eventually("it is told after all", || receiver.calls().len() == 3);
    assert_eq!(receiver.calls()[2].headers["webhook-id"], last["event_id"]);
    eventually("it is active", || caller.get("/v1/webhook").json()["status"] == "active");
    let metrics = caller.get("/metrics").text();
    for series in [
        "tritmill_admin_notice_attempts_total{channel=\"webhook\",result=\"delivered\"} 2",
        "tritmill_admin_notice_attempts_total{channel=\"webhook\",result=\"gone\"} 1",
        "tritmill_admin_notices_pending 0",
        "tritmill_admin_notice_receivers_failing 0",
    ] {
        assert!(metrics.contains(series), "{series}: {metrics}");
    }
}

#[test]
fn webhook_of_a_killed_admin_is_delivered_by_another() {
    let fleet = Fleet::start();
    let _worker = fleet.worker(&[]);
    let admins = [0, 1].map(|_| Admin::start(&fleet, &["--webhook-allow-private"]));
    let key = admins.iter().find_map(|admin| admin.first_key.clone()).unwrap();
    let receiver = Receiver::start(&[Reaction::Wait, Reaction::Answer(200)]);
    let batch = create(&admins[0].with(&key), &receiver.url("127.0.0.1"));
    eventually("the receiver is called", || receiver.calls().len() == 1);
    let owner = fleet.sql("SELECT owner FROM notices");
    let pid = |admin: &Admin| format!("-{}-", admin.pid());
    let killed = usize::from(!owner.contains(&pid(&admins[0])));
    assert!(owner.contains(&pid(&admins[killed])), "{owner}");
    admins[killed].signal(Signal::Kill);
    let caller = admins[1 - killed].with(&key);
    eventually("the other admin delivers", || webhook(&caller, &batch)["status"] == "delivered");
    assert_eq!(receiver.calls().len(), 2);
    assert_eq!(
        receiver.calls()[0].headers["webhook-id"],
        receiver.calls()[1].headers["webhook-id"]
    );
}

#[test]
fn host_that_hangs_delays_no_other_webhooks() {
    let folder = tempfile::tempdir().unwrap();
    let service = service(folder.path());
    let caller = service.first();
    let hanging = Receiver::start(&[Reaction::Wait]);
    let answering = Receiver::start(&[Reaction::Answer(200)]);
    let all: Vec<Value> = (0..20).map(|_| create(&caller, &hanging.url("127.0.0.1"))).collect();
    for batch in &all {
        caller.finished(batch["id"].as_str().unwrap());
    }
    let batch = create(&caller, &answering.url("127.0.0.1"));
    eventually("the webhook is delivered", || webhook(&caller, &batch)["status"] == "delivered");
    let most = hanging.waiting.lock().unwrap().1;
    assert!((1..=2).contains(&most), "{most} calls of a host at once");
    // Most of its webhooks still wait for their first call.
    let called = all.iter().filter(|batch| webhook(&caller, batch)["attempts"] != 0).count();
    assert!(called < all.len(), "all {called} were called first");
}

#[test]
fn private_addresses_are_not_called() {
    let folder = tempfile::tempdir().unwrap();
    let words = ["standalone", "--json", "--threads", "1", "--api", "127.0.0.1:0"];
    let service = Admin::run(alone(folder.path(), &words));
    let caller = service.first();
    let receiver = Receiver::start(&[Reaction::Answer(200)]);
    for host in ["127.0.0.1", "[::1]", "169.254.169.254", "[::ffff:127.0.0.1]", "0.0.0.0"] {
        let refused = create(&caller, &receiver.url(host));
        assert_eq!(refused["error"]["param"], "webhook.url", "{host}: {refused}");
    }
    // A host name is resolved at delivery.
    let batch = create(&caller, &receiver.url("localhost"));
    eventually("delivery was attempted", || {
        webhook(&caller, &batch)["attempts"].as_u64() > Some(0)
    });
    let known = webhook(&caller, &batch);
    assert!(known["error"].as_str().unwrap().contains("not public"), "{known}");
    assert!(receiver.calls().is_empty());
}
