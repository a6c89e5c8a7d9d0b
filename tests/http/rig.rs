//! An admin process, and a client that sends arbitrary requests.

use std::{
    io::{Read as _, Write as _},
    net::TcpStream,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use serde_json::{Value, json};
use tritmill_servers::Signal;

use crate::fleet::{Fleet, WorkerProcess};

/// A running admin, killed when dropped.
pub struct Admin {
    process: WorkerProcess,
    /// Address of the HTTP API.
    pub listen: String,
    /// The first key, if this admin created it.
    pub first_key: Option<String>,
}

impl Admin {
    /// Starts an admin and waits until it is ready.
    pub fn start(fleet: &Fleet, arguments: &[&str]) -> Self {
        let mut command = fleet.command(&["admin", "--json", "--listen", "127.0.0.1:0"]);
        command.args(arguments);
        Self::run(command)
    }

    /// Starts servers, a worker with the demo model, and an admin.
    pub fn with_worker() -> (Fleet, WorkerProcess, Self) {
        let fleet = Fleet::start();
        let worker = fleet.worker(&[]);
        let admin = Self::start(&fleet, &[]);
        (fleet, worker, admin)
    }

    /// Starts servers and an admin. The demo model is registered, and no worker runs.
    pub fn without_worker() -> (Fleet, Self) {
        let (fleet, _, admin) = Self::with_worker();
        (fleet, admin)
    }

    /// Starts a command with `--json` and waits until it is ready.
    pub fn run(mut command: Command) -> Self {
        command.stderr(Stdio::piped());
        let process = WorkerProcess::start(command);
        let text = |name: &str| process.ready[name].as_str().map(str::to_owned);
        let listen = text("api").or(text("listen")).unwrap();
        Self { listen, first_key: text("first_key"), process }
    }

    /// Returns a field of what it printed when it was ready.
    pub fn ready(&self, field: &str) -> String {
        self.process.ready[field].as_str().unwrap().to_owned()
    }

    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    pub fn signal(&self, signal: Signal) {
        self.process.signal(signal);
    }

    /// Returns the exit code if the process exits within `limit`.
    pub fn wait(&mut self, limit: Duration) -> Option<i32> {
        self.process.wait(limit)
    }

    /// Returns a caller with this key.
    pub fn with(&self, key: &str) -> Caller {
        Caller { listen: self.listen.clone(), key: key.to_owned() }
    }

    /// Returns a caller with the first key.
    pub fn first(&self) -> Caller {
        self.with(self.first_key.as_deref().unwrap())
    }

    /// Returns the resident memory in kB.
    pub fn resident_kb(&self) -> u64 {
        self.status("VmRSS:")
    }

    /// Returns the peak of the resident memory in kB.
    pub fn peak_kb(&self) -> u64 {
        self.status("VmHWM:")
    }

    fn status(&self, name: &str) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid())).unwrap();
        let line = status.lines().find(|line| line.starts_with(name)).unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    }
}

/// Creates a key of a tenant.
pub fn key(fleet: &Fleet, tenant: &str, role: &str) -> String {
    let (code, stdout, stderr) = fleet.run(&["keys", "create", "--tenant", tenant, "--role", role]);
    assert_eq!(code, Some(0), "{stderr}");
    stdout.trim().to_owned()
}

/// Returns a chat request that the demo model answers with `2024-03-03`, with some fields changed.
pub fn question(change: Value) -> Value {
    let mut body = json!({
        "model": "demo",
        "messages": [{ "role": "user", "content": "Paid on the 3rd of March, 2024" }],
        "temperature": 0,
        "max_tokens": 16,
    });
    body.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
    body
}

/// Header that a browser adds to a form of the dashboard's own origin.
pub const OURS: &str = "Sec-Fetch-Site: same-origin\r\n";

/// An HTTP response.
#[derive(Debug, Clone)]
pub struct Answer {
    pub status: u16,
    pub head: String,
    pub body: Vec<u8>,
}

impl Answer {
    /// Reads until the server closes the connection.
    pub fn read(stream: &mut TcpStream) -> Self {
        let mut bytes = Vec::new();
        // A reset after the response is as good as a close.
        let _ = stream.read_to_end(&mut bytes);
        let end = bytes.windows(4).position(|four| four == b"\r\n\r\n");
        let end = end.unwrap_or_else(|| panic!("no head in {bytes:?}"));
        let head = String::from_utf8(bytes[..end].to_vec()).unwrap().to_lowercase();
        let mut body = bytes[end + 4..].to_vec();
        if head.contains("transfer-encoding: chunked") {
            body = unchunked(&body);
        }
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        Self { status, head, body }
    }

    pub fn text(&self) -> String {
        String::from_utf8(self.body.clone()).unwrap()
    }

    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|_| panic!("no JSON: {}", self.text()))
    }

    /// Returns the value of a header.
    pub fn header(&self, name: &str) -> Option<&str> {
        let start = format!("{name}: ");
        self.head.lines().find_map(|line| line.strip_prefix(&start))
    }

    /// Returns the name and value of the cookie that is set.
    pub fn cookie(&self) -> String {
        let cookie = self.header("set-cookie").unwrap_or_else(|| panic!("{}", self.text()));
        // The head is in lower case, which changes only this part of the cookie.
        cookie.split(';').next().unwrap().replace("__secure-", "__Secure-")
    }

    /// Returns the status and `error.code`.
    pub fn error(&self) -> (u16, String) {
        (self.status, self.json()["error"]["code"].as_str().unwrap_or_default().to_owned())
    }

    /// Returns the data of the server-sent events.
    pub fn events(&self) -> Vec<String> {
        let text = self.text();
        text.lines().filter_map(|line| line.strip_prefix("data: ")).map(str::to_owned).collect()
    }
}

fn unchunked(mut bytes: &[u8]) -> Vec<u8> {
    let mut whole = Vec::new();
    while let Some(end) = bytes.windows(2).position(|two| two == b"\r\n") {
        let size = usize::from_str_radix(std::str::from_utf8(&bytes[..end]).unwrap(), 16).unwrap();
        let Some(chunk) = bytes.get(end + 2..end + 2 + size) else { break };
        whole.extend_from_slice(chunk);
        bytes = bytes.get(end + 4 + size..).unwrap_or_default();
    }
    whole
}

/// A client with a key, or without one if the key is empty.
#[derive(Clone)]
pub struct Caller {
    listen: String,
    key: String,
}

impl Caller {
    /// Returns a caller of the API at an address.
    pub fn new(listen: String, key: String) -> Self {
        Self { listen, key }
    }

    /// Returns the key.
    pub fn key(&self) -> &str {
        &self.key
    }

    /// Connects and sends bytes.
    pub fn open(&self, bytes: &[u8]) -> TcpStream {
        let mut stream = TcpStream::connect(&self.listen).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
        // The server may refuse and close before everything is sent.
        let _ = stream.write_all(bytes);
        stream
    }

    /// Sends bytes and reads the response.
    pub fn send(&self, bytes: &[u8]) -> Answer {
        Answer::read(&mut self.open(bytes))
    }

    /// Returns the head of a request.
    pub fn head(&self, method: &str, path: &str, headers: &str) -> String {
        let key = match self.key.as_str() {
            "" => String::new(),
            key => format!("Authorization: Bearer {key}\r\n"),
        };
        format!("{method} {path} HTTP/1.1\r\nHost: a\r\n{key}Connection: close\r\n{headers}\r\n")
    }

    /// Returns a request with a body of a content type.
    fn bytes(&self, method: &str, path: &str, kind: &str, body: &[u8]) -> Vec<u8> {
        let headers = format!("Content-Type: {kind}\r\nContent-Length: {}\r\n", body.len());
        [self.head(method, path, &headers).as_bytes(), body].concat()
    }

    /// Sends a body with a content type.
    pub fn request(&self, method: &str, path: &str, kind: &str, body: &[u8]) -> Answer {
        self.send(&self.bytes(method, path, kind, body))
    }

    /// Posts JSON without reading the response.
    pub fn open_post(&self, path: &str, body: &Value) -> TcpStream {
        let body = body.to_string();
        self.open(&self.bytes("POST", path, "application/json", body.as_bytes()))
    }

    pub fn get(&self, path: &str) -> Answer {
        self.send(self.head("GET", path, "").as_bytes())
    }

    pub fn post(&self, path: &str, body: &Value) -> Answer {
        self.request("POST", path, "application/json", body.to_string().as_bytes())
    }

    /// Gets a page with a session cookie.
    pub fn page(&self, path: &str, cookie: &str) -> Answer {
        self.send(self.head("GET", path, &format!("Cookie: {cookie}\r\n")).as_bytes())
    }

    /// Posts a form with a session cookie and these headers.
    pub fn form(&self, path: &str, cookie: &str, headers: &str, form: &str) -> Answer {
        let headers = format!(
            "{headers}Cookie: {cookie}\r\nContent-Type: application/x-www-form-urlencoded\r\n\
             Content-Length: {}\r\n",
            form.len()
        );
        self.send((self.head("POST", path, &headers) + form).as_bytes())
    }

    /// Logs in to the dashboard with a key; returns the session cookie.
    pub fn log_in(&self, key: &str) -> String {
        self.form("/dashboard/login", "", OURS, &format!("key={key}")).cookie()
    }

    pub fn delete(&self, path: &str) -> Answer {
        self.send(self.head("DELETE", path, "").as_bytes())
    }

    /// Uploads a batch input file.
    pub fn upload(&self, content: &[u8]) -> Answer {
        let mut body = b"--x\r\nContent-Disposition: form-data; name=\"purpose\"\r\n\r\nbatch\r\n\
            --x\r\nContent-Disposition: form-data; name=\"file\"; filename=\"in.jsonl\"\r\n\
            Content-Type: application/octet-stream\r\n\r\n"
            .to_vec();
        body.extend_from_slice(content);
        body.extend_from_slice(b"\r\n--x--\r\n");
        self.request("POST", "/v1/files", "multipart/form-data; boundary=x", &body)
    }

    /// Uploads a file of chats and creates a batch of it; returns the batch id.
    pub fn batch(&self, content: &[u8], window: &str) -> String {
        self.batch_for("/v1/chat/completions", content, window)
    }

    /// Uploads a file and creates a batch of it; returns the batch id.
    pub fn batch_for(&self, endpoint: &str, content: &[u8], window: &str) -> String {
        let file = self.upload(content);
        assert_eq!(file.status, 200, "{}", file.text());
        let asked = json!({
            "input_file_id": file.json()["id"],
            "endpoint": endpoint,
            "completion_window": window,
            "metadata": { "for": "a test" },
        });
        let batch = self.post("/v1/batches", &asked);
        assert_eq!(batch.status, 200, "{}", batch.text());
        assert_eq!(batch.json()["status"], "validating");
        batch.json()["id"].as_str().unwrap().to_owned()
    }

    /// Waits until a batch is in a terminal state.
    pub fn finished(&self, batch: &str) -> Value {
        let started = Instant::now();
        loop {
            let now = self.get(&format!("/v1/batches/{batch}")).json();
            let state = now["status"].as_str().unwrap();
            if ["completed", "failed", "expired", "cancelled"].contains(&state) {
                return now;
            }
            assert!(started.elapsed() < Duration::from_secs(180), "not finished: {now}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Returns lines of a file.
    pub fn lines(&self, file: &Value) -> Vec<Value> {
        let content = self.get(&format!("/v1/files/{}/content", file.as_str().unwrap()));
        assert_eq!(content.status, 200);
        content.text().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }
}
