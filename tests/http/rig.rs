//! An admin process, and a client that sends what it is told to.

use std::{
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::TcpStream,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use serde_json::{Value, json};
use tritmill_servers::Signal;

use crate::fleet::Fleet;

/// An admin that runs; killed when dropped.
pub struct Admin {
    child: Child,
    pub listen: String,
    /// The first key, if this admin made it.
    pub first_key: Option<String>,
}

impl Admin {
    /// Starts one and waits until it serves.
    pub fn start(fleet: &Fleet, arguments: &[&str]) -> Self {
        let mut command = fleet.command(&["admin", "--json", "--listen", "127.0.0.1:0"]);
        command.args(arguments);
        Self::of(command)
    }

    /// Starts one by its command, which prints JSON.
    pub fn of(mut command: Command) -> Self {
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let Ok(ready) = serde_json::from_str::<Value>(&line) else {
            let mut said = String::new();
            child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
            panic!("admin did not start: {said}");
        };
        // So that it never waits for a reader.
        let stderr = child.stderr.take().unwrap();
        std::thread::spawn(move || std::io::copy(&mut { stderr }, &mut std::io::sink()));
        Self {
            child,
            listen: ready["api"].as_str().or(ready["listen"].as_str()).unwrap().to_owned(),
            first_key: ready["first_key"].as_str().map(str::to_owned),
        }
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn signal(&self, signal: Signal) {
        signal.send(self.pid()).unwrap();
    }

    /// Its exit code, if it ends within `limit`.
    pub fn wait(&mut self, limit: Duration) -> Option<i32> {
        let started = Instant::now();
        while started.elapsed() < limit {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status.code();
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        None
    }

    /// A caller with this key.
    pub fn with(&self, key: &str) -> Caller {
        Caller { listen: self.listen.clone(), key: key.to_owned() }
    }

    /// A caller with the first key.
    pub fn first(&self) -> Caller {
        self.with(self.first_key.as_deref().unwrap())
    }

    /// Kilobytes of memory it has resident.
    pub fn resident_kb(&self) -> u64 {
        self.status("VmRSS:")
    }

    /// Kilobytes of memory it had resident at most.
    pub fn peak_kb(&self) -> u64 {
        self.status("VmHWM:")
    }

    fn status(&self, name: &str) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let line = status.lines().find(|line| line.starts_with(name)).unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    }
}

impl Drop for Admin {
    fn drop(&mut self) {
        // Both fail only for one that has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A key of a tenant's.
pub fn key(fleet: &Fleet, tenant: &str, role: &str) -> String {
    let (code, stdout, stderr) = fleet.run(&["keys", "create", "--tenant", tenant, "--role", role]);
    assert_eq!(code, Some(0), "{stderr}");
    stdout.trim().to_owned()
}

/// What a browser adds to a form of a page of ours.
pub const OURS: &str = "Sec-Fetch-Site: same-origin\r\n";

/// What came back.
#[derive(Debug, Clone)]
pub struct Answer {
    pub status: u16,
    pub head: String,
    pub body: Vec<u8>,
}

impl Answer {
    /// All that comes until the other side hangs up.
    pub fn read(stream: &mut TcpStream) -> Self {
        let mut bytes = Vec::new();
        // A server that hangs up after its answer is as good as one that closes.
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

    /// A header's value.
    pub fn header(&self, name: &str) -> Option<&str> {
        let start = format!("{name}: ");
        self.head.lines().find_map(|line| line.strip_prefix(&start))
    }

    /// The pair of the cookie that it sets.
    pub fn cookie(&self) -> String {
        let cookie = self.header("set-cookie").unwrap_or_else(|| panic!("{}", self.text()));
        cookie.split(';').next().unwrap().to_owned()
    }

    /// Status and `error.code`.
    pub fn error(&self) -> (u16, String) {
        (self.status, self.json()["error"]["code"].as_str().unwrap_or_default().to_owned())
    }

    /// The data of server-sent events.
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

/// Somebody with a key.
#[derive(Clone)]
pub struct Caller {
    listen: String,
    key: String,
}

impl Caller {
    /// Connects, and sends what is given.
    pub fn open(&self, bytes: &[u8]) -> TcpStream {
        let mut stream = TcpStream::connect(&self.listen).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
        // One that is refused early may be cut off while it sends.
        let _ = stream.write_all(bytes);
        stream
    }

    /// Sends bytes as they are.
    pub fn send(&self, bytes: &[u8]) -> Answer {
        Answer::read(&mut self.open(bytes))
    }

    /// The head of a request.
    pub fn head(&self, method: &str, path: &str, headers: &str) -> String {
        let key = match self.key.as_str() {
            "" => String::new(),
            key => format!("Authorization: Bearer {key}\r\n"),
        };
        format!("{method} {path} HTTP/1.1\r\nHost: a\r\n{key}Connection: close\r\n{headers}\r\n")
    }

    /// Sends a body of a type.
    pub fn request(&self, method: &str, path: &str, kind: &str, body: &[u8]) -> Answer {
        let headers = format!("Content-Type: {kind}\r\nContent-Length: {}\r\n", body.len());
        let mut bytes = self.head(method, path, &headers).into_bytes();
        bytes.extend_from_slice(body);
        self.send(&bytes)
    }

    pub fn get(&self, path: &str) -> Answer {
        self.send(self.head("GET", path, "").as_bytes())
    }

    pub fn post(&self, path: &str, body: &Value) -> Answer {
        self.request("POST", path, "application/json", body.to_string().as_bytes())
    }

    /// Opens a page with a session's cookie.
    pub fn page(&self, path: &str, cookie: &str) -> Answer {
        self.send(self.head("GET", path, &format!("Cookie: {cookie}\r\n")).as_bytes())
    }

    /// Sends a form as a page of the dashboard does, or with other headers.
    pub fn form(&self, path: &str, cookie: &str, headers: &str, form: &str) -> Answer {
        let headers = format!(
            "{headers}Cookie: {cookie}\r\nContent-Type: application/x-www-form-urlencoded\r\n\
             Content-Length: {}\r\n",
            form.len()
        );
        self.send((self.head("POST", path, &headers) + form).as_bytes())
    }

    /// Logs in to the dashboard with a key; the session's cookie.
    pub fn log_in(&self, key: &str) -> String {
        self.form("/dashboard/login", "", OURS, &format!("key={key}")).cookie()
    }

    pub fn delete(&self, path: &str) -> Answer {
        self.send(self.head("DELETE", path, "").as_bytes())
    }

    /// Uploads a file.
    pub fn upload(&self, content: &[u8]) -> Answer {
        let mut body = b"--x\r\nContent-Disposition: form-data; name=\"purpose\"\r\n\r\nbatch\r\n\
            --x\r\nContent-Disposition: form-data; name=\"file\"; filename=\"in.jsonl\"\r\n\
            Content-Type: application/octet-stream\r\n\r\n"
            .to_vec();
        body.extend_from_slice(content);
        body.extend_from_slice(b"\r\n--x--\r\n");
        self.request("POST", "/v1/files", "multipart/form-data; boundary=x", &body)
    }

    /// Uploads a file and has it answered; the batch's id.
    pub fn batch(&self, content: &[u8], window: &str) -> String {
        let file = self.upload(content);
        assert_eq!(file.status, 200, "{}", file.text());
        let asked = json!({
            "input_file_id": file.json()["id"],
            "endpoint": "/v1/chat/completions",
            "completion_window": window,
            "metadata": { "for": "a test" },
        });
        let batch = self.post("/v1/batches", &asked);
        assert_eq!(batch.status, 200, "{}", batch.text());
        assert_eq!(batch.json()["status"], "validating");
        batch.json()["id"].as_str().unwrap().to_owned()
    }

    /// The batch once it is over.
    pub fn over(&self, batch: &str) -> Value {
        let started = Instant::now();
        loop {
            let now = self.get(&format!("/v1/batches/{batch}")).json();
            let state = now["status"].as_str().unwrap();
            if ["completed", "failed", "expired", "cancelled"].contains(&state) {
                return now;
            }
            assert!(started.elapsed() < Duration::from_secs(180), "not over: {now}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// The lines of a file.
    pub fn lines(&self, file: &Value) -> Vec<Value> {
        let content = self.get(&format!("/v1/files/{}/content", file.as_str().unwrap()));
        assert_eq!(content.status, 200);
        content.text().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }
}
