//! Statistics of a run, and the checks of the guarantees against Postgres and Redis at its end.

use std::{
    collections::HashMap,
    fmt,
    process::Command,
    sync::{Arc, Mutex, PoisonError},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail, ensure};
use tritmill_servers::Redis;

use super::{
    Cluster, LINES, changed,
    fleet::{COUNTERS, LEASE},
    nemesis::Faults,
};

/// Longest time until Redis holds no entries of the last workers.
const SETTLE_LIMIT: Duration = Duration::from_secs(20);

/// Longest time until the jobs of a killed worker are reclaimed, and how often this is checked.
const RECOVERY_LIMIT: Duration = Duration::from_secs(60);
const RECOVERY_POLL: Duration = Duration::from_millis(100);

/// What a run measured.
#[derive(Debug, Default)]
pub struct Statistics {
    /// Batches that ended with the expected answers.
    pub batches: usize,
    /// Sums over all workers, by metric name.
    counters: HashMap<String, u64>,
    workers_killed: usize,
    results: u64,
    completion_tokens: u64,
    /// Jobs without a result, and results beyond one for each line; `None` before they are counted.
    lost_and_duplicated: Option<(u64, u64)>,
    /// Jobs that spent an attempt although all of them are healthy.
    charged: u64,
    /// Times from each kill until the store listed no running job of the killed worker; written by
    /// one thread per kill.
    recoveries_ms: Arc<Mutex<Vec<u64>>>,
}

impl Statistics {
    /// Adds the counters of a worker that has exited.
    pub fn add(&mut self, counters: &HashMap<String, u64>) {
        for (name, value) in counters {
            *self.counters.entry(name.clone()).or_default() += value;
        }
    }

    /// Measures, in a thread, how long the jobs of a worker that was just killed stay with it.
    pub fn measure_recovery(&mut self, owner: &str, port: u16) {
        self.workers_killed += 1;
        let (times, killed_at) = (Arc::clone(&self.recoveries_ms), Instant::now());
        let sql =
            format!("SELECT count(*) FROM all_jobs WHERE state = 'running' AND owner = '{owner}'");
        thread::spawn(move || {
            let mut had_jobs = false;
            // Postgres may be down for part of this time.
            while killed_at.elapsed() < RECOVERY_LIMIT {
                match number(port, &sql) {
                    Ok(0) => break,
                    Ok(_) => had_jobs = true,
                    Err(_) => {}
                }
                thread::sleep(RECOVERY_POLL);
            }
            if had_jobs {
                let ms = u64::try_from(killed_at.elapsed().as_millis()).unwrap_or(u64::MAX);
                times.lock().unwrap_or_else(PoisonError::into_inner).push(ms);
            }
        });
    }
}

impl fmt::Display for Statistics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { batches, results, completion_tokens, workers_killed, .. } = self;
        writeln!(
            f,
            "{batches} batches of {LINES} lines equal to the undisturbed run, {results} jobs with \
             one result each, {completion_tokens} tokens counted once"
        )?;
        for name in COUNTERS {
            writeln!(f, "{name} {}", self.counters.get(name).unwrap_or(&0))?;
        }
        if let Some((lost, duplicated)) = self.lost_and_duplicated {
            writeln!(f, "lost {lost}, duplicated {duplicated}")?;
        }
        writeln!(f, "jobs that spent an attempt: {}", self.charged)?;
        let mut times = self.recoveries_ms.lock().unwrap_or_else(PoisonError::into_inner).clone();
        times.sort_unstable();
        if let Some(last) = times.len().checked_sub(1) {
            let at = |share: f64| times[((last as f64) * share).round() as usize];
            write!(
                f,
                "{workers_killed} workers killed; the jobs of {} were reclaimed after p50 {} ms, \
                 p99 {} ms (lease {} ms)",
                times.len(),
                at(0.5),
                at(0.99),
                LEASE.as_millis()
            )?;
        }
        Ok(())
    }
}

/// Returns the first column of the first row, a number.
pub fn number(port: u16, sql: &str) -> anyhow::Result<u64> {
    let output = Command::new("psql")
        .args(["-h", "127.0.0.1", "-U", "postgres", "-At", "-p", &port.to_string(), "-c", sql])
        .output()
        .context("cannot run psql")?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout)?.trim().parse().with_context(|| sql.to_owned())
}

/// Checks rows, usage and leases in Postgres, then waits until the streams in Redis are empty.
pub fn run(cluster: &mut Cluster, faults: Faults) -> anyhow::Result<()> {
    let port = cluster.postgres.port();
    let changed = cluster.changed.ended as u64;
    let expected = (cluster.batches_started * LINES) as u64 + changed * changed::LINES as u64;
    let results = number(port, "SELECT count(*) FROM results")?;
    let lost = "SELECT count(*) FROM all_jobs WHERE id NOT IN (SELECT job_id FROM results)";
    let duplicated = results.saturating_sub(expected);
    cluster.statistics.lost_and_duplicated = Some((number(port, lost)?, duplicated));
    let unfinished = "SELECT count(*) FROM all_jobs WHERE state NOT IN ('completed', 'failed', \
                      'cancelled', 'expired')";
    let unfinished = number(port, unfinished)?;
    ensure!(unfinished == 0, "{unfinished} jobs are not in a terminal state");
    let failed = number(port, "SELECT count(*) FROM all_jobs WHERE state <> 'completed'")?;
    ensure!(failed == 0, "{failed} jobs are not completed");
    let jobs = number(port, "SELECT count(*) FROM all_jobs")?;
    ensure!(jobs == results, "{jobs} jobs have {results} results");
    // A producer that is killed between its file and the store submits with new ids: those jobs are
    // extra, and each has its own result.
    ensure!(jobs >= expected, "{jobs} jobs of {expected} lines");
    let leases = number(port, "SELECT count(*) FROM all_jobs WHERE lease_until IS NOT NULL")?;
    ensure!(leases == 0, "{leases} leases are left");
    let tokens = number(port, "SELECT coalesce(sum(completion_tokens), 0) FROM results")?;
    let generated = tokens_of(&cluster.expected)? * cluster.batches_started as u64
        + tokens_of(cluster.changed.expected())? * changed;
    ensure!(tokens == generated, "{tokens} tokens are recorded, {generated} were generated");
    cluster.statistics.results = results;
    cluster.statistics.completion_tokens = tokens;
    let charged = number(port, "SELECT count(*) FROM all_jobs WHERE attempts > 0")?;
    cluster.statistics.charged = charged;
    // A job pays for the loss of a worker that runs it alone, after two other losses.
    ensure!(charged == 0 || faults == Faults::All, "{charged} jobs spent an attempt");
    streams_are_empty(cluster.redis.nodes())
}

/// Waits until the streams of all nodes hold no entries.
pub fn streams_are_empty(nodes: &[Redis]) -> anyhow::Result<()> {
    let started = Instant::now();
    loop {
        let left = nodes.iter().map(stream_entries).collect::<anyhow::Result<Vec<_>>>()?.concat();
        if left.is_empty() {
            return Ok(());
        }
        if started.elapsed() > SETTLE_LIMIT {
            bail!("left in Redis: {left:?}");
        }
        thread::sleep(Duration::from_millis(200));
    }
}

/// Returns the number of generated tokens that the answers of one batch report.
fn tokens_of(answers: &[String]) -> anyhow::Result<u64> {
    let tokens = |line: &String| -> Option<u64> {
        let (_, rest) = line.split_once("\"completion_tokens\":")?;
        rest.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
    };
    answers.iter().map(tokens).sum::<Option<u64>>().context("an answer without usage")
}

/// Returns streams that hold entries, queued or pending, with their count.
fn stream_entries(node: &Redis) -> anyhow::Result<Vec<String>> {
    let mut left = Vec::new();
    for key in node.command(&["--scan", "--pattern", "tm:*"])? {
        // Events expire.
        if key.starts_with("tm:events:") || node.command(&["TYPE", &key])? != ["stream"] {
            continue;
        }
        let length = node.command(&["XLEN", &key])?.concat();
        if length != "0" {
            left.push(format!("{length} entries in {key}"));
        }
    }
    Ok(left)
}
