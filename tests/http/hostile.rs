//! Hostile requests get typed errors within bounds of memory and time, and other clients are served.

use std::{
    io::{ErrorKind, Read as _, Write as _},
    thread,
};

use serde_json::json;

use crate::{
    batches::lines,
    fleet::{Fleet, eventually},
    rig::{Admin, Caller, key},
};

/// Posts an upload form; returns status and error code.
fn form(caller: &Caller, body: &[u8]) -> (u16, String) {
    caller.request("POST", "/v1/files", "multipart/form-data; boundary=x", body).error()
}

#[test]
fn malformed_requests_get_typed_errors() {
    let fleet = Fleet::start();
    let admin = Admin::start(&fleet, &["--max-file-mib", "1"]);
    let caller = admin.first();
    let part = |name: &str, rest: &str| {
        format!("--x\r\nContent-Disposition: form-data; name=\"{name}\"{rest}\r\n")
    };
    for (body, code) in [
        (String::new(), "invalid_multipart"),
        ("nonsense".to_owned(), "invalid_multipart"),
        ("--x--\r\n".to_owned(), "missing_field"),
        (part("purpose", "\r\n\r\nbatch") + "--x--\r\n", "missing_field"),
        (part("purpose", "\r\n\r\nfine-tune") + "--x--\r\n", "unsupported_value"),
        (part("color", "\r\n\r\nred") + "--x--\r\n", "unknown_parameter"),
        (part("purpose", &format!("\r\n\r\n{}", "x".repeat(5000))) + "--x--\r\n", "invalid_value"),
        (part("file", "; filename=\"../../etc/passwd\"\r\n\r\n{}"), "invalid_multipart"),
        (part("purpose", "\r\n\r\nbatch").repeat(100) + "--x--\r\n", "invalid_multipart"),
        (part("file' or 1=1 --", "\r\n\r\nx") + "--x--\r\n", "unknown_parameter"),
    ] {
        assert_eq!(form(&caller, body.as_bytes()), (400, code.to_owned()), "{body:.80}");
    }
    let large = part("file", "; filename=\"a\"\r\n\r\n") + &"x".repeat(2 << 20) + "\r\n--x--\r\n";
    assert_eq!(form(&caller, large.as_bytes()), (413, "too_large".to_owned()));
    let plain = caller.request("POST", "/v1/files", "text/plain", b"x");
    assert_eq!(plain.error(), (400, "invalid_content_type".to_owned()));
    for path in [
        "/v1/files/..%2f..%2fetc%2fpasswd",
        "/v1/files/file-'%20OR%201=1",
        "/v1/files/%2e%2e",
        "/v1/files/..%2f..%2fetc%2fpasswd/content",
        "/v1/files/file-00000000000000000000000000000000%00/content",
        "/v1/batches/%00",
        "/v1/batches/batch_0;DROP%20TABLE%20batches",
        "/v1/batches/batch_%0d%0aX-Injected:%201",
    ] {
        let answer = caller.get(path);
        assert_eq!(answer.error(), (404, "not_found".to_owned()), "{path}");
        assert_eq!(answer.header("x-injected"), None);
    }
    let endless = format!("/v1/batches/batch_{}", "0".repeat(8000));
    assert_eq!(caller.get(&endless).error(), (404, "not_found".to_owned()));
    for path in ["/v1/files/../files", "/v1//files", "/etc/passwd", "/v1/batches/a/b/c"] {
        assert_eq!(caller.get(path).error(), (404, "unknown_url".to_owned()), "{path}");
    }
    for query in ["limit=0", "limit=x", "after=;DROP", "order=up", "purpose=x", "color=red"] {
        assert_eq!(caller.get(&format!("/v1/files?{query}")).status, 400, "{query}");
    }
    let deep = "[".repeat(100_000);
    let bomb = caller.request("POST", "/v1/completions", "application/json", deep.as_bytes());
    assert_eq!(bomb.error(), (400, "invalid_json".to_owned()));
    let keys: String = (0..100_000).map(|key| format!("\"k{key}\":0,")).collect();
    let many = format!("{{{keys}\"model\":\"demo\",\"prompt\":\"a\"}}");
    let many = caller.request("POST", "/v1/completions", "application/json", many.as_bytes());
    assert_eq!(many.error(), (400, "unknown_parameter".to_owned()));
    for (bomb, code) in [
        ("{\"model\":\"demo\",\"prompt\":\"a\",\"temperature\":1e999999}", "invalid_json"),
        ("{\"model\":\"demo\",\"prompt\":\"a\",\"n\":99999999999999999999}", "invalid_type"),
        ("{\"model\":\"demo\",\"prompt\":\"\\ud800\"}", "invalid_json"),
        ("\u{feff}{}", "invalid_json"),
        ("", "invalid_json"),
        ("null", "invalid_type"),
    ] {
        let answer = caller.request("POST", "/v1/completions", "application/json", bomb.as_bytes());
        assert_eq!(answer.error(), (400, code.to_owned()), "{bomb}");
    }
    let wide = format!("{{\"prompt\":\"{}\"}}", "x".repeat(5 << 20));
    let large = caller.request("POST", "/v1/completions", "application/json", wide.as_bytes());
    assert_eq!(large.error(), (413, "too_large".to_owned()));
    let long = caller.head("GET", "/v1/models", &format!("X-Long: {}\r\n", "x".repeat(100_000)));
    assert_eq!(caller.send(long.as_bytes()).status, 431);
    let many = caller.head("GET", "/v1/models", &"X-Many: 1\r\n".repeat(200));
    assert_eq!(caller.send(many.as_bytes()).status, 431);
    assert_eq!(caller.get("/v1/models").status, 200, "other clients are served");
    assert_eq!(fleet.rows(&["files"]), 0, "no file is left");
}

#[test]
fn sql_in_values_is_stored_as_text() {
    let (fleet, admin) = Admin::without_worker();
    let caller = admin.first();
    let nasty = "'; DROP TABLE batches; -- \u{202e}%s{}$1";
    let body = format!(
        "--x\r\nContent-Disposition: form-data; name=\"purpose\"\r\n\r\nbatch\r\n--x\r\n\
         Content-Disposition: form-data; name=\"file\"; filename=\"{nasty}\"\r\n\r\n{}\r\n--x--\r\n",
        lines(1).replace("q0", "Robert'); DROP TABLE jobs;--"),
    );
    let kind = "multipart/form-data; boundary=x";
    let file = caller.request("POST", "/v1/files", kind, body.as_bytes()).json();
    assert_eq!(file["filename"], nasty);
    let asked = json!({
        "input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "1h",
        "metadata": { nasty: nasty },
    });
    let batch = caller.post("/v1/batches", &asked).json();
    assert_eq!(batch["metadata"][nasty], nasty, "{batch}");
    let path = format!("/v1/batches/{}", batch["id"].as_str().unwrap());
    eventually("the line is a job", || fleet.rows(&["all_jobs"]) == 1);
    assert_eq!(caller.get(&path).json()["metadata"][nasty], nasty);
    let tenant = admin.with(&key(&fleet, "a' OR 'a'='a", "submit"));
    assert_eq!(tenant.get(&path).status, 404);
}

#[test]
fn refusal_before_the_body_closes_the_connection() {
    let fleet = Fleet::start();
    let admin = Admin::start(&fleet, &[]);
    let head = "POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer unknown\r\n\
                Content-Type: application/json\r\nContent-Length: 9\r\n\r\n";
    let answer = admin.first().send(head.as_bytes());
    assert_eq!((answer.status, answer.header("connection")), (401, Some("close")));
}

#[test]
fn endless_form_header_is_refused_in_bounded_memory() {
    let fleet = Fleet::start();
    let admin = Admin::start(&fleet, &[]);
    let caller = admin.first();
    let before = admin.resident_kb();
    let body = format!("--x\r\nX-Long: {}", "x".repeat(64 << 20));
    let (status, _) = form(&caller, body.as_bytes());
    assert_eq!(status, 400);
    let grown = admin.resident_kb().saturating_sub(before);
    assert!(grown < 30_000, "{grown} kB");
}

#[test]
fn slow_request_heads_time_out_while_others_are_served() {
    let fleet = Fleet::start();
    let admin = Admin::start(&fleet, &[]);
    let caller = admin.first();
    let mut slow: Vec<_> =
        (0..100).map(|_| caller.open(b"GET /v1/models HTTP/1.1\r\nX-")).collect();
    assert_eq!(caller.get("/v1/models").status, 200);
    let mut said = Vec::new();
    // The server may send an error before it closes. The read timeout of the test is longer than the
    // server's limit.
    if let Err(error) = slow[0].read_to_end(&mut said) {
        assert_ne!(error.kind(), ErrorKind::WouldBlock, "the connection was not closed");
    }
    let _ = slow[0].write_all(b"a: b\r\n\r\n");
    assert!(!String::from_utf8_lossy(&said).contains("200 OK"));
}

#[test]
fn patterns_that_are_long_to_check_hold_up_no_other_call() {
    let fleet = Fleet::start();
    let admin = Admin::start(&fleet, &[]);
    let caller = admin.first();
    // More than there are threads. Patterns are checked once, so that each is another one.
    let count = 2 * thread::available_parallelism().unwrap().get();
    let post = |index: usize| {
        let pattern = format!("(a{{1000}}){{{}}}", 1000 - index);
        let body = json!({ "model": "demo", "prompt": "x", "guided_regex": pattern });
        caller.open_post("/v1/completions", &body)
    };
    let mut checked: Vec<_> = (0..count).map(post).collect();
    for _ in 0..10 {
        assert_eq!(caller.get("/v1/models").status, 200);
    }
    for stream in &mut checked {
        stream.set_nonblocking(true).unwrap();
        let read = stream.read(&mut [0]);
        let kind = read.expect_err("the others were answered before the first check ended").kind();
        assert_eq!(kind, ErrorKind::WouldBlock);
    }
}
