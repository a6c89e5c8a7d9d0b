//! What the servers say when all is over, against the promises.

use std::{
    collections::HashMap,
    fmt,
    net::Ipv4Addr,
    process::Command,
    sync::{Arc, Mutex, PoisonError},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail, ensure};

use super::{
    LINES, Stage,
    fleet::{COUNTERS, LEASE},
};

/// How long entries and consumers of the last workers may take to go.
const SETTLE_LIMIT: Duration = Duration::from_secs(20);

/// How long, and how often, to look whether a dead worker's jobs are taken up again.
const RECOVERY_LIMIT: Duration = Duration::from_secs(60);
const RECOVERY_LOOK: Duration = Duration::from_millis(100);

/// What was seen while it lasted.
#[derive(Debug, Default)]
pub struct Tally {
    /// Batches that ended with the expected answers.
    pub batches: usize,
    pub batch_seconds: Vec<f64>,
    counters: HashMap<String, u64>,
    killed: usize,
    terminal: u64,
    completion_tokens: u64,
    /// From a kill until no job was the dead worker's any more; shared with who waits for that.
    recoveries_ms: Arc<Mutex<Vec<u64>>>,
}

impl Tally {
    pub fn add(&mut self, counters: &HashMap<String, u64>) {
        for (name, value) in counters {
            *self.counters.entry(name.clone()).or_default() += value;
        }
    }

    /// A worker was killed just now: measures how long its jobs stay with it.
    pub fn killed(&mut self, owner: &str, port: u16) {
        self.killed += 1;
        let (times, killed_at) = (Arc::clone(&self.recoveries_ms), Instant::now());
        let sql =
            format!("SELECT count(*) FROM jobs WHERE state = 'running' AND owner = '{owner}'");
        thread::spawn(move || {
            let mut held = false;
            // Postgres may be away for a while as well.
            while killed_at.elapsed() < RECOVERY_LIMIT {
                match number(port, &sql) {
                    Ok(0) => break,
                    Ok(_) => held = true,
                    Err(_) => {}
                }
                thread::sleep(RECOVERY_LOOK);
            }
            if held {
                let ms = u64::try_from(killed_at.elapsed().as_millis()).unwrap_or(u64::MAX);
                times.lock().unwrap_or_else(PoisonError::into_inner).push(ms);
            }
        });
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{} batches of {LINES} lines as undisturbed, {} jobs with one terminal row, {} tokens \
             counted once",
            self.batches, self.terminal, self.completion_tokens
        )?;
        for name in COUNTERS {
            writeln!(f, "{name} {}", self.counters.get(name).unwrap_or(&0))?;
        }
        let mut times = self.recoveries_ms.lock().unwrap_or_else(PoisonError::into_inner).clone();
        times.sort_unstable();
        if let Some(last) = times.len().checked_sub(1) {
            let at = |share: f64| times[((last as f64) * share).round() as usize];
            write!(
                f,
                "{} workers killed; jobs of {} were taken up again after p50 {} ms, p99 {} ms (lease \
                 {} ms)",
                self.killed,
                times.len(),
                at(0.5),
                at(0.99),
                LEASE.as_millis()
            )?;
        }
        Ok(())
    }
}

/// The first column of the first row.
fn query(port: u16, sql: &str) -> anyhow::Result<String> {
    let output = Command::new("psql")
        .args(["-h", "127.0.0.1", "-U", "postgres", "-At", "-p", &port.to_string(), "-c", sql])
        .output()
        .context("cannot run psql")?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8(output.stdout)?.trim().to_owned())
}

fn number(port: u16, sql: &str) -> anyhow::Result<u64> {
    query(port, sql)?.parse().with_context(|| sql.to_owned())
}

/// Lines of a reply.
fn redis(port: u16, arguments: &[&str]) -> anyhow::Result<Vec<String>> {
    let output = Command::new("redis-cli")
        .args(["-h", &Ipv4Addr::LOCALHOST.to_string(), "-p", &port.to_string()])
        .args(arguments)
        .output()
        .context("cannot run redis-cli")?;
    let text = String::from_utf8(output.stdout)?;
    Ok(text.lines().map(str::to_owned).filter(|line| !line.is_empty()).collect())
}

/// Checks what is left behind.
pub fn check(stage: &mut Stage) -> anyhow::Result<()> {
    let port = stage.postgres.port();
    let unfinished = "SELECT count(*) FROM jobs WHERE state NOT IN ('completed', 'failed', \
                      'cancelled', 'expired')";
    let open = number(port, unfinished)?;
    ensure!(open == 0, "{open} jobs are not over");
    let failed = number(port, "SELECT count(*) FROM jobs WHERE state <> 'completed'")?;
    ensure!(failed == 0, "{failed} jobs were not answered");
    let jobs = number(port, "SELECT count(*) FROM jobs")?;
    let results = number(port, "SELECT count(*) FROM results")?;
    ensure!(jobs == results, "{jobs} jobs have {results} results");
    let expected = (stage.batches * LINES) as u64;
    ensure!(jobs >= expected, "{jobs} jobs of {expected} lines");
    // A producer that is killed between its file and the store starts with other ids: those jobs
    // are extra, but each is a job of its own.
    let held = number(port, "SELECT count(*) FROM jobs WHERE lease_until IS NOT NULL")?;
    ensure!(held == 0, "{held} leases are left");
    stage.tally.terminal = results;
    stage.tally.completion_tokens = number(port, "SELECT sum(completion_tokens) FROM results")?;
    let per_batch = tokens_of(&stage.expected)?;
    ensure!(
        stage.tally.completion_tokens == per_batch * stage.batches as u64,
        "{} tokens are recorded, {} were generated",
        stage.tally.completion_tokens,
        per_batch * stage.batches as u64
    );
    let started = Instant::now();
    loop {
        let left = leftovers(stage.redis.port())?;
        if left.is_empty() {
            return Ok(());
        }
        if started.elapsed() > SETTLE_LIMIT {
            bail!("left in Redis: {left:?}");
        }
        thread::sleep(Duration::from_millis(200));
    }
}

/// Generated tokens that the answers of one batch report.
fn tokens_of(answers: &[String]) -> anyhow::Result<u64> {
    let tokens = |line: &String| -> Option<u64> {
        let (_, rest) = line.split_once("\"completion_tokens\":")?;
        rest.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
    };
    answers.iter().map(tokens).sum::<Option<u64>>().context("an answer without usage")
}

/// Entries that wait or are pending, by stream.
fn leftovers(port: u16) -> anyhow::Result<Vec<String>> {
    let mut left = Vec::new();
    for key in redis(port, &["--scan", "--pattern", "tm:*"])? {
        // Events expire by themselves; the bell keeps its last ring.
        let other = key.starts_with("tm:ev:") || key.ends_with(":bell");
        if other || redis(port, &["TYPE", &key])? != ["stream"] {
            continue;
        }
        let length = redis(port, &["XLEN", &key])?.concat();
        if length != "0" {
            left.push(format!("{length} entries in {key}"));
        }
    }
    Ok(left)
}
