//! `cargo xtask chaos`: workers and producers at work while a seeded villain kills, freezes and cuts
//! whatever it can reach; then a verdict on the promises.
//!
//! Every batch must end with the answers of an undisturbed run in one process, byte for byte; every
//! job must have one terminal row; usage must have been counted once; nothing may be left behind.

mod fleet;
mod proxy;
mod verdict;
mod villain;

use std::{
    fs,
    path::{Path, PathBuf},
    thread::sleep,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail, ensure};
use tritmill_servers::{Postgres, Redis};

use self::{
    fleet::{Address, Producer, Worker, answers},
    proxy::Proxy,
    verdict::Tally,
    villain::Villain,
};
use super::process::{self, cargo, root};

const WORKERS: usize = 3;
const PRODUCERS: usize = 2;
/// Lines of a batch: some seconds of work.
const LINES: usize = 1500;
/// How long what is left may take once the villain has gone.
const PEACE_LIMIT: Duration = Duration::from_secs(180);
const TICK: Duration = Duration::from_millis(20);
const SCRAPE_INTERVAL: Duration = Duration::from_millis(500);

/// Everything that runs.
struct Stage {
    redis: Redis,
    postgres: Postgres,
    proxies: [Proxy; 2],
    address: Address,
    workers: Vec<Option<Worker>>,
    producers: Vec<Producer>,
    /// When a worker that is down is started again, by place.
    restart_at: Vec<Option<Instant>>,
    input: PathBuf,
    expected: Vec<String>,
    batches: usize,
    tally: Tally,
}

pub fn run(arguments: &[String]) -> anyhow::Result<()> {
    let (minutes, seed) = parse(arguments)?;
    // With the tests, as `cargo xtask test` builds: their dependencies have features of their own.
    process::run(cargo().args(["build", "--workspace", "--bins", "--tests"]))?;
    let folder = tempfile::Builder::new().prefix("tritmill-chaos-").tempdir()?;
    let mut stage = Stage::set(folder.path())?;
    println!("seed {seed}: {minutes} minutes, {WORKERS} workers, {PRODUCERS} producers");
    let mut villain = Villain::new(seed);
    let until = Instant::now() + Duration::from_secs_f64(minutes * 60.0);
    let mut scrape_at = Instant::now();
    let outcome = (|| {
        while Instant::now() < until {
            villain.act(&mut stage)?;
            stage.tend(true)?;
            if Instant::now() >= scrape_at {
                scrape_at = Instant::now() + SCRAPE_INTERVAL;
                stage.scrape();
            }
            sleep(TICK);
        }
        villain.relent(&mut stage)?;
        stage.finish()?;
        verdict::check(&mut stage)
    })();
    println!("{}", villain.deeds());
    println!("{}", stage.tally);
    if outcome.is_err() {
        // Kept for whoever looks into it.
        println!("logs and files: {}", folder.keep().display());
    }
    outcome
}

impl Stage {
    fn set(folder: &Path) -> anyhow::Result<Self> {
        let program = root().join("target/debug/tritmill");
        let redis = Redis::start_durable()?;
        let postgres = Postgres::start_with(&["fsync=off"])?;
        let proxies = [Proxy::start(redis.port())?, Proxy::start(postgres.port())?];
        let address = Address {
            program,
            redis: format!("redis://127.0.0.1:{}/0", proxies[0].port()),
            database: format!("postgres://postgres@127.0.0.1:{}/postgres", proxies[1].port()),
            folder: folder.to_owned(),
        };
        process::run(address.command(&["migrate"])?.env("DATABASE_URL", postgres.url()))?;
        let input = folder.join("in.jsonl");
        fs::write(&input, lines())?;
        let alone = folder.join("alone.jsonl");
        let mut undisturbed = address.command(&["batch", "run"])?;
        undisturbed.arg(&input).arg("-o").arg(&alone);
        process::run(undisturbed.env_remove("REDIS_URL").env_remove("DATABASE_URL"))?;
        let expected = answers(&alone)?;
        ensure!(expected.len() == LINES, "{} answers to {LINES} lines", expected.len());
        let mut stage = Self {
            redis,
            postgres,
            proxies,
            address,
            workers: (0..WORKERS).map(|_| None).collect(),
            producers: Vec::new(),
            restart_at: vec![Some(Instant::now()); WORKERS],
            input,
            expected,
            batches: 0,
            tally: Tally::default(),
        };
        stage.tend(true)?;
        Ok(stage)
    }

    /// Starts what is down and due, and checks what is done.
    fn tend(&mut self, more: bool) -> anyhow::Result<()> {
        for place in 0..WORKERS {
            let ended = match &mut self.workers[place] {
                Some(worker) => worker.child.try_wait()?.is_some(),
                None => false,
            };
            if ended {
                self.bury(place);
            }
            if self.restart_at[place].is_some_and(|at| at <= Instant::now()) {
                self.workers[place] = Worker::start(&self.address)?;
                let again = Instant::now() + Duration::from_millis(500);
                self.restart_at[place] = self.workers[place].is_none().then_some(again);
            }
        }
        let mut going = Vec::new();
        for mut producer in std::mem::take(&mut self.producers) {
            if producer.is_done()? {
                self.compare(&producer)?;
            } else {
                going.push(producer);
            }
        }
        self.producers = going;
        while more && self.producers.len() < PRODUCERS {
            self.batches += 1;
            let output = self.address.folder.join(format!("out-{}.jsonl", self.batches));
            self.producers.push(Producer::start(&self.address, &self.input, output)?);
        }
        Ok(())
    }

    fn compare(&mut self, producer: &Producer) -> anyhow::Result<()> {
        let found = answers(&producer.output)?;
        for (found, expected) in found.iter().zip(&self.expected) {
            ensure!(found == expected, "a batch differs:\n  {found}\n  {expected}");
        }
        ensure!(found.len() == self.expected.len(), "{} answers of {LINES}", found.len());
        self.tally.batches += 1;
        self.tally.batch_seconds.push(producer.started.elapsed().as_secs_f64());
        Ok(())
    }

    /// Adds up a worker that is gone; its place is filled again in a moment.
    fn bury(&mut self, place: usize) {
        if let Some(mut worker) = self.workers[place].take() {
            worker.kill();
            self.tally.add(&worker.counters);
        }
        self.restart_at[place].get_or_insert_with(Instant::now);
    }

    fn scrape(&mut self) {
        self.workers.iter_mut().flatten().for_each(Worker::scrape);
    }

    /// Lets every batch end, then stops the workers in order.
    fn finish(&mut self) -> anyhow::Result<()> {
        let peace = Instant::now();
        while !self.producers.is_empty() {
            if peace.elapsed() > PEACE_LIMIT {
                bail!("{} batches have not ended in peace", self.producers.len());
            }
            self.tend(false)?;
            sleep(TICK);
        }
        self.scrape();
        for worker in self.workers.iter_mut().flatten() {
            tritmill_servers::Signal::Terminate.send(worker.child.id())?;
            let status = worker.child.wait().context("a worker is gone")?;
            ensure!(status.success(), "a drained worker ended with {status}");
        }
        (0..WORKERS).for_each(|place| self.bury(place));
        Ok(())
    }
}

/// Batch lines of every kind that may differ between a first and a second attempt.
fn lines() -> String {
    let line = |index: usize| {
        let temperature = if index.is_multiple_of(3) { 0 } else { 1 };
        let (tokens, choices) = (8 + index % 40, 1 + index % 2);
        format!(
            "{{\"custom_id\":\"line-{index}\",\"method\":\"POST\",\"url\":\"/v1/chat/completions\",\
             \"body\":{{\"messages\":[{{\"role\":\"user\",\"content\":\"Invoice {index} was paid on \
             the {} of March, 2024\"}}],\"max_tokens\":{tokens},\"n\":{choices},\"ignore_eos\":true,\
             \"temperature\":{temperature}}}}}\n",
            1 + index % 28
        )
    };
    (0..LINES).map(line).collect()
}

fn parse(arguments: &[String]) -> anyhow::Result<(f64, u64)> {
    let (mut minutes, mut seed) = (1.0, 1);
    let mut arguments = arguments.iter();
    while let Some(name) = arguments.next() {
        let value = arguments.next().with_context(|| format!("{name} needs a number"))?;
        match name.as_str() {
            "--minutes" => minutes = value.parse().context("--minutes needs a number")?,
            "--seed" => seed = value.parse().context("--seed needs a whole number")?,
            _ => bail!("unknown option {name} (--minutes M, --seed S)"),
        }
    }
    ensure!(minutes > 0.0 && minutes < 10_000.0, "--minutes must be above 0");
    Ok((minutes, seed))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn minutes_and_seed_are_read() {
        let words = |text: &str| -> Vec<String> { text.split(' ').map(str::to_owned).collect() };
        assert_eq!(parse(&words("--minutes 0.5 --seed 7")).expect("both given"), (0.5, 7));
        for text in ["--minutes", "--minutes x", "--speed 1", "--minutes 0"] {
            assert!(parse(&words(text)).is_err(), "{text}");
        }
    }
}
