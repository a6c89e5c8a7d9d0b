//! `tritmill bench queue`: jobs per second through Redis and Postgres, without a model.
//!
//! Every run has its own queue, `bench-ID@none`, and deletes its jobs and keys at the end, also after an
//! error or Ctrl-C. A killed run leaves them, and an interrupted run leaves the jobs that the database
//! was recording at that moment. No worker serves such a queue.

mod flow;
mod processor_time;

use std::{
    num::NonZeroUsize,
    process::ExitCode,
    time::{Duration, Instant},
};

use clap::Args;
use serde_json::{Value, json};
use tritmill_queue::{Job, JobId};

pub use self::{
    flow::{Bench, MicroBatch},
    processor_time::{Pids, Used},
};
use crate::{block_on, output, servers::Servers};

const EXAMPLES: &str = "\
Examples:
  tritmill bench queue --redis redis://localhost --database postgres://tritmill@localhost/tritmill
  tritmill bench queue --jobs 100000 --micro-batch 64 --consumers 8 --json
  tritmill bench queue --redis-pid $(pidof redis-server) --postgres-pid $(head -1 DATA/postmaster.pid)

submit: jobs recorded in Postgres and added to Redis. consume: jobs pulled,
claimed, renewed (once, or as often as --renewals says), results written, acknowledged. start: time from submitting one job to an idle
queue to its claim. CPU time is per process. The database must be migrated. The run deletes what it added.";

/// Arguments of `bench queue`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct Arguments {
    /// Jobs to submit and consume
    #[arg(long, value_name = "N", default_value = "20000")]
    jobs: NonZeroUsize,
    /// Jobs that a consumer takes, claims and finishes at once; a worker commits 64
    #[arg(long, value_name = "N", default_value = "64")]
    micro_batch: NonZeroUsize,
    /// Concurrent consumers
    #[arg(long, value_name = "N", default_value = "4")]
    consumers: NonZeroUsize,
    /// How often a consumer renews its jobs before it finishes them
    #[arg(long, value_name = "N", default_value_t = 1)]
    renewals: usize,
    /// Concurrent producers
    #[arg(long, value_name = "N", default_value = "2")]
    producers: NonZeroUsize,
    /// Repetitions of submit and consume; the median is printed
    #[arg(long, value_name = "N", default_value = "3")]
    repetitions: NonZeroUsize,
    /// Jobs that are timed one at a time on the idle queue
    #[arg(long, value_name = "N", default_value_t = 100)]
    starts: usize,
    #[command(flatten)]
    pids: Pids,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    servers: Servers,
}

/// One run of a phase.
#[derive(Debug, Clone, Copy)]
struct Run {
    jobs: usize,
    wall: Duration,
    used: Used,
}

/// Measurements.
#[derive(Debug, Default)]
struct Figures {
    submit: Vec<Run>,
    consume: Vec<Run>,
    /// Start times, ascending.
    starts: Vec<Duration>,
}

/// Measures and prints the results.
pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let servers = arguments.servers.needed()?;
    let figures = block_on(async {
        let bench = Bench::open(servers, "none").await?;
        let mut submitted = Vec::new();
        let measured = tokio::select! {
            figures = measure(&bench, arguments, &mut submitted) => figures,
            _ = tokio::signal::ctrl_c() => Err(anyhow::anyhow!("interrupted")),
        };
        let cleaned = bench.clean_up(&submitted).await;
        if let (Err(error), Err(_)) = (&cleaned, &measured) {
            note!("cannot delete {}: {}", bench.queue, output::one_line(error));
        }
        let figures = measured?;
        cleaned.map(|()| figures)
    })?;
    print(&figures, arguments)?;
    Ok(ExitCode::SUCCESS)
}

/// Runs every phase. Records each job before it is submitted.
async fn measure(
    bench: &Bench,
    arguments: &Arguments,
    submitted: &mut Vec<JobId>,
) -> anyhow::Result<Figures> {
    let pids = arguments.pids.existing()?;
    let mut note = |jobs: Vec<Job>| {
        submitted.extend(jobs.iter().map(|job| job.id));
        jobs
    };
    let mut figures = Figures::default();
    let count = arguments.jobs.get();
    for repetition in 1..=arguments.repetitions.get() {
        note!("repetition {repetition} of {}", arguments.repetitions);
        let jobs = note(bench.jobs(count)?);
        let (producers, consumers) = (arguments.producers.get(), arguments.consumers.get());
        let submitting = bench.submit(&jobs, producers);
        figures.submit.push(timed(pids, count, submitting).await?);
        let batch = MicroBatch { max: arguments.micro_batch.get(), renewals: arguments.renewals };
        let consuming = bench.consume(count, consumers, batch);
        figures.consume.push(timed(pids, count, consuming).await?);
    }
    let jobs = note(bench.jobs(arguments.starts)?);
    figures.starts = bench.starts(&jobs).await?;
    figures.starts.sort_unstable();
    Ok(figures)
}

async fn timed(
    pids: Pids,
    jobs: usize,
    phase: impl Future<Output = anyhow::Result<()>>,
) -> anyhow::Result<Run> {
    let (started, before) = (Instant::now(), Used::read(pids));
    phase.await?;
    let (wall, used) = (started.elapsed(), Used::read(pids).since(before));
    Ok(Run { jobs, wall, used })
}

impl Run {
    fn jobs_per_s(&self) -> f64 {
        self.jobs as f64 / self.wall.as_secs_f64().max(f64::MIN_POSITIVE)
    }

    /// Returns the processor time per job.
    fn us_per_job(&self, used: Option<Duration>) -> Option<f64> {
        used.map(|used| used.as_secs_f64() * 1e6 / self.jobs as f64)
    }
}

/// Returns the median run with the slowest and the fastest rate; `None` without runs.
fn median(runs: &[Run]) -> Option<(Run, f64, f64)> {
    let mut sorted = runs.to_vec();
    sorted.sort_by(|a, b| a.jobs_per_s().total_cmp(&b.jobs_per_s()));
    let (slowest, fastest) = (sorted.first()?.jobs_per_s(), sorted.last()?.jobs_per_s());
    Some((sorted[sorted.len() / 2], slowest, fastest))
}

/// Returns a percentile of ascending times.
pub fn percentile(sorted: &[Duration], percent: usize) -> Option<Duration> {
    let rank = (sorted.len() * percent).div_ceil(100).max(1);
    sorted.get(rank - 1).copied()
}

fn milliseconds(time: Option<Duration>) -> Option<f64> {
    time.map(|time| time.as_secs_f64() * 1e3)
}

fn print(figures: &Figures, arguments: &Arguments) -> anyhow::Result<()> {
    let phases = [("submit", &figures.submit), ("consume", &figures.consume)];
    let [p50, p99] = [50, 99].map(|percent| milliseconds(percentile(&figures.starts, percent)));
    if arguments.json {
        let rows: Vec<Value> = phases.iter().filter_map(|(name, runs)| row(name, runs)).collect();
        output::json(json!({
            "jobs": arguments.jobs, "micro_batch": arguments.micro_batch,
            "renewals": arguments.renewals,
            "producers": arguments.producers, "consumers": arguments.consumers,
            "repetitions": arguments.repetitions, "rows": rows,
            "starts": figures.starts.len(), "start_ms_p50": p50, "start_ms_p99": p99,
        }))?;
        return Ok(());
    }
    let (jobs, micro_batch) = (arguments.jobs, arguments.micro_batch);
    let (producers, consumers) = (arguments.producers, arguments.consumers);
    output::line(format_args!(
        "{jobs} jobs, micro-batch {micro_batch}, {producers} producers, {consumers} consumers"
    ))?;
    output::line("                                                CPU µs a job")?;
    output::line("phase       jobs/s  (slowest … fastest)   client   redis  postgres")?;
    for (name, runs) in phases {
        let Some((run, slowest, fastest)) = median(runs) else { continue };
        let cpu = |used| run.us_per_job(used).map_or("-".to_owned(), |us| format!("{us:.1}"));
        let Used { own, redis, postgres } = run.used;
        let range = format!("({slowest:.0} … {fastest:.0})");
        output::line(format_args!(
            "{name:<8} {:>9.0}  {range:<21} {:>8} {:>7} {:>9}",
            run.jobs_per_s(),
            cpu(own),
            cpu(redis),
            cpu(postgres)
        ))?;
    }
    if let (Some(p50), Some(p99)) = (p50, p99) {
        let count = figures.starts.len();
        output::line(format_args!("start    p50 {p50:.2} ms, p99 {p99:.2} ms, of {count} jobs"))?;
    }
    Ok(())
}

fn row(name: &str, runs: &[Run]) -> Option<Value> {
    let (run, slowest, fastest) = median(runs)?;
    let Used { own, redis, postgres } = run.used;
    let seconds = |used: Option<Duration>| used.map(|used| used.as_secs_f64());
    Some(json!({
        "phase": name,
        "jobs_per_s": run.jobs_per_s(),
        "jobs_per_s_lowest": slowest,
        "jobs_per_s_highest": fastest,
        "wall_s": run.wall.as_secs_f64(),
        "cpu_s": seconds(own),
        "cpu_us_per_job": run.us_per_job(own),
        "redis_cpu_s": seconds(redis),
        "redis_cpu_us_per_job": run.us_per_job(redis),
        "postgres_cpu_s": seconds(postgres),
        "postgres_cpu_us_per_job": run.us_per_job(postgres),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_percentile_is_one_of_the_times() {
        let times: Vec<Duration> = (1..=100).map(Duration::from_millis).collect();
        assert_eq!(percentile(&times, 50), Some(Duration::from_millis(50)));
        assert_eq!(percentile(&times, 99), Some(Duration::from_millis(99)));
        assert_eq!(percentile(&times[..3], 99), Some(Duration::from_millis(3)));
        assert_eq!(percentile(&[], 50), None);
    }

    #[test]
    fn the_median_is_by_rate() {
        let run = |ms| Run { jobs: 10, wall: Duration::from_millis(ms), used: Used::default() };
        let (middle, slowest, fastest) = median(&[run(10), run(1), run(5)]).expect("three runs");
        assert_eq!((middle.wall.as_millis(), slowest, fastest), (5, 1000.0, 10_000.0));
        assert!(median(&[]).is_none());
    }
}
