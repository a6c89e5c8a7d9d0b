//! `cargo xtask upgrade --from PROGRAM`: replaces a fleet of an earlier release by this one while both work.
//!
//! Workers, admins and producers of both releases run side by side, before and after each migration. No
//! process may fail, no job may spend an attempt, and every batch must end with the answers of an
//! undisturbed run.

use std::{
    fs,
    path::{Path, PathBuf},
    thread::sleep,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail, ensure};
use tritmill_servers::{Postgres, Redis, Signal};

use super::{
    LINES, TICK, checks,
    fleet::{Admin, Environment, Producer, Server, Worker, answers},
    lines,
};
use crate::process::{self, cargo, root};

/// The longest time for the batches that are in progress when a release's producers end.
const FINISH_LIMIT: Duration = Duration::from_secs(300);

/// Starts batches of one kind, each when the one before has ended.
struct Load {
    environment: Environment,
    name: &'static str,
    batches: usize,
    producer: Option<Producer>,
    is_ending: bool,
}

struct Upgrade {
    postgres: Postgres,
    redis: Redis,
    input: PathBuf,
    expected: Vec<String>,
    workers: Vec<Worker>,
    loads: Vec<Load>,
    batches: usize,
    started: Instant,
}

pub fn run(arguments: &[String]) -> anyhow::Result<()> {
    let (from, seconds) = parse(arguments)?;
    process::run(cargo().args(["build", "--workspace", "--bins", "--tests"]))?;
    let folder = tempfile::Builder::new().prefix("tritmill-upgrade-").tempdir()?;
    let outcome = upgrade(folder.path(), from, Duration::from_secs_f64(seconds));
    if outcome.is_err() {
        // The files are kept for the investigation.
        println!("logs and files: {}", folder.keep().display());
    }
    outcome
}

fn upgrade(folder: &Path, from: PathBuf, phase: Duration) -> anyhow::Result<()> {
    let postgres = Postgres::start()?;
    let redis = Redis::start_durable()?;
    let new = Environment {
        program: root().join("target/debug/tritmill"),
        redis_url: redis.url(),
        database_url: postgres.url(),
        folder: folder.to_owned(),
        attempts: 3,
        server: None,
    };
    let old = Environment { program: from, ..new.clone() };
    let input = folder.join("in.jsonl");
    fs::write(&input, lines())?;
    let output = folder.join("undisturbed.jsonl");
    let mut undisturbed = new.command(&["batch", "run"])?;
    undisturbed.arg(&input).arg("-o").arg(&output);
    process::run(undisturbed.env_remove("REDIS_URL").env_remove("DATABASE_URL"))?;
    process::run(&mut old.command(&["migrate"])?)?;
    let mut upgrade = Upgrade {
        postgres,
        redis,
        input,
        expected: answers(&output)?,
        workers: Vec::new(),
        loads: Vec::new(),
        batches: 0,
        started: Instant::now(),
    };

    let old_admin = Admin::start(&old)?;
    let key = key(&old)?;
    let through = |admin: &Admin| Some(Server { url: admin.url(), key: key.clone() });
    upgrade.start_worker(&old)?;
    upgrade.start_worker(&old)?;
    upgrade.load("earlier producer", old.clone());
    upgrade.load("earlier API", Environment { server: through(&old_admin), ..old.clone() });
    upgrade.phase("the earlier release alone", phase)?;

    let migration = Instant::now();
    process::run(&mut new.command(&["migrate"])?)?;
    upgrade.phase(&format!("migrated in {:?}", migration.elapsed()), phase)?;

    let new_admin = Admin::start(&new)?;
    upgrade.start_worker(&new)?;
    upgrade.load("new producer", new.clone());
    upgrade.load("new API", Environment { server: through(&new_admin), ..new.clone() });
    upgrade.phase("both releases", phase)?;
    upgrade.drain_first_worker()?;
    upgrade.phase("a worker of each release", phase)?;

    upgrade.end_loads("earlier")?;
    old_admin.stop()?;
    upgrade.drain_first_worker()?;
    upgrade.start_worker(&new)?;
    upgrade.phase("this release alone", phase)?;
    let finish = Instant::now();
    process::run(&mut new.command(&["migrate", "--finish"])?)?;
    upgrade.phase(&format!("finished in {:?}", finish.elapsed()), phase)?;
    upgrade.end_loads("")?;
    new_admin.stop()?;
    while !upgrade.workers.is_empty() {
        upgrade.drain_first_worker()?;
    }
    upgrade.check()
}

/// Creates a key for batches.
fn key(environment: &Environment) -> anyhow::Result<String> {
    let mut create = environment.command(&["keys", "create"])?;
    let created = create.stdout(std::process::Stdio::piped()).output()?;
    ensure!(created.status.success(), "keys create ended with {}", created.status);
    Ok(String::from_utf8(created.stdout)?.trim().to_owned())
}

impl Upgrade {
    fn start_worker(&mut self, environment: &Environment) -> anyhow::Result<()> {
        self.workers.push(Worker::start(environment)?.context("a worker did not start")?);
        Ok(())
    }

    fn load(&mut self, name: &'static str, environment: Environment) {
        self.loads.push(Load { environment, name, batches: 0, producer: None, is_ending: false });
    }

    /// Keeps the loads running for a time.
    fn phase(&mut self, name: &str, time: Duration) -> anyhow::Result<()> {
        println!("{:6.1} s  {name}", self.started.elapsed().as_secs_f64());
        let until = Instant::now() + time;
        while Instant::now() < until {
            self.tick()?;
        }
        Ok(())
    }

    /// Checks every process, and starts the next batch of each load that has finished one.
    fn tick(&mut self) -> anyhow::Result<()> {
        for worker in &mut self.workers {
            let ended = worker.process.0.try_wait()?;
            ensure!(ended.is_none(), "a worker ended with {ended:?}");
            worker.scrape();
        }
        for load in &mut self.loads {
            if let Some(producer) = &mut load.producer {
                let is_finished = producer.is_finished()?;
                ensure!(producer.restarts == 0, "a batch of the {} failed", load.name);
                if !is_finished {
                    continue;
                }
                let found = answers(&producer.output)?;
                ensure!(found == self.expected, "{} differs", producer.output.display());
                load.batches += 1;
                load.producer = None;
            }
            if !load.is_ending {
                self.batches += 1;
                let output = load.environment.folder.join(format!("out-{}.jsonl", self.batches));
                load.producer = Some(Producer::start(&load.environment, &self.input, output)?);
            }
        }
        sleep(TICK);
        Ok(())
    }

    /// Waits for the last batches of the loads with this prefix, and removes these loads.
    fn end_loads(&mut self, prefix: &str) -> anyhow::Result<()> {
        let is_concerned = |load: &Load| load.name.starts_with(prefix);
        for load in self.loads.iter_mut().filter(|load| is_concerned(load)) {
            load.is_ending = true;
        }
        let started = Instant::now();
        while self.loads.iter().any(|load| is_concerned(load) && load.producer.is_some()) {
            ensure!(started.elapsed() < FINISH_LIMIT, "a batch did not end in {FINISH_LIMIT:?}");
            self.tick()?;
        }
        for load in self.loads.extract_if(.., |load| is_concerned(load)) {
            ensure!(load.batches > 0, "no batch of the {} ended", load.name);
            println!("          {}: {} batches of {LINES} lines", load.name, load.batches);
        }
        Ok(())
    }

    fn drain_first_worker(&mut self) -> anyhow::Result<()> {
        let mut worker = self.workers.remove(0);
        worker.scrape();
        Signal::Terminate.send(worker.process.0.id())?;
        let status = worker.process.0.wait().context("cannot wait for a worker")?;
        ensure!(status.success(), "a drained worker ended with {status}");
        for (name, count) in &worker.counters {
            let is_failure = !name.ends_with("jobs_completed_total");
            ensure!(!is_failure || *count == 0, "{name} of a worker is {count}");
        }
        Ok(())
    }

    fn check(&self) -> anyhow::Result<()> {
        let port = self.postgres.port();
        let jobs = checks::number(port, "SELECT count(*) FROM all_jobs")?;
        let expected = (self.batches * LINES) as u64;
        ensure!(jobs == expected, "{jobs} jobs of {expected} lines");
        for (sql, problem) in [
            ("SELECT count(*) FROM all_jobs WHERE state <> 'completed'", "are not completed"),
            ("SELECT count(*) FROM all_jobs WHERE attempts > 0", "spent an attempt"),
            ("SELECT count(*) FROM open_jobs", "are still rows of open_jobs"),
        ] {
            let count = checks::number(port, sql)?;
            ensure!(count == 0, "{count} jobs {problem}");
        }
        let results = checks::number(port, "SELECT count(*) FROM results")?;
        ensure!(results == jobs, "{jobs} jobs have {results} results");
        checks::streams_are_empty(std::slice::from_ref(&self.redis))?;
        println!("{} batches, {jobs} jobs, each with one result; no call failed", self.batches);
        Ok(())
    }
}

fn parse(arguments: &[String]) -> anyhow::Result<(PathBuf, f64)> {
    let (mut from, mut seconds) = (None, 20.0);
    let mut arguments = arguments.iter();
    while let Some(name) = arguments.next() {
        let value = arguments.next().with_context(|| format!("{name} needs a value"))?;
        match name.as_str() {
            "--from" => from = Some(PathBuf::from(value)),
            "--seconds" => seconds = value.parse().context("--seconds needs a number")?,
            _ => bail!("unknown option {name} (--from PROGRAM, --seconds S of each phase)"),
        }
    }
    let from = from.context("--from needs the program `tritmill` of the earlier release")?;
    ensure!(from.exists(), "{} does not exist", from.display());
    ensure!(seconds > 0.0 && seconds < 10_000.0, "--seconds must be above 0 and below 10000");
    Ok((from, seconds))
}
