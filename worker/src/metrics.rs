//! Metrics and readiness of a worker, for `/metrics` and `/readyz`.

mod engine;
#[cfg(test)]
mod tests;
mod upkeep;

use std::{
    sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering},
    time::Duration,
};

use parking_lot::Mutex;
use prometheus_client::{
    encoding::text,
    metrics::{counter::Counter, gauge::Gauge},
    registry::{Metric, Registry},
};
use tokio::time::Instant;
use tritmill_engine::EngineStats;
use tritmill_queue::{
    JobState, Usage, dispatch::RedisDispatcher, metrics::CallMetrics, store::workers::Integrity,
};

pub(crate) use self::engine::Steps;
use self::{
    engine::{EngineSteps, Latencies},
    upkeep::Upkeep,
};
use crate::worker::committed::Committed;

/// A worker that has not read its queue for this long is not ready.
const READ_LIMIT: Duration = Duration::from_secs(30);
/// A failed call of the store counts for this long, whatever else the store answers.
const FAILURE_COUNTS_FOR_MS: i64 = 10_000;

/// Counters, gauges and readiness of a worker.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    completed: Counter,
    failed: Counter,
    retried: Counter,
    prompt_tokens: Counter,
    completion_tokens: Counter,
    fenced: Counter,
    leases_lost: Counter,
    leases_reclaimed: Counter,
    duplicates: Counter,
    re_enqueued: Counter,
    dependency_failures: Counter,
    device_failures: Counter,
    device_rests: Gauge,
    running: Gauge,
    uncommitted: Gauge,
    depth: Gauge,
    /// Times of the calls of store and dispatcher.
    pub(crate) calls: CallMetrics,
    /// Leases, and the work of leaders.
    pub(crate) upkeep: Upkeep,
    steps: EngineSteps,
    latencies: Latencies,
    /// Cost and computed tokens of answered jobs, for heartbeats.
    answered_cost: AtomicU64,
    answered_tokens: AtomicU64,
    /// The dispatcher, for its own counters, if it is Redis.
    dispatcher: Option<RedisDispatcher>,
    started: Instant,
    /// Milliseconds from `started` to the last successful read; −1 before the first.
    last_read: AtomicI64,
    /// Milliseconds from `started` to the last renewal of leases; −1 while the worker holds no
    /// leases.
    last_renewal: AtomicI64,
    /// Failures of store or dispatcher since the last successful read.
    store_failures: Failures,
    dispatcher_failures: Failures,
    draining: AtomicBool,
    /// The reason why each device is suspended, by index; `None` for a device that is not.
    device_failures_now: Mutex<Vec<Option<String>>>,
}

impl Default for Metrics {
    fn default() -> Self {
        let mut registry = Registry::with_prefix("tritmill");
        let latencies = Latencies::register(&mut registry);
        let steps = EngineSteps::default();
        registry.register_collector(Box::new(steps.clone()));
        let calls = CallMetrics::default();
        calls.register(&mut registry);
        let worker = &mut WorkerMetrics(registry.sub_registry_with_prefix("worker"));
        Self {
            calls,
            upkeep: Upkeep::register(worker.0),
            completed: worker.metric("jobs_completed", "Jobs answered"),
            failed: worker.metric("jobs_failed", "Jobs that ended without an answer"),
            retried: worker.metric("jobs_retried", "Failed attempts of jobs with attempts left"),
            prompt_tokens: worker.metric("prompt_tokens", "Prompt tokens of answered jobs"),
            completion_tokens: worker
                .metric("completion_tokens", "Generated tokens of answered jobs"),
            fenced: worker.metric("results_fenced", "Results discarded because the claim was lost"),
            leases_lost: worker.metric("leases_lost", "Jobs stopped because their lease was lost"),
            leases_reclaimed: worker
                .metric("leases_reclaimed", "Jobs with an expired lease, queued again or failed"),
            duplicates: worker.metric(
                "deliveries_suppressed",
                "Deliveries of jobs that were finished or claimed elsewhere",
            ),
            re_enqueued: worker
                .metric("jobs_fed_again", "Queued jobs that were enqueued in the dispatcher again"),
            dependency_failures: worker
                .metric("dependency_failures", "Failed calls of store or dispatcher"),
            device_failures: worker.metric("device_failures", "Steps in which the device failed"),
            running: worker.metric("jobs_running", "Jobs in the engine"),
            uncommitted: worker.metric("results_waiting", "Results that are not committed yet"),
            device_rests: worker
                .metric("device_rests", "Devices that get no jobs because they failed"),
            depth: worker.metric("queue_depth", "Entries waiting in the dispatcher"),
            steps,
            latencies,
            answered_cost: AtomicU64::new(0),
            answered_tokens: AtomicU64::new(0),
            dispatcher: None,
            started: Instant::now(),
            last_read: AtomicI64::new(-1),
            last_renewal: AtomicI64::new(-1),
            store_failures: Failures::default(),
            dispatcher_failures: Failures::default(),
            draining: AtomicBool::new(false),
            device_failures_now: Mutex::default(),
            registry,
        }
    }
}

/// Failures of a server since its last answer.
#[derive(Debug, Default)]
struct Failures {
    in_a_row: AtomicU64,
    /// When the last one was.
    last_ms: AtomicI64,
}

impl Failures {
    fn add(&self, now_ms: i64) {
        self.last_ms.store(now_ms, Ordering::Relaxed);
        self.in_a_row.fetch_add(1, Ordering::Relaxed);
    }

    fn end(&self) {
        self.in_a_row.store(0, Ordering::Relaxed);
    }
}

/// Sums over answered jobs.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Answered {
    /// Tokens that they counted as in the backlog.
    pub cost: u64,
    /// Tokens that were computed for them.
    pub tokens: u64,
}

/// The metrics of the worker itself.
struct WorkerMetrics<'a>(&'a mut Registry);

impl WorkerMetrics<'_> {
    fn metric<M: Metric + Clone + Default>(&mut self, name: &str, help: &str) -> M {
        let metric = M::default();
        self.0.register(name, help, metric.clone());
        metric
    }
}

impl Metrics {
    /// Returns the metrics of a worker with this dispatcher.
    pub fn from_dispatcher(dispatcher: &RedisDispatcher) -> Self {
        Self { dispatcher: Some(dispatcher.clone()), ..Self::default() }
    }

    /// Returns all metrics in the OpenMetrics text format.
    pub fn encode(&self) -> String {
        let mut out = String::new();
        // Writing to a string does not fail.
        let _ = text::encode(&mut out, &self.registry);
        out
    }

    /// Returns the reason why the worker is not ready; `None` if it is ready.
    pub fn not_ready_reason(&self) -> Option<String> {
        self.not_ready_reason_at(self.started.elapsed())
    }

    fn not_ready_reason_at(&self, now: Duration) -> Option<String> {
        if self.draining.load(Ordering::Relaxed) {
            return Some("draining".to_owned());
        }
        // One device that works is enough.
        let failures: Option<Vec<String>> =
            self.device_failures_now.lock().iter().cloned().collect();
        if let Some(failures) = failures.filter(|failures| !failures.is_empty()) {
            return Some(failures.join("; "));
        }
        let last = self.last_read.load(Ordering::Relaxed);
        let Ok(last) = u64::try_from(last) else {
            return Some("has not read its queue".to_owned());
        };
        let age = now.saturating_sub(Duration::from_millis(last));
        // A worker without free slots does not read.
        if age > READ_LIMIT && self.running.get() == 0 {
            return Some(format!("last read its queue {} s ago", age.as_secs()));
        }
        let failing = [("store", &self.store_failures), ("dispatcher", &self.dispatcher_failures)];
        failing.into_iter().find_map(|(name, failures)| {
            let count = failures.in_a_row.load(Ordering::Relaxed);
            (count > 0).then(|| format!("the {name} failed {count} times in a row"))
        })
    }

    /// Faults that were detected and corrected.
    pub(crate) fn integrity(&self) -> Integrity {
        let stats = self.dispatcher.as_ref().map(|dispatcher| dispatcher.stats());
        Integrity {
            leases_reclaimed: self.leases_reclaimed.get(),
            leases_lost: self.leases_lost.get(),
            results_fenced: self.fenced.get(),
            duplicates_suppressed: self.duplicates.get(),
            dispatcher_losses: stats.map_or(0, |stats| stats.group_recreations),
            jobs_fed_again: self.re_enqueued.get(),
        }
    }

    /// Returns the steps of all engines so far, added up.
    pub(crate) fn steps(&self) -> Steps {
        self.steps.sum()
    }

    /// Returns the milliseconds since the queue was read.
    pub(crate) fn read_age_ms(&self) -> Option<u64> {
        self.age_ms(&self.last_read)
    }

    /// Returns the milliseconds since leases were renewed; `None` while the worker holds no leases.
    pub(crate) fn lease_age_ms(&self) -> Option<u64> {
        self.age_ms(&self.last_renewal)
    }

    fn age_ms(&self, last: &AtomicI64) -> Option<u64> {
        let last = u64::try_from(last.load(Ordering::Relaxed)).ok()?;
        Some(self.now_ms().unsigned_abs().saturating_sub(last))
    }

    fn now_ms(&self) -> i64 {
        i64::try_from(self.started.elapsed().as_millis()).unwrap_or(i64::MAX)
    }

    /// Sets the names of the devices, by index.
    pub(crate) fn set_devices(&self, names: Vec<String>) {
        *self.device_failures_now.lock() = vec![None; names.len()];
        self.steps.set_devices(names);
    }

    /// Returns the names of the devices.
    pub(crate) fn devices(&self) -> Vec<String> {
        self.steps.devices()
    }

    pub(crate) fn record_step(
        &self,
        device: usize,
        sequences: usize,
        took: Duration,
        stats: EngineStats,
    ) {
        self.steps.add(device, sequences, took, stats);
    }

    /// Records how long a request waited for its first step.
    pub(crate) fn record_wait(&self, device: usize, wait: Duration) {
        self.steps.add_wait(device, wait);
        self.latencies.record_wait(wait);
    }

    pub(crate) fn record_latency(
        &self,
        first_token: Option<Duration>,
        took: Duration,
        tokens: u64,
    ) {
        self.latencies.record(first_token, took, tokens);
    }

    pub(crate) fn leases_renewed(&self) {
        self.last_renewal.store(self.now_ms(), Ordering::Relaxed);
    }

    pub(crate) fn no_lease_held(&self) {
        self.last_renewal.store(-1, Ordering::Relaxed);
    }

    pub(crate) fn add_reclaimed(&self, jobs: u64) {
        self.leases_reclaimed.inc_by(jobs);
    }

    pub(crate) fn add_duplicates(&self, deliveries: usize) {
        self.duplicates.inc_by(deliveries as u64);
    }

    pub(crate) fn add_re_enqueued(&self, jobs: usize) {
        self.re_enqueued.inc_by(jobs as u64);
    }

    /// Returns whether jobs wait, run, or have results that are not committed.
    pub(crate) fn has_work(&self) -> bool {
        self.depth.get() > 0 || self.running.get() > 0 || self.uncommitted.get() > 0
    }

    /// Clears what holds only while engines run: they have ended, and others may come.
    pub(crate) fn unloaded(&self) {
        self.draining.store(false, Ordering::Relaxed);
        self.store_failures.end();
        self.dispatcher_failures.end();
        self.last_read.store(-1, Ordering::Relaxed);
        self.no_lease_held();
        self.set_in_flight(0, 0);
        self.device_rests.set(0);
        self.set_devices(Vec::new());
    }

    pub(crate) fn running(&self) -> i64 {
        self.running.get()
    }

    pub(crate) fn completion_tokens(&self) -> u64 {
        self.completion_tokens.get()
    }

    pub(crate) fn answered(&self) -> Answered {
        Answered {
            cost: self.answered_cost.load(Ordering::Relaxed),
            tokens: self.answered_tokens.load(Ordering::Relaxed),
        }
    }

    /// Adds an answered job.
    pub(crate) fn add_answered(&self, cost: u32, usage: Usage) {
        let computed = usage.prompt_tokens.saturating_sub(usage.cached_tokens);
        self.answered_cost.fetch_add(cost.into(), Ordering::Relaxed);
        self.answered_tokens.fetch_add(computed + usage.completion_tokens, Ordering::Relaxed);
    }

    pub(crate) fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Relaxed)
    }

    pub(crate) fn queue_read(&self) {
        self.last_read.store(self.now_ms(), Ordering::Relaxed);
        self.dispatcher_failures.end();
    }

    /// Records that the store has answered a call about jobs.
    pub(crate) fn store_answered(&self) {
        self.store_failures.end();
    }

    /// Records that the store takes heartbeats. This says little about calls that have failed a moment ago.
    pub(crate) fn heartbeat_recorded(&self) {
        let failed_at = self.store_failures.last_ms.load(Ordering::Relaxed);
        let is_old = self.now_ms().saturating_sub(failed_at) > FAILURE_COUNTS_FOR_MS;
        if is_old {
            self.store_failures.end();
        }
    }

    pub(crate) fn store_failed(&self) {
        self.dependency_failures.inc();
        self.store_failures.add(self.now_ms());
    }

    pub(crate) fn dispatcher_failed(&self) {
        self.dependency_failures.inc();
        self.dispatcher_failures.add(self.now_ms());
    }

    pub(crate) fn device_failed(&self) {
        self.device_failures.inc();
    }

    /// Sets the reason why a device is suspended; `None` ends the suspension.
    pub(crate) fn set_device_failure(&self, device: usize, why: Option<String>) {
        let mut failures = self.device_failures_now.lock();
        failures[device] = why;
        let suspended = failures.iter().flatten().count();
        self.device_rests.set(i64::try_from(suspended).unwrap_or(i64::MAX));
    }

    pub(crate) fn set_draining(&self) {
        self.draining.store(true, Ordering::Relaxed);
    }

    pub(crate) fn lease_lost(&self) {
        self.leases_lost.inc();
    }

    pub(crate) fn result_fenced(&self) {
        self.fenced.inc();
    }

    pub(crate) fn set_queue_depth(&self, depth: usize) {
        self.depth.set(i64::try_from(depth).unwrap_or(i64::MAX));
    }

    pub(crate) fn set_in_flight(&self, running: usize, uncommitted: usize) {
        self.running.set(i64::try_from(running).unwrap_or(i64::MAX));
        self.uncommitted.set(i64::try_from(uncommitted).unwrap_or(i64::MAX));
    }

    pub(crate) fn record_commit(&self, committed: &Committed) {
        for (_, state) in &committed.settled {
            match state {
                JobState::Completed => self.completed.inc(),
                JobState::Retrying | JobState::Queued => self.retried.inc(),
                _ => self.failed.inc(),
            };
        }
        self.prompt_tokens.inc_by(committed.usage.prompt_tokens);
        self.completion_tokens.inc_by(committed.usage.completion_tokens);
    }
}
