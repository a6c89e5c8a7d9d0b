//! A server on this machine that answers as the hub does: descriptions, redirects to a second address with the content,
//! ranges, hashes in headers, refusals with their codes. Faults can be chosen.

use std::{
    collections::{BTreeMap, HashMap},
    fmt::Write as _,
    io::{BufRead as _, BufReader, Write as _},
    net::{TcpListener, TcpStream},
    sync::{Arc, Condvar, Mutex},
    thread,
};

use sha1::Sha1;
use sha2::{Digest as _, Sha256};

/// Commit of the branch `main`, and the only one.
pub const COMMIT: &str = "89abcdef0123456789abcdef0123456789abcdef";
/// Repository of all files.
pub const REPOSITORY: &str = "tiny/model-1.58";
/// Bytes from which on a file is in large file storage.
const LARGE: usize = 1000;

/// How the server misbehaves.
#[derive(Debug, Clone, Default)]
pub struct Faults {
    /// Content requests that end after so many bytes of the answer, one entry for each.
    pub cuts: Vec<usize>,
    /// Token without which content is refused.
    pub gate: Option<String>,
    /// Whether a byte of every large file is wrong.
    pub damaged: bool,
    /// Whether ranges are ignored.
    pub no_ranges: bool,
    /// Answers of this status before any other.
    pub busy: Vec<u16>,
    /// Size that is stated for large files.
    pub stated_size: Option<u64>,
    /// Whether no hash is stated for large files.
    pub no_hash: bool,
    /// Number of content requests to wait for before one is answered.
    pub together: usize,
}

/// A running server.
pub struct FakeHub {
    /// Its address as `HF_ENDPOINT`.
    pub endpoint: String,
    shared: Arc<Shared>,
}

struct Shared {
    files: BTreeMap<String, Vec<u8>>,
    faults: Mutex<Faults>,
    /// Every request: `METHOD PATH`, its range and whether it had a token.
    seen: Mutex<Vec<Seen>>,
    arrived: Condvar,
    content: String,
}

/// A request.
#[derive(Debug, Clone)]
pub struct Seen {
    /// `GET /path`
    pub line: String,
    /// The header `range`.
    pub range: Option<String>,
    /// The header `authorization`.
    pub token: Option<String>,
}

impl FakeHub {
    /// Starts a server with the files of [`REPOSITORY`].
    pub fn start(files: &[(&str, &[u8])], faults: Faults) -> Self {
        let hub = TcpListener::bind("127.0.0.1:0").expect("a port");
        let content = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = |listener: &TcpListener| {
            format!("http://{}", listener.local_addr().expect("it is bound"))
        };
        // With a path, as a mirror may have.
        let endpoint = format!("{}/mirror", address(&hub));
        let owned = |(name, bytes): &(&str, &[u8])| ((*name).to_owned(), bytes.to_vec());
        let shared = Arc::new(Shared {
            files: files.iter().map(owned).collect(),
            faults: Mutex::new(faults),
            seen: Mutex::default(),
            arrived: Condvar::new(),
            content: address(&content),
        });
        for listener in [hub, content] {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                for stream in listener.incoming().flatten() {
                    let shared = Arc::clone(&shared);
                    // A client may go away.
                    thread::spawn(move || shared.serve(stream).unwrap_or_default());
                }
            });
        }
        Self { endpoint, shared }
    }

    /// Changes the faults.
    pub fn set(&self, faults: Faults) {
        *self.shared.faults.lock().expect("no thread panicked") = faults;
    }

    /// Returns the requests so far that have `text` in their line.
    pub fn seen(&self, text: &str) -> Vec<Seen> {
        let seen = self.shared.seen.lock().expect("no thread panicked");
        seen.iter().filter(|seen| seen.line.contains(text)).cloned().collect()
    }
}

impl Shared {
    /// Answers one request.
    fn serve(&self, mut stream: TcpStream) -> std::io::Result<()> {
        let mut reader = BufReader::new(stream.try_clone()?);
        let mut line = String::new();
        reader.read_line(&mut line)?;
        let mut headers = HashMap::new();
        loop {
            let mut header = String::new();
            if reader.read_line(&mut header)? == 0 || header.trim().is_empty() {
                break;
            }
            if let Some((name, value)) = header.split_once(':') {
                headers.insert(name.to_ascii_lowercase(), value.trim().to_owned());
            }
        }
        let mut words = line.split_whitespace();
        let (method, path) = (words.next().unwrap_or(""), words.next().unwrap_or(""));
        let seen = Seen {
            line: format!("{method} {path}"),
            range: headers.remove("range"),
            token: headers.remove("authorization"),
        };
        self.seen.lock().expect("no thread panicked").push(seen.clone());
        self.arrived.notify_all();
        let busy = self.faults.lock().expect("no thread panicked").busy.pop();
        let answer = match busy {
            Some(status) => Answer::status(status, &[]),
            None => self.answer(path, &seen),
        };
        answer.write(&mut stream, method == "HEAD")
    }

    fn answer(&self, path: &str, seen: &Seen) -> Answer {
        let path = path.split('?').next().unwrap_or(path);
        if let Some(hash) = path.strip_prefix("/content/") {
            return self.content(hash, seen);
        }
        let Some(path) = path.strip_prefix("/mirror/") else { return Answer::status(404, &[]) };
        if let Some(rest) = path.strip_prefix("api/resolve-cache/") {
            let bytes = &self.files[rest];
            let etag = [("etag", format!("\"{}\"", hash_of(bytes)))];
            return Answer { bytes: bytes.clone(), ..Answer::status(200, &etag) };
        }
        if let Some(rest) = path.strip_prefix("api/models/") {
            return self.description(rest);
        }
        match path.strip_prefix(&format!("{REPOSITORY}/resolve/{COMMIT}/")) {
            Some(file) => self.file(file, seen),
            None => refusal(404, "EntryNotFound"),
        }
    }

    /// Describes the repository at a revision.
    fn description(&self, path: &str) -> Answer {
        let Some(revision) = path.strip_prefix(&format!("{REPOSITORY}/revision/")) else {
            return refusal(401, "RepoNotFound");
        };
        if revision != "main" && revision != COMMIT && revision != "refs%2Fpr%2F1" {
            return refusal(404, "RevisionNotFound");
        }
        let mut text = format!("{{\"sha\": \"{COMMIT}\", \"siblings\": [");
        for (index, (name, bytes)) in self.files.iter().enumerate() {
            let comma = if index == 0 { "" } else { "," };
            let size = bytes.len();
            let _ = write!(text, "{comma}{{\"rfilename\": \"{name}\", \"size\": {size}}}");
        }
        text.push_str("]}");
        Answer { bytes: text.into_bytes(), ..Answer::status(200, &[]) }
    }

    /// Answers for a file: a redirect, to the content or within the hub.
    fn file(&self, name: &str, seen: &Seen) -> Answer {
        let faults = self.faults.lock().expect("no thread panicked").clone();
        if let Some(gate) = &faults.gate {
            match &seen.token {
                Some(token) if *token == format!("Bearer {gate}") => {}
                Some(_) => {
                    return Answer::status(401, &[("x-error-message", "bad token".to_owned())]);
                }
                None => return refusal(401, "GatedRepo"),
            }
        }
        let Some(bytes) = self.files.get(name) else { return refusal(404, "EntryNotFound") };
        let hash = hash_of(bytes);
        let mut headers = vec![("x-repo-commit", COMMIT.to_owned())];
        if bytes.len() < LARGE {
            headers.push(("location", format!("/mirror/api/resolve-cache/{name}")));
            return Answer::status(307, &headers);
        }
        if !faults.no_hash {
            headers.push(("x-linked-etag", format!("\"{hash}\"")));
        }
        let size = faults.stated_size.unwrap_or(bytes.len() as u64);
        headers.push(("x-linked-size", size.to_string()));
        headers.push(("etag", "\"of the redirect\"".to_owned()));
        headers.push(("location", format!("{}/content/{hash}?signature=secret", self.content)));
        Answer::status(302, &headers)
    }

    /// Answers with the content of a large file.
    fn content(&self, hash: &str, seen: &Seen) -> Answer {
        self.wait_for_others();
        let mut faults = self.faults.lock().expect("no thread panicked");
        let found = self.files.values().find(|bytes| hash_of(bytes) == hash);
        let Some(mut bytes) = found.cloned() else { return Answer::status(403, &[]) };
        if faults.damaged {
            bytes[0] ^= 1;
        }
        let cut = faults.cuts.pop();
        let range = seen.range.as_ref().filter(|_| !faults.no_ranges);
        let from =
            range.and_then(|range| range.strip_prefix("bytes=")?.strip_suffix('-')?.parse().ok());
        let from: usize = from.unwrap_or(0);
        if from >= bytes.len() {
            return Answer::status(416, &[]);
        }
        let place = format!("bytes {from}-{}/{}", bytes.len() - 1, bytes.len());
        let status = if range.is_some() { 206 } else { 200 };
        Answer {
            bytes: bytes.split_off(from),
            cut,
            ..Answer::status(status, &[("content-range", place)])
        }
    }

    /// Waits until as many content requests arrived as the faults say.
    fn wait_for_others(&self) {
        let together = self.faults.lock().expect("no thread panicked").together;
        let mut seen = self.seen.lock().expect("no thread panicked");
        while seen.iter().filter(|seen| seen.line.contains("/api/models/")).count() < together {
            seen = self.arrived.wait(seen).expect("no thread panicked");
        }
    }
}

struct Answer {
    status: u16,
    headers: Vec<(&'static str, String)>,
    bytes: Vec<u8>,
    /// Bytes after which the connection ends.
    cut: Option<usize>,
}

impl Answer {
    fn status(status: u16, headers: &[(&'static str, String)]) -> Self {
        Self { status, headers: headers.to_vec(), bytes: Vec::new(), cut: None }
    }

    fn write(self, stream: &mut TcpStream, is_head: bool) -> std::io::Result<()> {
        let mut head = format!("HTTP/1.1 {} x\r\nconnection: close\r\n", self.status);
        let _ = write!(head, "content-length: {}\r\n", self.bytes.len());
        for (name, value) in &self.headers {
            let _ = write!(head, "{name}: {value}\r\n");
        }
        stream.write_all(format!("{head}\r\n").as_bytes())?;
        if !is_head {
            stream.write_all(&self.bytes[..self.cut.unwrap_or(self.bytes.len())])?;
        }
        stream.flush()
    }
}

fn refusal(status: u16, code: &str) -> Answer {
    Answer::status(status, &[("x-error-code", code.to_owned())])
}

/// Returns the hash that the hub states for a file: of large file storage, or of git.
pub fn hash_of(bytes: &[u8]) -> String {
    let hash = if bytes.len() < LARGE {
        let mut hasher = Sha1::new_with_prefix(format!("blob {}\0", bytes.len()));
        hasher.update(bytes);
        hasher.finalize().to_vec()
    } else {
        Sha256::digest(bytes).to_vec()
    };
    hash.iter().map(|byte| format!("{byte:02x}")).collect()
}
