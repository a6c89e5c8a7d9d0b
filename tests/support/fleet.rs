//! A Redis, a Postgres and workers for one test, and the program run against them.

use std::{
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::TcpStream,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use serde_json::{Value, json};
use tritmill_servers::{Postgres, Redis, Signal};

/// Returns batch lines for the demo model with short answers.
pub fn questions(count: usize) -> String {
    let line = |index: usize| {
        let text = format!("Invoice {index} was paid on the {} of March, 2024", 1 + index % 28);
        let body = json!({
            "messages": [{ "role": "user", "content": text }],
            "max_tokens": 12 + index % 9,
            "temperature": if index.is_multiple_of(3) { 0.0 } else { 1.0 },
        });
        let url = "/v1/chat/completions";
        let line =
            json!({ "custom_id": format!("q{index}"), "method": "POST", "url": url, "body": body });
        format!("{line}\n")
    };
    (0..count).map(line).collect()
}

/// Returns the program without variables of other servers and exporters.
pub fn program(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tritmill"));
    command.args(arguments).env_remove("REDIS_URL").env_remove("DATABASE_URL");
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("OTEL_")) {
        command.env_remove(name);
    }
    command.stdin(Stdio::null());
    command
}

/// Returns a file for the first key, outside of the current folder.
fn first_key_file(port: u16) -> String {
    format!("{}/first-key-{port}", env!("CARGO_TARGET_TMPDIR"))
}

/// Both servers.
pub struct Fleet {
    pub redis: Redis,
    pub postgres: Postgres,
}

impl Fleet {
    /// Starts both servers and migrates the database.
    pub fn start() -> Self {
        let fleet = Self::empty();
        let migrated = fleet.command(&["migrate"]).output().unwrap();
        assert!(migrated.status.success(), "{}", String::from_utf8_lossy(&migrated.stderr));
        fleet
    }

    /// Starts both servers without the schema.
    pub fn empty() -> Self {
        Self { redis: Redis::start().unwrap(), postgres: Postgres::start().unwrap() }
    }

    /// Returns the program with the URLs of the servers in its environment.
    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = program(arguments);
        command.env("REDIS_URL", self.redis.url()).env("DATABASE_URL", self.postgres.url());
        command.env("TRITMILL_FIRST_KEY_FILE", first_key_file(self.redis.port()));
        command
    }

    /// Runs the program; returns its exit code, standard output and standard error.
    pub fn run(&self, arguments: &[&str]) -> (Option<i32>, String, String) {
        run(&mut self.command(arguments))
    }

    /// Returns the number of keys in Redis.
    pub fn redis_keys(&self) -> u64 {
        let mut stream = TcpStream::connect(("127.0.0.1", self.redis.port())).unwrap();
        stream.write_all(b"DBSIZE\r\n").unwrap();
        let mut line = String::new();
        BufReader::new(stream).read_line(&mut line).unwrap();
        line.trim_start_matches(':').trim().parse().unwrap()
    }

    /// Deletes everything in Redis.
    pub fn flush_redis(&self) {
        let mut stream = TcpStream::connect(("127.0.0.1", self.redis.port())).unwrap();
        stream.write_all(b"FLUSHALL\r\n").unwrap();
        let mut answer = String::new();
        BufReader::new(stream).read_line(&mut answer).unwrap();
        assert_eq!(answer.trim(), "+OK");
    }

    /// Returns the number of rows of these tables together.
    pub fn rows(&self, tables: &[&str]) -> u64 {
        let count = |table: &&str| format!("(SELECT count(*) FROM {table})");
        let sum = tables.iter().map(count).collect::<Vec<_>>().join(" + ");
        self.sql(&format!("SELECT {sum}")).trim().parse().unwrap()
    }

    /// Runs a statement; returns what psql prints.
    pub fn sql(&self, statement: &str) -> String {
        let psql = Command::new("psql").args(["-Atc", statement, &self.postgres.url()]).output();
        let output = psql.unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }

    /// Starts a worker with the demo model and waits until it is ready.
    pub fn worker(&self, arguments: &[&str]) -> WorkerProcess {
        self.serve("worker", arguments)
    }

    /// Starts `worker` or `standalone` and waits until it is ready.
    pub fn serve(&self, command: &str, arguments: &[&str]) -> WorkerProcess {
        let mut command = self.command(&[command, "--json", "--threads", "1", "--lease", "2"]);
        command.args(arguments).stderr(Stdio::piped());
        WorkerProcess::start(command)
    }
}

/// A running worker or admin, killed when dropped.
pub struct WorkerProcess {
    child: KillOnDrop,
    listen: String,
    /// Incarnation id of a worker.
    pub owner: String,
    /// The line that it printed when it was ready.
    pub ready: Value,
}

impl WorkerProcess {
    /// Starts a command with `--json` and waits for the line that says it is ready.
    pub fn start(mut command: Command) -> Self {
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let stderr = child.stderr.take();
        let Ok(ready) = serde_json::from_str::<Value>(&line) else {
            let mut said = String::new();
            stderr.map(|mut stderr| stderr.read_to_string(&mut said).unwrap());
            panic!("the process did not start: {said}");
        };
        if let Some(mut stderr) = stderr {
            // The process would block on a full pipe.
            std::thread::spawn(move || std::io::copy(&mut stderr, &mut std::io::sink()));
        }
        let listen = ready["listen"].as_str().unwrap().to_owned();
        let owner = ready["owner"].as_str().unwrap_or_default().to_owned();
        Self { child: KillOnDrop(child), listen, owner, ready }
    }

    pub fn pid(&self) -> u32 {
        self.child.0.id()
    }

    pub fn signal(&self, signal: Signal) {
        signal.send(self.pid()).unwrap();
    }

    /// Returns the exit code if the process exits within `limit`.
    pub fn wait(&mut self, limit: Duration) -> Option<i32> {
        self.child.wait(limit)
    }

    /// Returns status and body of a page of the worker's health and metrics server.
    pub fn get(&self, path: &str) -> (u16, String) {
        let mut stream = TcpStream::connect(&self.listen).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        write!(stream, "GET {path} HTTP/1.1\r\nHost: w\r\nConnection: close\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let status = answer.split(' ').nth(1).unwrap().parse().unwrap();
        let body = answer.split_once("\r\n\r\n").map_or("", |(_, body)| body).to_owned();
        (status, body)
    }
}

/// A process that is killed when it is dropped.
pub struct KillOnDrop(pub Child);

impl KillOnDrop {
    /// Returns the exit code if the process exits within `limit`.
    pub fn wait(&mut self, limit: Duration) -> Option<i32> {
        let started = Instant::now();
        while started.elapsed() < limit {
            if let Some(status) = self.0.try_wait().unwrap() {
                return status.code();
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        None
    }
}

impl Drop for KillOnDrop {
    fn drop(&mut self) {
        // Both fail only for a process that has exited.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Runs a command; returns its exit code, standard output and standard error.
pub fn run(command: &mut Command) -> (Option<i32>, String, String) {
    let output = command.output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.code(), text(output.stdout), text(output.stderr))
}

/// Returns the value of a series on a metrics page; `None` if the page does not have it.
pub fn series(page: &str, name: &str) -> Option<f64> {
    let line = page.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    line.map(|value| value.parse().unwrap())
}

/// Waits until a condition holds; fails after a minute.
pub fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let started = Instant::now();
    while !holds() {
        assert!(started.elapsed() < Duration::from_secs(60), "not within a minute: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}
