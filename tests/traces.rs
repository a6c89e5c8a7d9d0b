//! The export of traces by real processes to a collector of the test's own.

#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "a failed step of a test is a failed test")]

#[path = "support/collector.rs"]
mod collector;
#[allow(dead_code, reason = "shared with other tests")]
#[path = "support/fleet.rs"]
mod fleet;

use std::{
    io::{Read as _, Write as _},
    net::{TcpListener, TcpStream},
    path::Path,
    process::{Command, Stdio},
    time::Duration,
};

use collector::{Collector, Received};
use fleet::{Fleet, WorkerProcess, eventually, program, questions};
use serde_json::{Value, json};
use tritmill_servers::Signal;

const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const PARENT: &str = "00f067aa0ba902b7";
/// Name of the SDK's thread, as the kernel cuts it.
const THREAD: &str = "OpenTelemetry.T";

fn traceparent() -> String {
    format!("00-{TRACE}-{PARENT}-01")
}

fn worker(fleet: &Fleet) -> Command {
    fleet.command(&["worker", "--json", "--threads", "1", "--lease", "2", "--drain", "5"])
}

/// Submits jobs and waits until they are answered.
fn answer(fleet: &Fleet, jobs: usize) {
    let folder = tempfile::tempdir().unwrap();
    let input = folder.path().join("in");
    std::fs::write(&input, questions(jobs)).unwrap();
    let submit = ["submit", input.to_str().unwrap(), "--traceparent", &traceparent()];
    let (code, submitted, stderr) = fleet.run(&submit);
    assert_eq!(code, Some(0), "{stderr}");
    let id = |line: &str| {
        let line: Value = serde_json::from_str(line).unwrap();
        line["id"].as_str().unwrap().to_owned()
    };
    let ids: Vec<String> = submitted.lines().map(id).collect();
    assert_eq!(ids.len(), jobs);
    let mut watch = vec!["watch", "--timeout", "120"];
    watch.extend(ids.iter().map(String::as_str));
    let (code, _, stderr) = fleet.run(&watch);
    assert_eq!(code, Some(0), "{stderr}");
}

/// Whether a process has the thread of the exporter.
fn exports(pid: u32) -> bool {
    let tasks = Path::new("/proc").join(pid.to_string()).join("task");
    std::fs::read_dir(tasks).unwrap().any(|task| {
        let name = std::fs::read_to_string(task.unwrap().path().join("comm"));
        // A thread may end meanwhile.
        name.is_ok_and(|name| name.starts_with(THREAD))
    })
}

/// Posts a chat request with a `traceparent`; returns the status.
fn chat(listen: &str, key: &str) -> u16 {
    let body = json!({
        "model": "demo", "max_tokens": 16, "temperature": 0,
        "messages": [{ "role": "user", "content": "Paid on the 3rd of March, 2024" }],
    })
    .to_string();
    let mut stream = TcpStream::connect(listen).unwrap();
    write!(
        stream,
        "POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\
         Authorization: Bearer {key}\r\nTraceparent: {}\r\nContent-Type: application/json\r\n\
         Content-Length: {}\r\n\r\n{body}",
        traceparent(),
        body.len()
    )
    .unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer.split(' ').nth(1).unwrap().parse().unwrap()
}

#[test]
fn spans_of_a_request_and_its_job_are_in_the_callers_trace() {
    let collector = Collector::start();
    let folder = tempfile::tempdir().unwrap();
    let mut command = program(&["standalone", "--json", "--threads", "1", "--api", "127.0.0.1:0"]);
    command
        .arg("--store")
        .arg(folder.path().join("store"))
        .env("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url())
        .env("OTEL_EXPORTER_OTLP_HEADERS", "x-token=letter")
        .env("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=tests")
        .env("OTEL_BSP_SCHEDULE_DELAY", "50")
        .stderr(Stdio::null());
    let service = WorkerProcess::start(command);
    let text = |name: &str| service.ready[name].as_str().unwrap().to_owned();
    assert_eq!(chat(&text("api"), &text("first_key")), 200);
    eventually("both spans arrive", || {
        let received = collector.received();
        received.named("request").count() == 1 && received.named("job").count() == 1
    });
    let received = collector.received();
    let request = received.named("request").next().unwrap();
    assert_eq!((request.trace.as_str(), request.parent.as_str()), (TRACE, PARENT));
    assert_eq!(request.attributes["http.route"], "/v1/chat/completions");
    assert_eq!(request.attributes["http.response.status_code"], "200");
    let job = received.named("job").next().unwrap();
    assert_eq!((&job.trace, &job.parent), (&request.trace, &request.id));
    assert_eq!(job.attributes["outcome"], "completed");
    assert!(job.attributes["completion_tokens"].parse::<u64>().unwrap() > 0);
    assert!(job.attributes.contains_key("first_token_ms"));
    assert_eq!(job.resource["service.name"], "tritmill");
    assert_eq!(job.resource["deployment.environment.name"], "tests");
    assert!(!format!("{received:?}").contains("Paid on the 3rd"), "no prompt in spans");
    let Received { heads, .. } = &received;
    assert!(heads.iter().all(|head| head["x-token"] == "letter"), "{heads:?}");
    assert!(heads.iter().all(|head| head["content-type"] == "application/x-protobuf"));
}

#[test]
fn worker_sends_its_last_spans_before_it_ends() {
    let (collector, fleet) = (Collector::start(), Fleet::start());
    let mut command = worker(&fleet);
    command
        .env("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url())
        .env("OTEL_SERVICE_NAME", "a worker")
        // Longer than the test.
        .env("OTEL_BSP_SCHEDULE_DELAY", "600000")
        .stderr(Stdio::null());
    let mut worker = WorkerProcess::start(command);
    assert!(exports(worker.pid()));
    answer(&fleet, 3);
    assert_eq!(collector.received().spans.len(), 0, "nothing is due");
    worker.signal(Signal::Terminate);
    assert_eq!(worker.wait(Duration::from_secs(30)), Some(0));
    let received = collector.received();
    assert_eq!(received.named("job").count(), 3);
    for job in received.named("job") {
        assert_eq!((job.trace.as_str(), job.parent.as_str()), (TRACE, PARENT));
        assert_eq!(job.resource["service.name"], "a worker");
    }
}

/// Runs a worker with this collector until it has answered; returns its log.
fn log_with_collector(endpoint: &str) -> String {
    let fleet = Fleet::start();
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("log");
    let mut command = worker(&fleet);
    command
        .env("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        .env("OTEL_BSP_SCHEDULE_DELAY", "20")
        .env("OTEL_BSP_MAX_QUEUE_SIZE", "8")
        .env("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "4")
        .env("OTEL_EXPORTER_OTLP_TIMEOUT", "400")
        .stderr(std::fs::File::create(&log).unwrap());
    let mut worker = WorkerProcess::start(command);
    // More than fit into the queue.
    answer(&fleet, 200);
    assert_eq!(worker.get("/readyz").0, 200);
    worker.signal(Signal::Terminate);
    let ended = worker.wait(Duration::from_secs(12));
    let log = std::fs::read_to_string(log).unwrap();
    assert_eq!(ended, Some(0), "{log}");
    log
}

#[test]
fn collector_that_is_away_costs_one_line() {
    let log = log_with_collector("http://127.0.0.1:1");
    assert_eq!(log.matches("spans did not reach the collector").count(), 1, "{log}");
    assert!(log.contains("refused"), "{log}");
}

#[test]
fn collector_that_never_answers_costs_one_line() {
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let log = log_with_collector(&format!("http://{}", silent.local_addr().unwrap()));
    assert_eq!(log.matches("spans did not reach the collector").count(), 1, "{log}");
    assert!(log.contains("in time") || log.contains("no answer"), "{log}");
}

#[test]
fn without_an_endpoint_nothing_is_started() {
    let fleet = Fleet::start();
    let start = |name: &str, value: &str| {
        let mut command = worker(&fleet);
        command.env(name, value).stderr(Stdio::null());
        WorkerProcess::start(command)
    };
    let off = [("OTEL_SERVICE_NAME", "x"), ("OTEL_EXPORTER_OTLP_ENDPOINT", "")];
    for (name, value) in off {
        assert!(!exports(start(name, value).pid()), "{name}={value}");
    }
    // A value that cannot be used does not keep a service from starting.
    for wrong in ["ftp://collector", "http://collector:99999", "\u{1}"] {
        let worker = start("OTEL_EXPORTER_OTLP_ENDPOINT", wrong);
        assert_eq!(worker.get("/healthz").0, 200, "{wrong}");
    }
}
