//! Many concurrent streams, and slow request bodies.

use std::{io::ErrorKind, net::TcpStream, time::Instant};

use serde_json::json;

use crate::{
    fleet::{Fleet, eventually, series},
    rig::{Admin, Answer},
};

/// Limit of the service's resident memory in MB with all streams open.
const MEMORY_MAX_MB: u64 = 400;

#[test]
fn five_thousand_open_streams_are_held_while_others_are_served() {
    const STREAMS: usize = 5000;
    const THREADS: usize = 8;
    let files = rlimit::increase_nofile_limit(STREAMS as u64 + 1000).unwrap();
    if files < STREAMS as u64 + 1000 {
        let needs = STREAMS + 1000;
        return tritmill_servers::skip(&format!("{needs} open files, not {files} (ulimit -Hn)"));
    }
    let fleet = Fleet::start();
    // The model is registered, and no worker runs.
    drop(fleet.worker(&[]));
    let admin = Admin::start(&fleet, &[]);
    let caller = admin.first();
    let body = json!({
        "model": "demo", "prompt": "Paid", "max_tokens": 4, "stream": true,
    });
    let mut streams: Vec<TcpStream> = std::thread::scope(|scope| {
        let open = || {
            let open = |_| caller.open_post("/v1/completions", &body);
            (0..STREAMS / THREADS).map(open).collect::<Vec<TcpStream>>()
        };
        let opening: Vec<_> = (0..THREADS).map(|_| scope.spawn(open)).collect();
        opening.into_iter().flat_map(|opening| opening.join().unwrap()).collect()
    });
    assert_eq!(streams.len(), STREAMS);
    let open = || series(&caller.get("/metrics").text(), "tritmill_admin_streams");
    // On a slow machine so many requests at once wait too long for the database: some are refused, and their
    // callers try again.
    eventually("all streams are open", || {
        for stream in streams.iter_mut().filter(|stream| is_refused(stream)) {
            *stream = caller.open_post("/v1/completions", &body);
        }
        open() == Some(STREAMS as f64)
    });
    let started = Instant::now();
    for _ in 0..20 {
        assert_eq!(caller.get("/v1/models").status, 200, "other clients are served");
    }
    let each = started.elapsed() / 20;
    eprintln!("{STREAMS} streams: {} kB resident, {each:?} a request", admin.resident_kb());
    assert!(each.as_secs() < 2, "{each:?} a request");
    assert!(admin.resident_kb() < MEMORY_MAX_MB << 10, "{} kB", admin.resident_kb());
    drop(streams);
    eventually("no stream is open", || open() == Some(0.0));
    eventually("their jobs are cancelled", || {
        fleet.sql("SELECT count(*) FROM all_jobs WHERE state <> 'cancelled'").trim() == "0"
    });
}

/// Whether the service refused a request with status 503.
///
/// # Panics
/// If it sent another status than 503 or 200.
fn is_refused(stream: &TcpStream) -> bool {
    const LINE: &str = "HTTP/1.1 200";
    let mut line = [0; LINE.len()];
    stream.set_nonblocking(true).unwrap();
    let received = stream.peek(&mut line);
    stream.set_nonblocking(false).unwrap();
    match received {
        Ok(_) => match &line[LINE.len() - 3..] {
            b"503" => true,
            status => {
                assert_eq!(status, b"200");
                false
            }
        },
        Err(error) => {
            assert_eq!(error.kind(), ErrorKind::WouldBlock);
            false
        }
    }
}

#[test]
fn slow_request_bodies_time_out_while_others_are_served() {
    let fleet = Fleet::start();
    let admin = Admin::start(&fleet, &[]);
    let caller = admin.first();
    let json = "Content-Type: application/json\r\nContent-Length: 1000\r\n";
    let form = "Content-Type: multipart/form-data; boundary=x\r\nContent-Length: 1000\r\n";
    let asks = [
        caller.head("POST", "/v1/completions", json) + "{\"model\": ",
        caller.head("POST", "/v1/batches", json) + "{",
        caller.head("POST", "/v1/files", form) + "--x\r\nContent-Disposition: form-data; name=\"fi",
        caller.head("POST", "/v1/files", form)
            + "--x\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a\"\r\n\r\n{}",
    ];
    let slow: Vec<TcpStream> =
        (0..50).flat_map(|_| asks.iter().map(|ask| caller.open(ask.as_bytes()))).collect();
    assert_eq!(caller.get("/v1/models").status, 200);
    for mut stream in slow {
        assert_eq!(Answer::read(&mut stream).error(), (408, "timeout".to_owned()));
    }
    assert_eq!(caller.get("/v1/models").status, 200);
    eventually("no part of a file is left", || fleet.rows(&["files", "file_chunks"]) == 0);
}
