//! Downloads and uploads of files by clients that go on where they were, compress and repeat.

use std::{
    io::Write as _,
    process::{Command, Stdio},
};

use serde_json::json;

use crate::{
    fleet::Fleet,
    rig::{Admin, Answer, Caller, key},
};

/// Two mebibytes and a bit of lines that differ.
fn lines() -> Vec<u8> {
    let mut content: Vec<u8> =
        (0..200_000).flat_map(|n| format!("{{\"n\":{n}}}\n").into_bytes()).collect();
    content.truncate((2 << 20) + 77);
    content
}

/// Asks for the content of a file.
fn content(caller: &Caller, method: &str, file: &str, headers: &str) -> Answer {
    let path = format!("/v1/files/{file}/content");
    caller.send(caller.head(method, &path, headers).as_bytes())
}

/// Uploads a file, with these fields and headers in addition.
fn upload(caller: &Caller, content: &str, fields: &str, headers: &str) -> Answer {
    let body = format!(
        "--x\r\nContent-Disposition: form-data; name=\"purpose\"\r\n\r\nbatch\r\n{fields}--x\r\n\
         Content-Disposition: form-data; name=\"file\"; filename=\"in.jsonl\"\r\n\r\n\
         {content}\r\n--x--\r\n"
    );
    let headers = format!(
        "{headers}Content-Type: multipart/form-data; boundary=x\r\nContent-Length: {}\r\n",
        body.len()
    );
    caller.send((caller.head("POST", "/v1/files", &headers) + &body).as_bytes())
}

/// Unpacks with the system's own program.
fn unpacked(bytes: &[u8]) -> Vec<u8> {
    let mut gzip = Command::new("gzip")
        .arg("-dc")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let (mut input, bytes) = (gzip.stdin.take().unwrap(), bytes.to_vec());
    let writing = std::thread::spawn(move || input.write_all(&bytes));
    let output = gzip.wait_with_output().unwrap();
    writing.join().unwrap().unwrap();
    assert!(output.status.success());
    output.stdout
}

#[test]
fn content_is_sent_whole_in_ranges_compressed_or_not_at_all() {
    let fleet = Fleet::start();
    let admin = Admin::start(&fleet, &[]);
    let (caller, whole) = (admin.first(), lines());
    let file = caller.upload(&whole).json()["id"].as_str().unwrap().to_owned();
    let get = |headers: &str| content(&caller, "GET", &file, headers);
    let plain = get("");
    assert_eq!((plain.status, plain.body.as_slice()), (200, whole.as_slice()));
    assert_eq!(plain.header("accept-ranges"), Some("bytes"));
    let tag = plain.header("etag").unwrap().to_owned();
    let head = content(&caller, "HEAD", &file, "");
    assert_eq!((head.status, head.body.len()), (200, 0));
    assert_eq!(head.header("content-length"), Some(&*whole.len().to_string()));
    assert_eq!(head.header("etag"), Some(&*tag));

    // Over the border of two chunks.
    let (first, last) = ((1 << 20) - 5, (1 << 20) + 5);
    let part = get(&format!("Range: bytes={first}-{last}\r\nAccept-Encoding: gzip\r\n"));
    assert_eq!((part.status, part.body.as_slice()), (206, &whole[first..=last]));
    let expect = format!("bytes {first}-{last}/{}", whole.len());
    assert_eq!(part.header("content-range"), Some(&*expect));
    assert_eq!(
        (part.header("content-length"), part.header("content-encoding")),
        (Some("11"), None)
    );
    assert_eq!(get("Range: bytes=-77\r\n").body, whole[2 << 20..]);
    assert_eq!(get(&format!("Range: bytes=9-\r\nIf-Range: {tag}\r\n")).status, 206);
    assert_eq!(get("Range: bytes=9-\r\nIf-Range: \"other\"\r\n").status, 200);
    assert_eq!(get("Range: bytes=0-1,4-5\r\n").body.len(), whole.len());
    let beyond = get(&format!("Range: bytes={}-\r\n", whole.len()));
    assert_eq!(beyond.error(), (416, "invalid_range".to_owned()));
    assert_eq!(beyond.header("content-range"), Some(&*format!("bytes */{}", whole.len())));

    let packed = get("Accept-Encoding: gzip, br\r\n");
    assert_eq!((packed.status, packed.header("content-encoding")), (200, Some("gzip")));
    assert!(packed.body.len() < whole.len() / 2);
    assert_eq!(unpacked(&packed.body), whole);
    assert_ne!(packed.header("etag"), Some(&*tag), "other bytes have another tag");
    for known in [tag.as_str(), "*", &format!("\"x\", W/{tag}")] {
        let known = get(&format!("If-None-Match: {known}\r\n"));
        assert_eq!((known.status, known.body.len()), (304, 0));
    }
    assert_eq!(get("If-None-Match: \"x\"\r\n").status, 200);

    let other = admin.with(&key(&fleet, "other", "read"));
    assert_eq!(content(&other, "GET", &file, &format!("If-None-Match: {tag}\r\n")).status, 404);
}

#[test]
fn repeated_upload_with_one_key_creates_one_file() {
    let fleet = Fleet::start();
    let admin = Admin::start(&fleet, &[]);
    let caller = admin.first();
    let upload = |content: &str, key: &str| {
        upload(&caller, content, "", &format!("Idempotency-Key: {key}\r\n"))
    };
    let first = upload("{}", "nightly").json();
    assert_eq!(upload("{}", "nightly").json(), first);
    let other = upload("{ }", "nightly");
    assert_eq!(other.error(), (409, "idempotency_conflict".to_owned()));
    assert_eq!(other.header("x-should-retry"), Some("false"));
    assert_ne!(upload("{}", "weekly").json()["id"], first["id"]);
    assert_eq!(fleet.rows(&["files"]), 2, "what was not needed is deleted");
}

#[test]
fn file_expires_as_its_creator_asked() {
    let fleet = Fleet::start();
    let admin = Admin::start(&fleet, &[]);
    let caller = admin.first();
    let field = |name: &str, value: &str| {
        format!(
            "--x\r\nContent-Disposition: form-data; name=\"expires_after[{name}]\"\r\n\r\n{value}\r\n"
        )
    };
    let within = |seconds: &str| field("anchor", "created_at") + &field("seconds", seconds);
    for wrong in [within("3599"), within("2592001"), field("seconds", "7200"), within("x")] {
        let refused = upload(&caller, "{}", &wrong, "");
        assert_eq!(refused.error(), (400, "invalid_value".to_owned()), "{wrong}");
    }
    let file = upload(&caller, "{}", &within("3600"), "").json();
    let (created, expires) = (file["created_at"].as_i64(), file["expires_at"].as_i64());
    assert_eq!(expires.unwrap() - created.unwrap(), 3600);
    let id = file["id"].as_str().unwrap();
    fleet.sql("UPDATE files SET expires_at = 1");
    for path in [format!("/v1/files/{id}"), format!("/v1/files/{id}/content")] {
        assert_eq!(caller.get(&path).error(), (404, "not_found".to_owned()), "{path}");
    }
    let ask = json!({
        "input_file_id": id, "endpoint": "/v1/completions", "completion_window": "1h",
    });
    assert_eq!(caller.post("/v1/batches", &ask).error(), (404, "not_found".to_owned()));
}
