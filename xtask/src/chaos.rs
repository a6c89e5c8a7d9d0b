//! `cargo xtask chaos`: workers and producers run while a seeded nemesis kills, freezes and
//! disconnects processes; then the guarantees are checked.
//!
//! Every batch must end with the answers of an undisturbed run in one process, byte for byte, also those of the HTTP API
//! that are paused, resumed, retried and cancelled meanwhile; every job must have one result row; usage must be counted once; Redis must hold no entries at the end. When
//! only servers fail, no job may spend an attempt.

mod changed;
mod checks;
mod fleet;
mod nemesis;
mod options;
mod proxy;
mod redis;

use std::{
    fs,
    path::{Path, PathBuf},
    thread::sleep,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail, ensure};
use tritmill_servers::{Postgres, Signal};

use self::{
    changed::ChangedBatches,
    checks::Statistics,
    fleet::{Environment, Producer, Worker, answers},
    nemesis::Nemesis,
    options::{HELP, Options, parse},
    proxy::Proxy,
    redis::RedisNodes,
};
use super::process::{self, built, cargo};

const PRODUCERS: usize = 2;
/// Lines of a batch: some seconds of work.
const LINES: usize = 1500;
/// Longest time for the unfinished batches once the nemesis has stopped.
const FINISH_LIMIT: Duration = Duration::from_secs(180);
const TICK: Duration = Duration::from_millis(20);
const SCRAPE_INTERVAL: Duration = Duration::from_millis(500);

/// The servers, workers and producers of one run, and its results so far.
struct Cluster {
    redis: RedisNodes,
    postgres: Postgres,
    /// Proxies in front of the nodes of Redis, then the one of Postgres.
    proxies: Vec<Proxy>,
    environment: Environment,
    workers: Vec<Option<Worker>>,
    /// Time at which to start the stopped worker of the same index.
    restart_at: Vec<Option<Instant>>,
    producers: Vec<Producer>,
    changed: ChangedBatches,
    input: PathBuf,
    /// Answers of the undisturbed run.
    expected: Vec<String>,
    batches_started: usize,
    statistics: Statistics,
}

pub fn run(arguments: &[String]) -> anyhow::Result<()> {
    if arguments.iter().any(|argument| argument == "--help") {
        print!("{HELP}");
        return Ok(());
    }
    let options = parse(arguments)?;
    let Options { minutes, seed, workers, attempts, faults, redis } = options;
    // With the tests, as `cargo xtask test` builds: their dependencies enable features of their own.
    process::run(cargo().args(["build", "--workspace", "--bins", "--tests"]))?;
    let folder = tempfile::Builder::new().prefix("tritmill-chaos-").tempdir()?;
    let mut cluster = Cluster::start(folder.path(), &options)?;
    println!(
        "seed {seed}: {minutes} minutes, {workers} workers, {PRODUCERS} producers, {attempts} \
         attempts, faults of {}, redis {}",
        faults.as_str(),
        redis.as_str()
    );
    let mut nemesis = Nemesis::new(seed, faults, redis);
    let until = Instant::now() + Duration::from_secs_f64(minutes * 60.0);
    let mut scrape_at = Instant::now();
    let outcome = (|| {
        while Instant::now() < until {
            nemesis.act(&mut cluster)?;
            cluster.restart_workers()?;
            cluster.check_producers()?;
            cluster.start_producers()?;
            cluster.changed.act(true)?;
            if Instant::now() >= scrape_at {
                scrape_at = Instant::now() + SCRAPE_INTERVAL;
                cluster.scrape();
            }
            sleep(TICK);
        }
        nemesis.repair_all(&mut cluster)?;
        cluster.finish()?;
        checks::run(&mut cluster, faults)
    })();
    println!("{}", nemesis.summary());
    println!("{}", cluster.changed.summary());
    if let Some(promotions) = cluster.redis.summary()? {
        println!("{promotions}");
    }
    println!("{}", cluster.statistics);
    if outcome.is_err() {
        // The files are kept for the investigation.
        println!("logs and files: {}", folder.keep().display());
    }
    outcome
}

impl Cluster {
    fn start(folder: &Path, options: &Options) -> anyhow::Result<Self> {
        let redis = RedisNodes::start(options.redis)?;
        let (postgres, proxy) = (Postgres::start_with(&["fsync=off"])?, Proxy::start()?);
        proxy.forward_to(postgres.port());
        let environment = Environment {
            program: built().join("debug/tritmill"),
            redis_url: redis.url(),
            database_url: format!("postgres://postgres@127.0.0.1:{}/postgres", proxy.port()),
            folder: folder.to_owned(),
            attempts: options.attempts,
        };
        process::run(environment.command(&["migrate"])?.env("DATABASE_URL", postgres.url()))?;
        let input = folder.join("in.jsonl");
        let lines = lines();
        fs::write(&input, &lines)?;
        let output = folder.join("undisturbed.jsonl");
        let mut undisturbed = environment.command(&["batch", "run"])?;
        undisturbed.arg(&input).arg("-o").arg(&output);
        process::run(undisturbed.env_remove("REDIS_URL").env_remove("DATABASE_URL"))?;
        let expected = answers(&output)?;
        ensure!(expected.len() == LINES, "{} answers to {LINES} lines", expected.len());
        let changed = ChangedBatches::new(&environment, &lines, &expected, options.seed)?;
        let mut cluster = Self {
            proxies: redis.proxies().iter().cloned().chain([proxy]).collect(),
            redis,
            postgres,
            environment,
            workers: (0..options.workers).map(|_| None).collect(),
            restart_at: vec![Some(Instant::now()); options.workers],
            producers: Vec::new(),
            changed,
            input,
            expected,
            batches_started: 0,
            statistics: Statistics::default(),
        };
        cluster.restart_workers()?;
        cluster.start_producers()?;
        Ok(cluster)
    }

    /// Records workers that have exited and starts the workers that are due.
    fn restart_workers(&mut self) -> anyhow::Result<()> {
        for index in 0..self.workers.len() {
            if let Some(worker) = &mut self.workers[index]
                && worker.process.0.try_wait()?.is_some()
            {
                self.remove_worker(index);
            }
            if self.restart_at[index].is_some_and(|at| at <= Instant::now()) {
                self.workers[index] = Worker::start(&self.environment)?;
                let again = Instant::now() + Duration::from_millis(500);
                self.restart_at[index] = self.workers[index].is_none().then_some(again);
            }
        }
        Ok(())
    }

    /// Removes the producers that have finished and compares their answers.
    fn check_producers(&mut self) -> anyhow::Result<()> {
        let mut running = Vec::new();
        for mut producer in std::mem::take(&mut self.producers) {
            if producer.is_finished()? {
                self.compare(&producer)?;
            } else {
                running.push(producer);
            }
        }
        self.producers = running;
        Ok(())
    }

    fn start_producers(&mut self) -> anyhow::Result<()> {
        while self.producers.len() < PRODUCERS {
            self.batches_started += 1;
            let output = format!("out-{}.jsonl", self.batches_started);
            let output = self.environment.folder.join(output);
            self.producers.push(Producer::start(&self.environment, &self.input, output)?);
        }
        Ok(())
    }

    fn compare(&mut self, producer: &Producer) -> anyhow::Result<()> {
        let found = answers(&producer.output)?;
        for (found, expected) in found.iter().zip(&self.expected) {
            ensure!(found == expected, "a batch differs:\n  {found}\n  {expected}");
        }
        ensure!(found.len() == self.expected.len(), "{} answers of {LINES}", found.len());
        self.statistics.batches += 1;
        Ok(())
    }

    /// Kills a worker, keeps its counters, and schedules its restart unless one is scheduled.
    fn remove_worker(&mut self, index: usize) {
        if let Some(mut worker) = self.workers[index].take() {
            worker.process.kill();
            self.statistics.add(&worker.counters);
        }
        self.restart_at[index].get_or_insert_with(Instant::now);
    }

    fn scrape(&mut self) {
        self.workers.iter_mut().flatten().for_each(Worker::scrape);
    }

    /// Waits until every batch has ended, then drains the workers.
    fn finish(&mut self) -> anyhow::Result<()> {
        let started = Instant::now();
        while !(self.producers.is_empty() && self.changed.is_idle()) {
            if started.elapsed() > FINISH_LIMIT {
                let left = self.producers.len() + usize::from(!self.changed.is_idle());
                bail!("{left} batches have not ended in {FINISH_LIMIT:?}");
            }
            self.restart_workers()?;
            self.check_producers()?;
            if !self.changed.is_idle() {
                self.changed.act(false)?;
            }
            sleep(TICK);
        }
        if self.redis.settle()? {
            // A promoted replica may hold entries of jobs that have ended; the workers remove them.
            checks::streams_are_empty(self.redis.nodes())?;
        }
        self.scrape();
        for worker in self.workers.iter_mut().flatten() {
            Signal::Terminate.send(worker.process.0.id())?;
            let status = worker.process.0.wait().context("cannot wait for a worker")?;
            ensure!(status.success(), "a drained worker ended with {status}");
        }
        (0..self.workers.len()).for_each(|index| self.remove_worker(index));
        Ok(())
    }
}

/// Returns batch lines of every kind that may differ between a first and a second attempt.
fn lines() -> String {
    let line = |index: usize| {
        let temperature = if index.is_multiple_of(3) { 0 } else { 1 };
        let (tokens, choices) = (8 + index % 40, 1 + index % 2);
        format!(
            "{{\"custom_id\":\"line-{index}\",\"method\":\"POST\",\"url\":\"/v1/chat/completions\",\
             \"body\":{{\"model\":\"demo\",\"messages\":[{{\"role\":\"user\",\"content\":\"Invoice {index} was paid on \
             the {} of March, 2024\"}}],\"max_tokens\":{tokens},\"n\":{choices},\"ignore_eos\":true,\
             \"temperature\":{temperature}}}}}\n",
            1 + index % 28
        )
    };
    (0..LINES).map(line).collect()
}
