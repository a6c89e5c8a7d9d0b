//! Strangers at the front door: clients that hold connections, send or read slowly, or ask too often.

use std::{
    io::{ErrorKind, Read as _, Write as _},
    net::TcpStream,
    process::Command,
    time::{Duration, Instant},
};

use serde_json::json;

use crate::{
    fleet::{Fleet, WorkerProcess, eventually, series},
    rig::{Admin, Answer, Caller, OURS, key},
};

/// Limit for an answer while strangers hold connections, on a busy machine.
const SOON: Duration = Duration::from_secs(2);

/// Raises the limit of open files of this process; returns false and skips the test if it is too low.
fn may_open(files: u64) -> bool {
    let given = rlimit::increase_nofile_limit(files).unwrap();
    if given < files {
        tritmill_servers::skip(&format!("{files} open files, not {given} (ulimit -Hn)"));
    }
    given >= files
}

fn metric(caller: &Caller, name: &str) -> Option<f64> {
    series(&caller.get("/metrics").text(), name)
}

/// Returns how often a limit has refused something. Its series begins with the first time.
fn refusals(caller: &Caller, limit: &str) -> u64 {
    let name = format!("tritmill_admin_http_refusals_total{{limit=\"{limit}\"}}");
    metric(caller, &name).unwrap_or_default() as u64
}

/// Connects to `listen` and sends the first byte of a form, as often as told.
fn hold(listen: &str, count: usize) -> Vec<TcpStream> {
    let head = "POST /dashboard/login HTTP/1.1\r\nHost: a\r\nContent-Length: 70\r\n\
                Content-Type: application/x-www-form-urlencoded\r\n\r\nk";
    let open = |_| {
        let mut stream = TcpStream::connect(listen).unwrap();
        // The server may have closed the connection for another one.
        let _ = stream.write_all(head.as_bytes());
        stream
    };
    (0..count).map(open).collect()
}

/// Asserts that a call is answered soon, several times.
fn answered(what: &str, call: impl Fn() -> u16) {
    for _ in 0..5 {
        let started = Instant::now();
        assert_eq!(call(), 200, "{what}");
        assert!(started.elapsed() < SOON, "{what} took {:?}", started.elapsed());
    }
}

/// Repeats a call until it is refused; returns that answer.
fn refused(mut call: impl FnMut() -> Answer) -> Answer {
    let started = Instant::now();
    loop {
        let answer = call();
        if answer.status == 429 {
            assert!(answer.header("retry-after").unwrap().parse::<u64>().unwrap() > 0);
            return answer;
        }
        assert!(started.elapsed() < Duration::from_secs(60), "not refused: {}", answer.text());
    }
}

#[test]
fn strangers_on_the_login_page_take_no_connection_from_others() {
    if !may_open(4000) {
        return;
    }
    let fleet = Fleet::start();
    // The limits per address are so high that only the total counts.
    let many = "100000";
    let limits = ["--max-waiting-per-address", many, "--max-stranger-rate", many];
    let admin = Admin::start(&fleet, &[&["--max-connections", "1000"], &limits[..]].concat());
    let caller = admin.first();
    let streams = hold(&admin.listen, 1500);
    let health = || admin.with("").get("/healthz").status;
    answered("the health check", health);
    answered("an authenticated request", || caller.get("/v1/models").status);
    answered("the readiness check", || admin.with("").get("/readyz").status);
    assert!(refusals(&caller, "connections") >= 500);
    assert!(metric(&caller, "tritmill_admin_http_connections").unwrap() <= 1000.0);
    // They come back all the time.
    std::thread::scope(|scope| {
        let attack = scope.spawn(|| (0..5).map(|_| hold(&admin.listen, 300)).collect::<Vec<_>>());
        answered("the health check", health);
        attack.join().unwrap();
    });
    drop(streams);
    // One address has its own share.
    let admin = Admin::start(&fleet, &["--max-connections", "800"]);
    let caller = admin.with(caller.key());
    let streams = hold(&admin.listen, 300);
    answered("an authenticated request", || caller.get("/v1/models").status);
    assert!(refusals(&caller, "address_connections") >= 200);
    assert_eq!(refusals(&caller, "connections"), 0);
    drop(streams);
}

#[test]
fn slow_bodies_are_cut_on_every_route_and_steady_uploads_are_not() {
    let fleet = Fleet::start();
    let admin = Admin::start(&fleet, &["--client-timeout", "1"]);
    let caller = admin.first();
    let cookie = caller.log_in(admin.first_key.as_deref().unwrap());
    let json = "Content-Type: application/json\r\nContent-Length: 1000\r\n";
    let multipart = "Content-Type: multipart/form-data; boundary=x\r\nContent-Length: 1000\r\n";
    let page = format!(
        "Cookie: {cookie}\r\n{OURS}Content-Length: 1000\r\n\
         Content-Type: application/x-www-form-urlencoded\r\n"
    );
    let file = "--x\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a\"\r\n\r\n{}";
    let asks = [
        admin.with("").head("POST", "/dashboard/login", &page) + "k",
        caller.head("POST", "/dashboard/keys", &page) + "n",
        caller.head("POST", "/dashboard/queues/demo@i2_s", &page) + "n",
        caller.head(
            "POST",
            "/dashboard/batches",
            &format!("Cookie: {cookie}\r\n{OURS}{multipart}"),
        ) + file,
        caller.head("POST", "/v1/chat/completions", json) + "{",
        caller.head("POST", "/v1/batches", json) + "{",
        caller.head("POST", "/admin/v1/keys", json) + "{",
        caller.head("POST", "/v1/files", multipart) + file,
    ];
    let slow: Vec<TcpStream> = asks.iter().map(|ask| caller.open(ask.as_bytes())).collect();
    for (mut stream, ask) in slow.into_iter().zip(&asks) {
        assert_eq!(Answer::read(&mut stream).status, 408, "{ask}");
    }
    assert_eq!(refusals(&caller, "body_time"), asks.len() as u64);
    // An upload on a slow link takes longer than the limit of other bodies.
    let started = Instant::now();
    let line = format!("{}\n", json!({ "prompt": "x".repeat(2000) }));
    let (parts, end) = (8, "\r\n--x--\r\n");
    let start = "--x\r\nContent-Disposition: form-data; name=\"purpose\"\r\n\r\nbatch\r\n\
         --x\r\nContent-Disposition: form-data; name=\"file\"; filename=\"in.jsonl\"\r\n\r\n";
    let length = start.len() + parts * line.len() + end.len();
    let headers =
        format!("Content-Type: multipart/form-data; boundary=x\r\nContent-Length: {length}\r\n");
    let mut upload = caller.open((caller.head("POST", "/v1/files", &headers) + start).as_bytes());
    for _ in 0..parts {
        std::thread::sleep(Duration::from_millis(300));
        upload.write_all(line.as_bytes()).unwrap();
    }
    upload.write_all(end.as_bytes()).unwrap();
    let answer = Answer::read(&mut upload);
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert_eq!(answer.json()["bytes"], parts * line.len());
    assert!(started.elapsed() > Duration::from_secs(2));
    eventually("no part of another file is left", || fleet.rows(&["files"]) == 1);
}

#[test]
fn response_that_is_not_read_is_cut() {
    let fleet = Fleet::start();
    let admin = Admin::start(&fleet, &["--client-timeout", "1"]);
    let caller = admin.first();
    let content = vec![b'x'; 24 << 20];
    let file = caller.upload(&content).json();
    let path = format!("/v1/files/{}/content", file["id"].as_str().unwrap());
    let mut idle = caller.open(caller.head("GET", &path, "").as_bytes());
    eventually("the response is cut", || refusals(&caller, "read_time") == 1);
    let mut received = Vec::new();
    if let Err(error) = idle.read_to_end(&mut received) {
        assert_ne!(error.kind(), ErrorKind::WouldBlock, "the connection was not closed");
    }
    assert!(received.len() < content.len(), "{} bytes", received.len());
    // A client that reads slowly gets everything.
    let mut slow = caller.open(caller.head("GET", &path, "").as_bytes());
    let (mut total, mut buffer) = (0, vec![0; 1 << 20]);
    while let Ok(bytes @ 1..) = slow.read(&mut buffer) {
        total += bytes;
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(total > content.len(), "{total} bytes with the head");
}

#[test]
fn callers_over_their_limits_get_429() {
    // Without a worker jobs stay unanswered, so requests stay open.
    let (fleet, first) = Admin::without_worker();
    let first = first.first();
    let limits = ["--max-requests-per-key", "2", "--max-stranger-rate", "1"];
    let admin = Admin::start(&fleet, &limits);
    let [one, two] = ["one", "two"].map(|tenant| admin.with(&key(&fleet, tenant, "submit")));
    let body = json!({ "model": "demo", "prompt": "Paid", "stream": true });
    // One that meets a call is refused itself, so more are opened until two stay.
    let mut open = Vec::new();
    let busy = refused(|| {
        open.push(one.open_post("/v1/completions", &body));
        one.get("/v1/models")
    });
    assert_eq!(busy.error().1, "busy");
    let name =
        "tritmill_admin_refusals_total{limit=\"key_requests\",cause=\"caller\",tenant=\"one\"}";
    assert!(metric(&admin.with(first.key()), name) > Some(0.0));
    assert_eq!(two.get("/v1/models").status, 200, "another key is not limited");
    drop(open);
    eventually("the requests have ended", || one.get("/v1/models").status == 200);
    // A stranger uses up what its address has.
    let guess = admin.with(&format!("tm-{}", "0".repeat(64)));
    assert_eq!(refused(|| guess.get("/v1/models")).error().1, "rate_limit_exceeded");
    let page = refused(|| admin.with("").get("/dashboard/login")).text();
    assert!(page.contains("too many requests"), "{page}");
    assert_eq!(refused(|| admin.with("").get("/none")).error().1, "rate_limit_exceeded");
    assert_eq!(two.get("/v1/models").status, 200, "a key that was valid is not limited");
    assert_eq!(admin.with("").get("/healthz").status, 200);
    assert_eq!(admin.with("").get("/readyz").status, 200);
}

#[test]
fn rate_of_a_key_is_limited_if_asked_for() {
    let fleet = Fleet::start();
    let admin = Admin::start(&fleet, &["--max-key-rate", "1"]);
    let caller = admin.first();
    assert_eq!(refused(|| caller.get("/v1/models")).error().1, "rate_limit_exceeded");
    assert_eq!(admin.with(&key(&fleet, "other", "read")).get("/v1/models").status, 200);
}

/// Runs a command of the program with few file descriptors.
fn with_files(fleet: &Fleet, files: u32, words: &[&str]) -> Command {
    let mut command = fleet.command(words);
    let program = command.get_program().to_owned();
    let mut limited = Command::new("sh");
    limited
        .args(["-c", &format!("ulimit -n {files}; exec \"$0\" \"$@\"")])
        .arg(program)
        .args(words);
    for (name, value) in command.get_envs() {
        limited.env(name, value.unwrap());
    }
    command = limited;
    command.stdin(std::process::Stdio::null());
    command
}

#[test]
fn servers_without_file_descriptors_go_on() {
    if !may_open(2000) {
        return;
    }
    let fleet = Fleet::start();
    // So few that connections fail to be accepted before there are too many.
    let words = ["admin", "--json", "--listen", "127.0.0.1:0"];
    let admin = Admin::run(with_files(&fleet, 64, &words));
    let caller = admin.first();
    assert_eq!(caller.get("/v1/models").status, 200);
    let strangers = hold(&admin.listen, 500);
    answered("the health check", || admin.with("").get("/healthz").status);
    drop(strangers);
    answered("an authenticated request", || caller.get("/v1/models").status);

    let words = ["worker", "--json", "--threads", "1"];
    let mut command = with_files(&fleet, 48, &words);
    command.stderr(std::process::Stdio::piped());
    let mut worker = WorkerProcess::start(command);
    assert_eq!(worker.get("/healthz").0, 200);
    let strangers = hold(worker.ready["listen"].as_str().unwrap(), 500);
    answered("the worker's health check", || worker.get("/healthz").0);
    let (_, text) = worker.get("/metrics");
    assert!(text.contains("tritmill_worker_http_connections "), "{text}");
    drop(strangers);
    assert_eq!(worker.wait(Duration::ZERO), None, "it runs");
}

#[test]
fn large_bodies_of_many_callers_stay_within_the_budget() {
    let (_fleet, admin) = {
        let fleet = Fleet::start();
        drop(fleet.worker(&[]));
        let admin = Admin::start(&fleet, &["--request-memory", "32M"]);
        (fleet, admin)
    };
    let caller = admin.first();
    // No worker runs: a caller that has sent its body waits for the answer, and the body is held.
    let body = json!({ "model": "demo", "prompt": "word ".repeat(700_000), "max_tokens": 1 });
    let streams: Vec<TcpStream> =
        (0..24).map(|_| caller.open_post("/v1/completions", &body)).collect();
    let name = "tritmill_admin_http_request_bytes";
    eventually("the budget is used", || metric(&caller, name) > Some(24e6));
    eventually("the others are refused", || refusals(&caller, "request_memory") == 24 - 9);
    assert!(metric(&caller, name) <= Some(32.0 * 1024.0 * 1024.0));
    assert_eq!(admin.with("").get("/healthz").status, 200);
    let refused = caller.post("/v1/completions", &body);
    assert_eq!(refused.error(), (503, "request_memory_full".to_owned()));
    assert_eq!(refused.header("retry-after"), Some("1"));
    assert_eq!(refused.header("x-should-retry"), Some("true"));
    drop(streams);
    eventually("everything is given back", || metric(&caller, name) < Some(1e6));
}
