//! Batches of the HTTP API that are paused, resumed, retried and cancelled at random while servers and processes fail, the
//! admin among them. Each must end with the answers of an undisturbed run.

use std::{
    collections::BTreeMap,
    fs,
    io::{BufRead as _, BufReader},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail, ensure};
use serde_json::{Value, json};
use tritmill_servers::Random;

use super::fleet::{Environment, Process, answers, field};

/// Lines of a batch.
pub const LINES: usize = 300;
/// Longest pause between two changes.
const PAUSE_MS: usize = 1200;
/// Time limit of a call, in seconds.
const CALL_S: &str = "3";

/// An admin process.
struct Admin {
    process: Process,
    listen: String,
}

/// How far a batch is.
enum Stage {
    Upload,
    /// Its file is uploaded.
    Create(String),
    /// It was created.
    Run(String),
}

/// Batches, one after the other, and the admin that they are changed through.
pub struct ChangedBatches {
    environment: Environment,
    admin: Option<Admin>,
    restart_at: Instant,
    /// The first key, once the first admin has printed it.
    key: String,
    input: PathBuf,
    /// Answers of the undisturbed run.
    expected: Vec<String>,
    random: Random,
    next_at: Instant,
    stage: Stage,
    /// Batches that ended with the expected answers.
    pub ended: usize,
    /// Changes that were accepted, by kind.
    changes: BTreeMap<&'static str, u32>,
}

impl ChangedBatches {
    /// Changes batches of the first lines of a file, with these answers.
    pub fn new(
        environment: &Environment,
        lines: &str,
        expected: &[String],
        seed: u64,
    ) -> anyhow::Result<Self> {
        let input = environment.folder.join("changed.jsonl");
        let some: Vec<&str> = lines.lines().take(LINES).collect();
        fs::write(&input, some.join("\n"))?;
        let is_some = |line: &&String| {
            let number =
                field(line, "custom_id").and_then(|id| id.strip_prefix("line-")?.parse().ok());
            number.is_some_and(|number: usize| number < LINES)
        };
        Ok(Self {
            environment: environment.clone(),
            admin: None,
            restart_at: Instant::now(),
            key: String::new(),
            input,
            expected: expected.iter().filter(is_some).cloned().collect(),
            random: Random::new(seed),
            next_at: Instant::now(),
            stage: Stage::Upload,
            ended: 0,
            changes: BTreeMap::new(),
        })
    }

    /// Kills the admin, which starts again a little later; returns whether it ran.
    pub fn kill_admin(&mut self, after: Duration) -> bool {
        self.restart_at = Instant::now() + after;
        self.admin.take().map(|mut admin| admin.process.kill()).is_some()
    }

    /// Starts the admin if it does not run. It exits if it cannot reach its servers.
    fn keep_admin(&mut self) -> anyhow::Result<()> {
        if let Some(admin) = &mut self.admin
            && admin.process.0.try_wait()?.is_some()
        {
            self.admin = None;
        }
        if self.admin.is_some() || Instant::now() < self.restart_at {
            return Ok(());
        }
        let file = self.environment.folder.join("first-key");
        let mut command = self.environment.command(&[
            "admin",
            "--json",
            "--listen",
            "127.0.0.1:0",
            "--first-key-file",
        ])?;
        let mut child =
            command.arg(&file).stdout(Stdio::piped()).spawn().context("cannot start an admin")?;
        let stdout = child.stdout.take().context("an admin has no standard output")?;
        let mut line = String::new();
        BufReader::new(stdout).read_line(&mut line)?;
        let process = Process(child);
        match field(&line, "listen") {
            Some(listen) => self.admin = Some(Admin { process, listen }),
            None => self.restart_at = Instant::now() + Duration::from_millis(500),
        }
        if self.key.is_empty() && file.exists() {
            self.key = fs::read_to_string(&file)?.trim().to_owned();
        }
        Ok(())
    }

    /// Calls the API; `None` if it does not answer, or answers that its servers are away.
    fn call(&self, path: &str, arguments: &[&str]) -> anyhow::Result<Option<(u16, Vec<u8>)>> {
        let Some(admin) = &self.admin else { return Ok(None) };
        let (url, bearer) = (
            format!("http://{}{path}", admin.listen),
            format!("Authorization: Bearer {}", self.key),
        );
        let output = Command::new("curl")
            .args(["-sS", "--max-time", CALL_S, "-w", "\n%{http_code}", "-H", &bearer])
            .args(arguments)
            .arg(url)
            .stderr(Stdio::null())
            .output()
            .context("cannot run curl")?;
        let Some(at) = output.stdout.iter().rposition(|byte| *byte == b'\n') else {
            return Ok(None);
        };
        let status: u16 = String::from_utf8_lossy(&output.stdout[at + 1..]).parse().unwrap_or(0);
        match status {
            _ if !output.status.success() => Ok(None),
            429 | 500.. => Ok(None),
            status => Ok(Some((status, output.stdout[..at].to_vec()))),
        }
    }

    /// Calls the API for JSON.
    fn json(&self, path: &str, arguments: &[&str]) -> anyhow::Result<Option<(u16, Value)>> {
        let Some((status, body)) = self.call(path, arguments)? else { return Ok(None) };
        let body =
            serde_json::from_slice(&body).with_context(|| format!("{path} answered {status}"))?;
        Ok(Some((status, body)))
    }

    fn post(&self, path: &str, body: &Value, key: &str) -> anyhow::Result<Option<(u16, Value)>> {
        let (body, key) = (body.to_string(), format!("Idempotency-Key: {key}"));
        let arguments = ["-H", "Content-Type: application/json", "-H", &key, "-d", &body];
        self.json(path, &arguments)
    }

    /// Takes the next step of the batch. `change` says whether it is changed at random; without that it is brought to its
    /// end.
    pub fn act(&mut self, change: bool) -> anyhow::Result<()> {
        self.keep_admin()?;
        if Instant::now() < self.next_at || self.admin.is_none() {
            return Ok(());
        }
        let pause = self.random.below(PAUSE_MS) as u64;
        self.next_at = Instant::now() + Duration::from_millis(pause);
        match &self.stage {
            Stage::Upload => {
                let file = format!("file=@{}", self.input.display());
                let uploaded = self.json("/v1/files", &["-F", "purpose=batch", "-F", &file])?;
                if let Some((200, file)) = uploaded {
                    let id = file["id"].as_str().context("a file without an id")?;
                    self.stage = Stage::Create(id.to_owned());
                }
            }
            Stage::Create(file) => {
                let body = json!({
                    "input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": "24h",
                });
                match self.post("/v1/batches", &body, &format!("changed-{}", self.ended))? {
                    Some((200, batch)) => {
                        let id = batch["id"].as_str().context("a batch without an id")?;
                        self.stage = Stage::Run(id.to_owned());
                    }
                    Some((status, body)) => bail!("a batch was refused ({status}): {body}"),
                    None => {}
                }
            }
            Stage::Run(id) => {
                let path = format!("/v1/batches/{id}");
                let Some((200, batch)) = self.json(&path, &[])? else { return Ok(()) };
                if self.has_ended(&batch)? {
                    self.ended += 1;
                    self.stage = Stage::Upload;
                    return Ok(());
                }
                let (what, body) = self.next_change(&batch, change);
                if what.is_empty() {
                    return Ok(());
                }
                let key = format!("change-{}", self.random.below(1 << 30));
                match self.post(&format!("{path}/{what}"), &body, &key)? {
                    Some((200, _)) => *self.changes.entry(what).or_default() += 1,
                    // The batch was in another state by then.
                    Some((400 | 409, _)) | None => {}
                    Some((status, body)) => bail!("{what} was refused ({status}): {body}"),
                }
            }
        }
        Ok(())
    }

    /// Returns the next change of a batch, or an empty word.
    fn next_change(&mut self, batch: &Value, change: bool) -> (&'static str, Value) {
        let needed = match batch["status"].as_str() {
            Some("paused" | "cancelled") => "resume",
            Some("completed" | "expired") => "retry",
            _ => "",
        };
        if !change {
            return (needed, json!({}));
        }
        match self.random.below(8) {
            0 => ("pause", json!({})),
            1 => ("pause", json!({ "now": true })),
            2 => ("cancel", json!({})),
            3 => ("retry", json!({})),
            4 | 5 => ("resume", json!({})),
            _ => (needed, json!({})),
        }
    }

    /// Returns whether a batch has all its answers; checks them.
    fn has_ended(&self, batch: &Value) -> anyhow::Result<bool> {
        let counts = &batch["request_counts"];
        if batch["status"] != "completed" || counts["completed"] != LINES {
            return Ok(false);
        }
        ensure!(counts["failed"] == 0 && counts["total"] == LINES, "wrong counts: {counts}");
        let file = batch["output_file_id"].as_str().context("a batch without an output file")?;
        let output = self.environment.folder.join("changed-out.jsonl");
        let Some((200, content)) = self.call(&format!("/v1/files/{file}/content"), &[])? else {
            return Ok(false);
        };
        fs::write(&output, content)?;
        self.compare(&output)?;
        Ok(true)
    }

    fn compare(&self, output: &Path) -> anyhow::Result<()> {
        let found = answers(output)?;
        for (found, expected) in found.iter().zip(&self.expected) {
            ensure!(found == expected, "a changed batch differs:\n  {found}\n  {expected}");
        }
        ensure!(found.len() == LINES, "{} answers of {LINES} in a changed batch", found.len());
        Ok(())
    }

    /// Whether no batch is under way.
    pub fn is_idle(&self) -> bool {
        matches!(self.stage, Stage::Upload)
    }

    /// Returns the number of changes of each kind.
    pub fn summary(&self) -> String {
        let changes = self.changes.iter().map(|(what, count)| format!("{what} {count}"));
        let changes = changes.collect::<Vec<_>>().join(", ");
        format!("{} batches of {LINES} lines ended after changes: {changes}", self.ended)
    }

    /// Returns the answers that each batch has.
    pub fn expected(&self) -> &[String] {
        &self.expected
    }
}
