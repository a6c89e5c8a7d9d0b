//! `tritmill workers deletion-costs` with a real database and a Kubernetes API of the test.

#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "a failed step of a test is a failed test")]

#[allow(dead_code, reason = "shared with other tests")]
#[path = "support/fleet.rs"]
mod fleet;

use std::{
    fs,
    io::{BufRead as _, BufReader, ErrorKind, Read as _, Write as _},
    net::{TcpListener, TcpStream},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use fleet::Fleet;
use serde_json::{Value, json};

/// Longest wait for a request, and for its next bytes.
const ARRIVES_WITHIN: Duration = Duration::from_secs(30);

/// A request as it arrived.
struct Call {
    head: String,
    body: Value,
}

/// Returns the next connection; fails if none comes.
fn accept(listener: &TcpListener) -> TcpStream {
    let started = Instant::now();
    loop {
        match listener.accept() {
            Ok((stream, _)) => {
                stream.set_nonblocking(false).unwrap();
                stream.set_read_timeout(Some(ARRIVES_WITHIN)).unwrap();
                return stream;
            }
            Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock, "{error}"),
        }
        assert!(started.elapsed() < ARRIVES_WITHIN, "no request");
        thread::sleep(Duration::from_millis(10));
    }
}

/// Answers these requests in order, each with a status; returns the URL, and the requests.
fn api(statuses: Vec<&'static str>) -> (String, JoinHandle<Vec<Call>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let answer = move |status| {
        let mut stream = accept(&listener);
        let mut reader = BufReader::new(stream.try_clone().unwrap());
        let mut head = String::new();
        while !head.ends_with("\r\n\r\n") {
            assert!(reader.read_line(&mut head).unwrap() > 0, "{head}");
        }
        let head = head.to_lowercase();
        let length = head.lines().find_map(|line| line.strip_prefix("content-length: ")).unwrap();
        let mut body = vec![0; length.parse().unwrap()];
        reader.read_exact(&mut body).unwrap();
        write!(stream, "HTTP/1.1 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            .unwrap();
        Call { head, body: serde_json::from_slice(&body).unwrap() }
    };
    (url, thread::spawn(move || statuses.into_iter().map(answer).collect()))
}

/// Adds a worker with a heartbeat of this age.
fn add_worker(fleet: &Fleet, host: &str, running: u32, silent_s: u32) {
    fleet.sql(&format!(
        "WITH clock AS (SELECT (extract(epoch FROM now()) * 1000)::bigint AS now)
         INSERT INTO workers (owner, model, format, host, pid, started_at, seen_at, running, slots,
            draining, tokens_per_s)
         SELECT '{host}-1-2', 'demo', 'i2_s', '{host}', 1, now, now - {silent_s} * 1000, {running}, 40,
            false, 10 FROM clock"
    ));
}

#[test]
fn pods_of_workers_get_their_running_jobs_as_deletion_costs() {
    let fleet = Fleet::start();
    for (host, running, silent_s) in [
        ("busy", 7, 0),
        ("idle", 0, 0),
        ("lost", 3, 3600),
        ("no/pod", 1, 0),
        ("other-cluster", 2, 0),
    ] {
        add_worker(&fleet, host, running, silent_s);
    }
    let account = tempfile::tempdir().unwrap();
    fs::write(account.path().join("namespace"), "batch").unwrap();
    fs::write(account.path().join("token"), "a-token\n").unwrap();
    let account = account.path().to_str().unwrap();
    let run = |url: &str| {
        fleet.run(&["workers", "deletion-costs", "--kubernetes", url, "--account", account])
    };

    let (url, calls) = api(vec!["200 OK", "200 OK", "404 Not Found"]);
    let (code, stdout, stderr) = run(&url);
    assert_eq!((code, stdout.as_str()), (Some(0), "busy 7\nidle 0\n"), "{stderr}");
    let calls = calls.join().unwrap();
    for (call, (pod, cost)) in
        calls.iter().zip([("busy", "7"), ("idle", "0"), ("other-cluster", "2")])
    {
        let path = format!("patch /api/v1/namespaces/batch/pods/{pod} http/1.1\r\n");
        assert!(call.head.starts_with(&path), "{}", call.head);
        assert!(call.head.contains("authorization: bearer a-token\r\n"), "{}", call.head);
        assert!(
            call.head.contains("content-type: application/merge-patch+json\r\n"),
            "{}",
            call.head
        );
        let annotations = json!({ "controller.kubernetes.io/pod-deletion-cost": cost });
        assert_eq!(call.body, json!({ "metadata": { "annotations": annotations } }));
    }

    // One pod that fails keeps no other from its cost.
    let (url, calls) = api(vec!["500 Internal Server Error", "200 OK", "404 Not Found"]);
    let (code, stdout, stderr) = run(&url);
    assert_eq!((code, stdout.as_str()), (Some(1), "idle 0\n"), "{stderr}");
    assert!(stderr.contains("pod busy") && stderr.contains("1 of 3 pods"), "{stderr}");
    assert_eq!(calls.join().unwrap().len(), 3);

    let (url, _) = api(vec!["403 Forbidden"]);
    let (code, _, stderr) = run(&url);
    assert_eq!(code, Some(1));
    assert!(stderr.contains("pod busy") && stderr.contains("may not patch pods"), "{stderr}");
}
