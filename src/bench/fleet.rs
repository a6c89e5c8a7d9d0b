//! `tritmill bench fleet`: what a fleet of many workers costs Redis and Postgres, and how soon its jobs start,
//! without a model.
//!
//! Each worker here does what a worker with a model does: heartbeats, pulls that wait, claims, results, and the work
//! of a leader if it is one. Its jobs take a fixed time. All workers share this process and its connections
//! to Postgres, as behind a connection pooler.

use std::{
    collections::HashMap,
    num::NonZeroU32,
    process::ExitCode,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};
use clap::Args;
use parking_lot::Mutex;
use serde_json::json;
use tokio::{
    task::JoinSet,
    time::{MissedTickBehavior, interval, interval_at, sleep, timeout},
};
use tritmill_queue::{
    Claim, ClaimRef, Claimant, Delivery, Dispatcher as _, JobId, JobState, Pull, Store as _,
    store::{
        QueueHistory as _, Workers as _,
        workers::{Heartbeat, Leadership, WorkerMetrics},
    },
};

use super::queue::{Bench, Pids, Used, percentile};
use crate::{block_on, output, servers::Servers};

/// Interval of heartbeats, and longest wait of a pull, as in a worker.
const HEARTBEAT: Duration = Duration::from_secs(2);
const PULL_WAIT: Duration = Duration::from_secs(5);
/// Interval of a leader's work, as in a worker.
const RECONCILE: Duration = Duration::from_secs(1);
/// Entries of a leader's slow scan.
const SCAN_COUNT: u32 = 512;
/// Time between two submissions of a producer.
const SUBMIT_EVERY: Duration = Duration::from_millis(20);
/// Time until all workers have sent heartbeats and wait for jobs.
const SETTLE: Duration = Duration::from_secs(6);
/// Interval at which a worker takes over jobs of failed calls, as in a worker.
const RECLAIM_EVERY: Duration = Duration::from_secs(5);
/// How long such jobs stay delivered: as long as their leases.
const RECLAIM_IDLE: Duration = Duration::from_secs(60);
/// Longest wait for the last jobs, also those that are taken over.
const DRAIN_LIMIT: Duration = Duration::from_secs(150);

const EXAMPLES: &str = "\
Examples:
  tritmill bench fleet --redis redis://localhost --database postgres://tritmill@localhost/tritmill
  tritmill bench fleet --workers 100 --rate 1000 --seconds 30 --json
  tritmill bench fleet --redis-pid $(pidof redis-server) --postgres-pid $(head -1 DATA/postmaster.pid)

idle: all workers wait. load: one producer submits at the given rate. start: time from the submission of a
job to its claim. CPU is a share of one core. The run deletes what it added.";

/// Arguments of `bench fleet`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct Arguments {
    /// Workers
    #[arg(long, value_name = "N", default_value = "1000")]
    workers: NonZeroU32,
    /// Jobs that a worker runs at a time
    #[arg(long, value_name = "N", default_value = "8")]
    slots: NonZeroU32,
    /// Jobs submitted per second
    #[arg(long, value_name = "N", default_value = "5000")]
    rate: NonZeroU32,
    /// Length of each phase in seconds
    #[arg(long, value_name = "S", default_value = "15")]
    seconds: NonZeroU32,
    /// Time that a job runs, in milliseconds
    #[arg(long, value_name = "MS", default_value_t = 50)]
    run_ms: u64,
    #[command(flatten)]
    pids: Pids,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    servers: Servers,
}

/// What the workers share.
struct Fleet {
    bench: Bench,
    slots: u32,
    run: Duration,
    /// When the jobs that have not started were submitted.
    submitted: Mutex<HashMap<JobId, Instant>>,
    starts: Mutex<Vec<Duration>>,
    finished: AtomicU64,
    failed_calls: AtomicU64,
}

/// Measurements.
#[derive(Debug)]
struct Figures {
    idle: Used,
    load: Used,
    jobs: u64,
    load_time: Duration,
    failed_calls: u64,
    /// Ascending.
    starts: Vec<Duration>,
}

/// Measures and prints the results.
pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let servers = arguments.servers.needed()?;
    let figures = block_on(async {
        let bench = Bench::open(servers, "none").await?;
        let fleet = Arc::new(Fleet {
            bench,
            slots: arguments.slots.get(),
            run: Duration::from_millis(arguments.run_ms),
            submitted: Mutex::default(),
            starts: Mutex::default(),
            finished: AtomicU64::new(0),
            failed_calls: AtomicU64::new(0),
        });
        let mut jobs = Vec::new();
        let measured = tokio::select! {
            figures = measure(&fleet, arguments, &mut jobs) => figures,
            _ = tokio::signal::ctrl_c() => Err(anyhow::anyhow!("interrupted")),
        };
        for number in 0..arguments.workers.get() {
            // A worker that stays is forgotten by maintenance after a day.
            let _ = fleet.bench.store.forget_worker(&fleet.owner(number)).await;
        }
        fleet.bench.clean_up(&jobs).await?;
        measured
    })?;
    print(&figures, arguments)?;
    Ok(ExitCode::SUCCESS)
}

/// Runs both phases. Records each job before it is submitted.
async fn measure(
    fleet: &Arc<Fleet>,
    arguments: &Arguments,
    jobs: &mut Vec<JobId>,
) -> anyhow::Result<Figures> {
    let pids = arguments.pids.existing()?;
    let phase = Duration::from_secs(arguments.seconds.get().into());
    // Dropping the set ends its tasks.
    let mut workers = JoinSet::new();
    for number in 0..arguments.workers.get() {
        let offset = HEARTBEAT * number / arguments.workers.get();
        workers.spawn(Arc::clone(fleet).worker(number, offset));
    }
    note!("{} workers start", arguments.workers);
    sleep(SETTLE).await;
    let before = Used::read(pids);
    note!("idle for {phase:?}");
    sleep(phase).await;
    let idle = Used::read(pids).since(before);
    note!("{} jobs/s for {phase:?}", arguments.rate);
    let (started, before) = (Instant::now(), Used::read(pids));
    let client = fleet.bench.client();
    let mut ticks = interval(SUBMIT_EVERY);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Burst);
    let mut made = 0;
    while started.elapsed() < phase {
        ticks.tick().await;
        let due = (started.elapsed().as_secs_f64() * f64::from(arguments.rate.get())) as usize;
        if due <= made {
            continue;
        }
        let batch = fleet.bench.jobs(due - made)?;
        made = due;
        jobs.extend(batch.iter().map(|job| job.id));
        let now = Instant::now();
        fleet.submitted.lock().extend(batch.iter().map(|job| (job.id, now)));
        client.submit_many(&batch).await.context("cannot submit")?;
    }
    let all = made as u64;
    let drained = timeout(DRAIN_LIMIT, async {
        while fleet.finished.load(Ordering::Relaxed) < all {
            sleep(Duration::from_millis(5)).await;
        }
    });
    let is_drained = drained.await.is_ok();
    let (load_time, load) = (started.elapsed(), Used::read(pids).since(before));
    workers.shutdown().await;
    let finished = fleet.finished.load(Ordering::Relaxed);
    if !is_drained {
        bail!("{finished} of {all} jobs were answered within {DRAIN_LIMIT:?} of the last one");
    }
    let mut starts = std::mem::take(&mut *fleet.starts.lock());
    starts.sort_unstable();
    let failed_calls = fleet.failed_calls.load(Ordering::Relaxed);
    Ok(Figures { idle, load, jobs: finished, load_time, failed_calls, starts })
}

impl Fleet {
    fn owner(&self, number: u32) -> String {
        format!("{}-{number}", self.bench.queue.model)
    }

    /// Lives until it is aborted.
    async fn worker(self: Arc<Self>, number: u32, offset: Duration) {
        let owner = self.owner(number);
        let leads = Mutex::new(Leadership::default());
        tokio::join!(
            self.beat(&owner, offset, &leads),
            self.lead(&leads),
            self.serve(&owner, offset),
        );
    }

    /// Notes a failed call; waits a moment.
    async fn note(&self, error: impl std::fmt::Display) {
        if self.failed_calls.fetch_add(1, Ordering::Relaxed) == 0 {
            note!("a call failed: {error}");
        }
        sleep(Duration::from_millis(100)).await;
    }

    async fn beat(&self, owner: &str, offset: Duration, leads: &Mutex<Leadership>) {
        let mut ticks = interval_at(tokio::time::Instant::now() + offset, HEARTBEAT);
        let heartbeat = Heartbeat {
            owner: owner.to_owned(),
            queue: self.bench.queue.clone(),
            host: "bench".to_owned(),
            pid: std::process::id(),
            running: 0,
            slots: self.slots,
            draining: false,
            tokens_per_s: 0.0,
            metrics: WorkerMetrics::default(),
        };
        loop {
            ticks.tick().await;
            match self.bench.store.heartbeat(&heartbeat).await {
                Ok(directive) => *leads.lock() = directive.leads,
                Err(error) => self.note(error).await,
            }
        }
    }

    async fn lead(&self, leads: &Mutex<Leadership>) {
        let mut ticks = interval(RECONCILE);
        loop {
            ticks.tick().await;
            let leads = *leads.lock();
            if let Err(error) = self.lead_once(leads).await {
                self.note(error).await;
            }
        }
    }

    async fn lead_once(&self, leads: Leadership) -> anyhow::Result<()> {
        let Bench { store, dispatcher, queue, .. } = &self.bench;
        if leads.store {
            dispatcher.requeue(&store.reconcile().await?.queued).await?;
            self.bench.store.sample().await?;
        }
        if leads.queue {
            let unannounced = store.unannounced(queue).await?;
            dispatcher.requeue(&unannounced.entries).await?;
            store.forget_announcements(&unannounced).await?;
            dispatcher.requeue(&store.queued(queue, None, SCAN_COUNT).await?).await?;
        }
        dispatcher.depth(queue).await?;
        Ok(())
    }

    async fn serve(&self, owner: &str, offset: Duration) {
        sleep(offset).await;
        let mut reclaimed = Instant::now();
        loop {
            let served = if reclaimed.elapsed() < RECLAIM_EVERY {
                self.serve_once(owner).await
            } else {
                reclaimed = Instant::now();
                self.reclaim(owner).await
            };
            if let Err(error) = served {
                self.note(error).await;
            }
        }
    }

    /// Takes up to as many jobs as it has slots, and answers them.
    async fn serve_once(&self, owner: &str) -> anyhow::Result<()> {
        let (claims, deliveries) = self.bench.start(owner, self.slots as usize, PULL_WAIT).await?;
        self.answer(owner, &claims, &deliveries).await
    }

    /// Takes over jobs of calls that failed, or that had an effect but no answer.
    async fn reclaim(&self, owner: &str) -> anyhow::Result<()> {
        let Bench { store, dispatcher, queue, .. } = &self.bench;
        let max = self.slots as usize;
        let pull = Pull { queue, consumer: owner, max, wait: Duration::ZERO, only: None };
        let deliveries = dispatcher.reclaim(pull, RECLAIM_IDLE).await?;
        if deliveries.is_empty() {
            return Ok(());
        }
        let ids: Vec<JobId> = deliveries.iter().map(|delivery| delivery.id).collect();
        let claims = store.claim(&ids, Claimant::new(owner, RECLAIM_IDLE)).await?;
        let is_claimed = |delivery: &Delivery| claims.iter().any(|c| c.job.id == delivery.id);
        let (claimed, others): (Vec<_>, Vec<_>) = deliveries.into_iter().partition(is_claimed);
        for delivery in others {
            // A job with a lease stays delivered and is taken over later.
            if store.state(delivery.id).await?.is_some_and(JobState::is_terminal) {
                let forgotten = dispatcher.acknowledge(owner, &[delivery]).await?;
                self.finished.fetch_add(forgotten as u64, Ordering::Relaxed);
            }
        }
        self.answer(owner, &claims, &claimed).await
    }

    async fn answer(
        &self,
        owner: &str,
        claims: &[Claim],
        deliveries: &[Delivery],
    ) -> anyhow::Result<()> {
        if claims.is_empty() {
            return Ok(());
        }
        let now = Instant::now();
        let mut waits = Vec::with_capacity(claims.len());
        {
            let mut submitted = self.submitted.lock();
            for claim in claims {
                waits.extend(submitted.remove(&claim.job.id).map(|at| now.duration_since(at)));
            }
        }
        self.starts.lock().extend(waits);
        sleep(self.run).await;
        let held: Vec<ClaimRef> = claims.iter().map(Claim::claim_ref).collect();
        self.bench.end(owner, &held, deliveries).await?;
        self.finished.fetch_add(held.len() as u64, Ordering::Relaxed);
        Ok(())
    }
}

fn print(figures: &Figures, arguments: &Arguments) -> anyhow::Result<()> {
    let Figures { idle, load, jobs, load_time, failed_calls, starts } = figures;
    let phase = f64::from(arguments.seconds.get());
    let share = |used: Option<Duration>, time: f64| used.map(|used| used.as_secs_f64() / time);
    let rows = [("idle", idle, phase), ("load", load, load_time.as_secs_f64())];
    let [p50, p99] =
        [50, 99].map(|percent| percentile(starts, percent).map(|time| time.as_secs_f64() * 1e3));
    let rate = *jobs as f64 / load_time.as_secs_f64().max(f64::MIN_POSITIVE);
    if arguments.json {
        let cores = |(name, used, time): (&str, &Used, f64)| {
            let Used { own, redis, postgres } = *used;
            json!({
                "phase": name, "cores": share(own, time), "redis_cores": share(redis, time),
                "postgres_cores": share(postgres, time),
            })
        };
        output::json(json!({
            "workers": arguments.workers, "slots": arguments.slots, "run_ms": arguments.run_ms,
            "rows": rows.map(cores), "jobs": jobs, "jobs_per_s": rate, "start_ms_p50": p50,
            "start_ms_p99": p99, "failed_calls": failed_calls,
        }))?;
        return Ok(());
    }
    output::line(format_args!("{} workers with {} slots", arguments.workers, arguments.slots))?;
    output::line("CPU, share of a core")?;
    output::line("phase     workers    redis  postgres")?;
    for (name, used, time) in rows {
        let cpu = |used| share(used, time).map_or("-".to_owned(), |cores| format!("{cores:.3}"));
        let Used { own, redis, postgres } = *used;
        output::line(format_args!(
            "{name:<8} {:>8} {:>8} {:>9}",
            cpu(own),
            cpu(redis),
            cpu(postgres)
        ))?;
    }
    output::line(format_args!("{jobs} jobs, {rate:.0} jobs/s, {failed_calls} failed calls"))?;
    if let (Some(p50), Some(p99)) = (p50, p99) {
        output::line(format_args!("start    p50 {p50:.2} ms, p99 {p99:.2} ms"))?;
    }
    Ok(())
}
