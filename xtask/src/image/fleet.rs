//! Runs a fleet from the image: migrate, the API and two workers, with Redis and Postgres of its own. One
//! worker is told to stop in the middle of a batch.

use std::{fs, os::unix::fs::chown, path::Path};

use anyhow::{Context as _, ensure};
use serde_json::{Value, json};
use tempfile::TempDir;
use tritmill_servers::{Port, Postgres, Redis, Signal};

use super::{
    Buildah, CPU, CUDA,
    containers::{Container, Running, settings, wait_until},
};
use crate::{
    page,
    process::{self, read},
};

/// The image's user and group.
const USER: u32 = 10_001;
/// Lines of the batch: half a minute of work.
const LINES: usize = 10_000;
/// Lines that each worker answers before one is stopped.
const BEFORE_STOP: u64 = 1000;
const COMPLETED: &str = "tritmill_worker_jobs_completed_total";

pub fn run(buildah: &Buildah) -> anyhow::Result<()> {
    check_settings(buildah)?;
    check_cuda(buildah)?;
    // Mounted into the containers. Their user writes there.
    let data = tempfile::Builder::new().prefix("tritmill-image-").tempdir()?;
    chown(data.path(), Some(USER), Some(USER)).context("cannot change the owner of a folder")?;
    let outcome = answer(buildah, data.path());
    if outcome.is_err() {
        println!("logs and files: {}", TempDir::keep(data).display());
    }
    outcome
}

/// Checks what a container runtime reads from the images.
fn check_settings(buildah: &Buildah) -> anyhow::Result<()> {
    for image in [CPU, CUDA] {
        let found = settings(buildah, image)?;
        let expected = [
            ("User", json!(format!("{USER}:{USER}"))),
            ("Entrypoint", json!(["tritmill"])),
            ("Cmd", json!(["doctor"])),
            ("WorkingDir", json!("/data")),
            ("StopSignal", json!("SIGTERM")),
        ];
        for (name, expected) in expected {
            ensure!(found[name] == expected, "{}: {name} is {}", image.name, found[name]);
        }
        let check = &found["Healthcheck"]["Test"];
        let script = json!(["CMD", "bash", "/usr/local/bin/tritmill-healthcheck"]);
        ensure!(*check == script, "{}: the health check is {check}", image.name);
    }
    Ok(())
}

/// Checks that the program of the CUDA image reports the missing driver in one line.
fn check_cuda(buildah: &Buildah) -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let container = Container::create(buildah, CUDA, &[], folder.path())?;
    let report = read(&mut container.program(&["doctor"]))?;
    let line = report.lines().find(|line| line.contains("no CUDA driver"));
    println!("{}", line.with_context(|| format!("no line about the driver:\n{report}"))?);
    // The image selects a GPU, so a command that needs an engine ends with that one line.
    let demo = container.program(&["demo"]).output().context("cannot start buildah")?;
    let said = String::from_utf8_lossy(&demo.stderr);
    let errors: Vec<&str> = said.lines().filter(|line| line.starts_with("error: ")).collect();
    let is_clear = !demo.status.success() && errors.iter().any(|line| line.contains("driver"));
    ensure!(is_clear && !said.contains("panicked"), "demo without a driver: {said}");
    println!("{}", errors.join("\n"));
    Ok(())
}

/// A worker in a container of its own.
struct Worker<'a> {
    container: Container<'a>,
    running: Running,
    port: Port,
}

impl<'a> Worker<'a> {
    fn start(container: Container<'a>, name: &str) -> anyhow::Result<Self> {
        let port = Port::claim()?;
        let listen = format!("127.0.0.1:{}", port.number());
        let words = "worker --model demo --threads 1 --drain 10 --listen";
        let words: Vec<&str> = words.split(' ').chain([&*listen]).collect();
        let mut running = container.start(name, &words)?;
        wait_until("a worker is healthy", || {
            ensure!(running.ended()?.is_none(), "{name} has ended:\n{}", running.log());
            Ok(container.is_healthy(port.number()))
        })?;
        Ok(Self { container, running, port })
    }

    /// Returns how many jobs it has completed; waits for its metrics page.
    fn completed(&self) -> anyhow::Result<u64> {
        let address = format!("127.0.0.1:{}", self.port.number());
        let mut completed = None;
        wait_until("a worker shows its metrics", || {
            completed = page::metrics(&address).and_then(|metrics| metrics.get(COMPLETED).copied());
            Ok(completed.is_some())
        })?;
        completed.context("the wait has ended")
    }
}

/// Answers a batch and checks the answers.
fn answer(buildah: &Buildah, data: &Path) -> anyhow::Result<()> {
    let (redis, postgres) = (Redis::start()?, Postgres::start()?);
    let servers =
        [format!("REDIS_URL={}", redis.url()), format!("DATABASE_URL={}", postgres.url())];
    let create = || Container::create(buildah, CPU, &servers, data);
    let tools = create()?;
    process::run(&mut tools.program(&["migrate"]))?;
    let keys = ["keys", "create", "--tenant", "acme", "--role", "submit"];
    let key = read(&mut tools.program(&keys))?;

    let port = Port::claim()?;
    let listen = format!("127.0.0.1:{}", port.number());
    let (outside, inside) = (format!("http://{listen}"), create()?);
    let mut admin = inside.start("admin", &["admin", "--listen", &listen])?;
    wait_until("the API is healthy", || {
        ensure!(admin.ended()?.is_none(), "the API has ended:\n{}", admin.log());
        Ok(inside.is_healthy(port.number()))
    })?;
    let first = Worker::start(create()?, "worker-1")?;
    let mut second = Worker::start(create()?, "worker-2")?;
    for running in [&admin, &first.running, &second.running] {
        let user = running.user()?;
        ensure!(user == [USER; 2], "a program runs as user {user:?}");
    }

    fs::write(data.join("in.jsonl"), lines())?;
    let words = ["batch", "run", "in.jsonl", "-o", "out.jsonl", "--model", "demo"];
    let producer = Container::create(buildah, CPU, &[format!("TRITMILL_KEY={key}")], data)?;
    let mut batch = producer.start("batch", &[&words[..], &["--server", &outside]].concat())?;
    wait_until("both workers answer", || {
        ensure!(batch.ended()?.is_none(), "the batch ended too early:\n{}", batch.log());
        Ok(first.completed()?.min(second.completed()?) > BEFORE_STOP)
    })?;
    second.running.signal(Signal::Terminate)?;
    second.running.succeed("a worker drains")?;
    ensure!(batch.ended()?.is_none(), "the worker was to stop in the middle of the batch");
    ensure!(second.running.log().contains("is drained"), "{}", second.running.log());
    ensure!(!second.container.is_healthy(second.port.number()), "a stopped worker is healthy");
    let before = first.completed()?;
    batch.succeed("the batch ends")?;
    ensure!(first.container.is_healthy(first.port.number()), "the other worker is not healthy");
    let by_first = first.completed()?;
    ensure!(by_first > before, "the other worker has answered nothing since");
    check_answers(&data.join("out.jsonl"))?;
    admin.signal(Signal::Terminate)?;
    admin.succeed("the API stops")?;
    println!(
        "{LINES} lines were answered once each, {by_first} of them by the worker that was not stopped"
    );
    Ok(())
}

fn lines() -> String {
    let line = |index: usize| {
        let body = json!({
            "model": "demo",
            "messages": [{ "role": "user", "content": format!("Invoice {index} of the {} of March", 1 + index % 28) }],
            "max_tokens": 32,
            "ignore_eos": true,
        });
        let url = "/v1/chat/completions";
        let line =
            json!({ "custom_id": index.to_string(), "method": "POST", "url": url, "body": body });
        format!("{line}\n")
    };
    (0..LINES).map(line).collect()
}

/// Checks that every line has one answer.
fn check_answers(output: &Path) -> anyhow::Result<()> {
    let text = fs::read_to_string(output).with_context(|| output.display().to_string())?;
    let mut found = vec![0; LINES];
    for line in text.lines() {
        let answer: Value = serde_json::from_str(line).context("an answer is not JSON")?;
        let index: usize = answer["custom_id"].as_str().unwrap_or_default().parse()?;
        let is_answered = answer["response"]["status_code"] == 200;
        ensure!(is_answered && index < LINES, "{line}");
        found[index] += 1;
    }
    let wrong = found.iter().position(|count| *count != 1);
    ensure!(wrong.is_none(), "line {wrong:?} does not have one answer");
    Ok(())
}
