//! The processes under attack: workers and producers, connected to their servers through proxies.

use std::{
    collections::HashMap,
    fs::{self, File},
    io::{BufRead as _, BufReader},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Duration,
};

use anyhow::{Context as _, ensure};

use crate::page;

/// Lease of the workers: short, so that many leases end within a minute.
pub const LEASE: Duration = Duration::from_secs(2);

/// What every process is started with.
#[derive(Clone)]
pub struct Environment {
    pub program: PathBuf,
    pub redis_url: String,
    pub database_url: String,
    /// Folder of logs and files.
    pub folder: PathBuf,
    /// Maximum number of attempts of each job.
    pub attempts: u32,
}

impl Environment {
    pub fn command(&self, arguments: &[&str]) -> anyhow::Result<Command> {
        let log = File::options().create(true).append(true).open(self.folder.join("log"))?;
        let mut command = Command::new(&self.program);
        command
            .args(arguments)
            .env("REDIS_URL", &self.redis_url)
            .env("DATABASE_URL", &self.database_url)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log);
        Ok(command)
    }
}

/// A process that is killed when it is dropped.
pub struct Process(pub Child);

impl Process {
    /// Kills the process and waits until it has exited.
    pub fn kill(&mut self) {
        // Both fail only for a process that has exited.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// A worker process.
pub struct Worker {
    pub process: Process,
    /// Incarnation id, as in the `owner` column of jobs.
    pub owner: String,
    listen: String,
    /// Counters as last scraped; the process loses its own when it exits.
    pub counters: HashMap<String, u64>,
}

/// Metrics that are summed over all workers of a run.
pub const COUNTERS: [&str; 4] = [
    "tritmill_worker_jobs_completed_total",
    "tritmill_worker_results_fenced_total",
    "tritmill_worker_leases_lost_total",
    "tritmill_worker_dependency_failures_total",
];

impl Worker {
    /// Starts a worker; `None` if it exited because it could not reach its servers.
    pub fn start(environment: &Environment) -> anyhow::Result<Option<Self>> {
        let lease = LEASE.as_secs_f64().to_string();
        let words = "worker --json --threads 1 --max-sequences 16 --drain 5 --lease";
        let words: Vec<&str> = words.split(' ').chain([&*lease]).collect();
        let mut command = environment.command(&words)?;
        let mut child = command.stdout(Stdio::piped()).spawn().context("cannot start a worker")?;
        let stdout = child.stdout.take().context("a worker has no standard output")?;
        let mut line = String::new();
        BufReader::new(stdout).read_line(&mut line)?;
        let (Some(owner), Some(listen)) = (field(&line, "owner"), field(&line, "listen")) else {
            let _ = child.wait();
            return Ok(None);
        };
        Ok(Some(Self { process: Process(child), owner, listen, counters: HashMap::new() }))
    }

    /// Reads the counters, if the worker answers.
    pub fn scrape(&mut self) {
        for (name, value) in page::metrics(&self.listen).unwrap_or_default() {
            if COUNTERS.contains(&&*name) {
                self.counters.insert(name, value);
            }
        }
    }
}

/// Returns the value of a string in one line of JSON.
pub fn field(line: &str, name: &str) -> Option<String> {
    let (_, rest) = line.split_once(&format!("\"{name}\":\""))?;
    rest.split_once('"').map(|(value, _)| value.to_owned())
}

/// A `batch run` that is restarted until it succeeds.
pub struct Producer {
    pub process: Process,
    pub output: PathBuf,
    /// How many times it was started again.
    pub restarts: u32,
    input: PathBuf,
    environment: Environment,
}

impl Producer {
    pub fn start(environment: &Environment, input: &Path, output: PathBuf) -> anyhow::Result<Self> {
        let process = Self::spawn(environment, input, &output)?;
        let (input, environment) = (input.to_owned(), environment.clone());
        Ok(Self { process, output, restarts: 0, input, environment })
    }

    fn spawn(environment: &Environment, input: &Path, output: &Path) -> anyhow::Result<Process> {
        let attempts = environment.attempts.to_string();
        let mut command = environment.command(&["batch", "run"])?;
        command.args(["--attempts", &attempts]).arg(input).arg("-o").arg(output);
        command.spawn().map(Process).context("cannot start a producer")
    }

    /// Returns whether every line is answered; restarts a producer that exited before that.
    pub fn is_finished(&mut self) -> anyhow::Result<bool> {
        let Some(status) = self.process.0.try_wait()? else { return Ok(false) };
        if status.success() {
            return Ok(true);
        }
        ensure!(
            status.code() != Some(2),
            "lines of {} ended in errors: see {}",
            self.output.display(),
            self.environment.folder.join("log").display()
        );
        self.restarts += 1;
        self.process = Self::spawn(&self.environment, &self.input, &self.output)?;
        Ok(false)
    }
}

/// Returns output lines sorted by custom_id, without `created`, which may differ between runs.
pub fn answers(path: &Path) -> anyhow::Result<Vec<String>> {
    let text = fs::read_to_string(path).with_context(|| format!("{}", path.display()))?;
    let mut lines: Vec<String> = text.lines().map(without_created).collect();
    lines.sort();
    Ok(lines)
}

fn without_created(line: &str) -> String {
    let Some((before, rest)) = line.split_once("\"created\":") else { return line.to_owned() };
    let after = rest.trim_start_matches(|c: char| c.is_ascii_digit());
    format!("{before}\"created\":0{after}")
}
