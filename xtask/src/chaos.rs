//! `cargo xtask chaos`: workers and producers run while a seeded nemesis kills, freezes and
//! disconnects processes; then the guarantees are checked.
//!
//! Every batch must end with the answers of an undisturbed run in one process, byte for byte; every
//! job must have one result row; usage must be counted once; Redis must hold no entries at the end. When
//! only servers fail, no job may spend an attempt.

mod checks;
mod fleet;
mod nemesis;
mod proxy;
pub mod upgrade;

use std::{
    fs,
    path::{Path, PathBuf},
    thread::sleep,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail, ensure};
use tritmill_servers::{Postgres, Redis, Signal};

use self::{
    checks::Statistics,
    fleet::{Environment, Producer, Worker, answers},
    nemesis::{Faults, Nemesis},
    proxy::Proxy,
};
use super::process::{self, cargo, root};

const PRODUCERS: usize = 2;
/// Lines of a batch: some seconds of work.
const LINES: usize = 1500;
/// Longest time for the unfinished batches once the nemesis has stopped.
const FINISH_LIMIT: Duration = Duration::from_secs(180);
const TICK: Duration = Duration::from_millis(20);
const SCRAPE_INTERVAL: Duration = Duration::from_millis(500);

/// The options of a run.
#[derive(Debug, PartialEq)]
struct Options {
    minutes: f64,
    seed: u64,
    workers: usize,
    /// Maximum number of attempts of each job.
    attempts: u32,
    faults: Faults,
}

/// The servers, workers and producers of one run, and its results so far.
struct Cluster {
    redis: Redis,
    postgres: Postgres,
    /// Proxies in front of Redis and Postgres.
    proxies: [Proxy; 2],
    environment: Environment,
    workers: Vec<Option<Worker>>,
    /// Time at which to start the stopped worker of the same index.
    restart_at: Vec<Option<Instant>>,
    producers: Vec<Producer>,
    input: PathBuf,
    /// Answers of the undisturbed run.
    expected: Vec<String>,
    batches_started: usize,
    statistics: Statistics,
}

pub fn run(arguments: &[String]) -> anyhow::Result<()> {
    let options = parse(arguments)?;
    let Options { minutes, seed, workers, attempts, faults } = options;
    // With the tests, as `cargo xtask test` builds: their dependencies enable features of their own.
    process::run(cargo().args(["build", "--workspace", "--bins", "--tests"]))?;
    let folder = tempfile::Builder::new().prefix("tritmill-chaos-").tempdir()?;
    let mut cluster = Cluster::start(folder.path(), &options)?;
    println!(
        "seed {seed}: {minutes} minutes, {workers} workers, {PRODUCERS} producers, {attempts} \
         attempts, faults of {}",
        faults.as_str()
    );
    let mut nemesis = Nemesis::new(seed, faults);
    let until = Instant::now() + Duration::from_secs_f64(minutes * 60.0);
    let mut scrape_at = Instant::now();
    let outcome = (|| {
        while Instant::now() < until {
            nemesis.act(&mut cluster)?;
            cluster.restart_workers()?;
            cluster.check_producers()?;
            cluster.start_producers()?;
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
    println!("{}", cluster.statistics);
    if outcome.is_err() {
        // The files are kept for the investigation.
        println!("logs and files: {}", folder.keep().display());
    }
    outcome
}

impl Cluster {
    fn start(folder: &Path, options: &Options) -> anyhow::Result<Self> {
        let redis = Redis::start_durable()?;
        let postgres = Postgres::start_with(&["fsync=off"])?;
        let proxies = [Proxy::start(redis.port())?, Proxy::start(postgres.port())?];
        let environment = Environment {
            program: root().join("target/debug/tritmill"),
            redis_url: format!("redis://127.0.0.1:{}/0", proxies[0].port()),
            database_url: format!("postgres://postgres@127.0.0.1:{}/postgres", proxies[1].port()),
            folder: folder.to_owned(),
            attempts: options.attempts,
            server: None,
        };
        process::run(environment.command(&["migrate"])?.env("DATABASE_URL", postgres.url()))?;
        let input = folder.join("in.jsonl");
        fs::write(&input, lines())?;
        let output = folder.join("undisturbed.jsonl");
        let mut undisturbed = environment.command(&["batch", "run"])?;
        undisturbed.arg(&input).arg("-o").arg(&output);
        process::run(undisturbed.env_remove("REDIS_URL").env_remove("DATABASE_URL"))?;
        let expected = answers(&output)?;
        ensure!(expected.len() == LINES, "{} answers to {LINES} lines", expected.len());
        let mut cluster = Self {
            redis,
            postgres,
            proxies,
            environment,
            workers: (0..options.workers).map(|_| None).collect(),
            restart_at: vec![Some(Instant::now()); options.workers],
            producers: Vec::new(),
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
        while !self.producers.is_empty() {
            if started.elapsed() > FINISH_LIMIT {
                bail!("{} batches have not ended in {FINISH_LIMIT:?}", self.producers.len());
            }
            self.restart_workers()?;
            self.check_producers()?;
            sleep(TICK);
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

fn parse(arguments: &[String]) -> anyhow::Result<Options> {
    // Workers die so often here that jobs would use up the default number of attempts.
    let mut options =
        Options { minutes: 1.0, seed: 1, workers: 3, attempts: 1000, faults: Faults::All };
    let mut arguments = arguments.iter();
    while let Some(name) = arguments.next() {
        let value = arguments.next().with_context(|| format!("{name} needs a value"))?;
        let number = || format!("{name} needs a number, not {value}");
        match name.as_str() {
            "--minutes" => options.minutes = value.parse().with_context(number)?,
            "--seed" => options.seed = value.parse().with_context(number)?,
            "--workers" => options.workers = value.parse().with_context(number)?,
            "--attempts" => options.attempts = value.parse().with_context(number)?,
            "--faults" => options.faults = value.parse()?,
            _ => bail!(
                "unknown option {name} (--minutes M, --seed S, --workers N, --attempts N, --faults \
                 all|servers)"
            ),
        }
    }
    let minutes = options.minutes;
    ensure!(minutes > 0.0 && minutes < 10_000.0, "--minutes must be above 0 and below 10000");
    ensure!((1..=64).contains(&options.workers), "--workers must be from 1 to 64");
    ensure!(options.attempts > 0, "--attempts must be above 0");
    Ok(options)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_parsed() {
        let words = |text: &str| -> Vec<String> { text.split(' ').map(str::to_owned).collect() };
        let text = "--minutes 0.5 --seed 7 --workers 1 --attempts 3 --faults servers";
        let faults = Faults::Servers;
        let expected = Options { minutes: 0.5, seed: 7, workers: 1, attempts: 3, faults };
        assert_eq!(parse(&words(text)).expect("all are given"), expected);
        for text in ["--minutes", "--minutes x", "--speed 1", "--minutes 0", "--faults none"] {
            assert!(parse(&words(text)).is_err(), "{text}");
        }
    }
}
