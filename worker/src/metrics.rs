//! What a worker counts and when it last reached what it depends on, for `/metrics` and `/readyz`.

mod engine;

use std::{
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering},
    },
    time::Duration,
};

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric as _, text},
    metrics::{
        counter::{ConstCounter, Counter},
        gauge::Gauge,
    },
    registry::Registry,
};
use tokio::time::Instant;
use tritmill_engine::EngineStats;
use tritmill_queue::{JobState, dispatch::RedisDispatcher, store::operations::Integrity};

pub(crate) use self::engine::Steps;
use self::engine::{EngineSteps, Latencies};
use crate::worker::Committed;

/// A worker that has not read its queue for this long is not ready: alive, but silently idle.
const READ_LIMIT: Duration = Duration::from_secs(30);

/// Counters, gauges and the time of the last successful read.
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
    fed_again: Counter,
    dependency_failures: Counter,
    device_failures: Counter,
    device_rests: Gauge,
    running: Gauge,
    uncommitted: Gauge,
    depth: Gauge,
    steps: EngineSteps,
    latencies: Latencies,
    /// What had to be put right, if it is one that counts.
    dispatcher: Option<RedisDispatcher>,
    started: Instant,
    /// Milliseconds after `started` of the last successful read; −1 before the first.
    last_read: AtomicI64,
    /// The same of the last renewal of leases; −1 while there are none.
    last_renewal: AtomicI64,
    /// Failures of store or dispatcher since either last worked.
    failures_in_a_row: AtomicU64,
    draining: AtomicBool,
    /// Why devices are left alone, if they are, by place.
    broken: Mutex<Vec<Option<String>>>,
}

impl Default for Metrics {
    fn default() -> Self {
        let mut registry = Registry::with_prefix("tritmill");
        let latencies = Latencies::of(&mut registry);
        let steps = EngineSteps::default();
        registry.register_collector(Box::new(steps.clone()));
        let of_worker = registry.sub_registry_with_prefix("worker");
        let mut counter = |name: &str, help: &str| {
            let counter = Counter::default();
            of_worker.register(name, help, counter.clone());
            counter
        };
        let completed = counter("jobs_completed", "Jobs answered");
        let failed = counter("jobs_failed", "Jobs that ended without an answer");
        let retried = counter("jobs_retried", "Attempts that ended in an error with some left");
        let prompt_tokens = counter("prompt_tokens", "Prompt tokens of answered jobs");
        let completion_tokens = counter("completion_tokens", "Generated tokens of answered jobs");
        let fenced = counter("results_fenced", "Results discarded since the claim was gone");
        let leases_lost = counter("leases_lost", "Jobs stopped since their claim was gone");
        let leases_reclaimed =
            counter("leases_reclaimed", "Jobs whose lease was over, queued again or failed");
        let duplicates =
            counter("deliveries_suppressed", "Deliveries of jobs that were over or others'");
        let fed_again =
            counter("jobs_fed_again", "Queued jobs that the dispatcher was told of again");
        let dependency_failures =
            counter("dependency_failures", "Failed calls of store or dispatcher");
        let device_failures = counter("device_failures", "Failures of the device in a step");
        let mut gauge = |name: &str, help: &str| {
            let gauge = Gauge::default();
            of_worker.register(name, help, gauge.clone());
            gauge
        };
        let running = gauge("jobs_running", "Jobs in the engine");
        let uncommitted = gauge("results_waiting", "Results that wait for their commit");
        let device_rests = gauge("device_rests", "Devices that are left alone since they failed");
        let depth = gauge("queue_depth", "Entries waiting in the dispatcher");
        Self {
            registry,
            completed,
            failed,
            retried,
            prompt_tokens,
            completion_tokens,
            fenced,
            leases_lost,
            leases_reclaimed,
            duplicates,
            fed_again,
            dependency_failures,
            device_failures,
            device_rests,
            running,
            uncommitted,
            depth,
            steps,
            latencies,
            dispatcher: None,
            started: Instant::now(),
            last_read: AtomicI64::new(-1),
            last_renewal: AtomicI64::new(-1),
            failures_in_a_row: AtomicU64::new(0),
            draining: AtomicBool::new(false),
            broken: Mutex::new(Vec::new()),
        }
    }
}

/// What a dispatcher put right, read when somebody asks.
#[derive(Debug)]
struct DispatcherCounters(RedisDispatcher);

impl Collector for DispatcherCounters {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let stats = self.0.stats();
        let counts = [
            ("stream_entries_foreign", "Stream entries dropped: no jobs", stats.foreign_entries),
            ("stream_entries_deleted", "Entries deleted by others", stats.deleted_entries),
            ("stream_entries_reclaimed", "Entries taken over from the silent", stats.reclaimed),
            ("stream_entries_recovered", "Entries of lost answers", stats.recovered),
            (
                "acknowledgements_fenced",
                "Acknowledgements of what had passed to others",
                stats.fenced_acknowledgements,
            ),
            ("redis_losses", "Times that Redis lost data of a queue", stats.group_recreations),
        ];
        for (name, help, count) in counts {
            let counter = ConstCounter::new(count);
            let kind = prometheus_client::metrics::MetricType::Counter;
            counter.encode(encoder.encode_descriptor(name, help, None, kind)?)?;
        }
        Ok(())
    }
}

impl Metrics {
    /// Metrics that also tell what this dispatcher had to put right.
    pub fn with_dispatcher(dispatcher: &RedisDispatcher) -> Self {
        let mut metrics = Self::default();
        let of_worker = metrics.registry.sub_registry_with_prefix("worker");
        of_worker.register_collector(Box::new(DispatcherCounters(dispatcher.clone())));
        metrics.dispatcher = Some(dispatcher.clone());
        metrics
    }

    /// All metrics in Prometheus' text form.
    pub fn encode(&self) -> String {
        let mut out = String::new();
        // Writing to a string does not fail.
        let _ = text::encode(&mut out, &self.registry);
        out
    }

    /// Why the worker is not ready for work, if it is not.
    pub fn not_ready_reason(&self) -> Option<String> {
        self.not_ready_reason_at(self.started.elapsed())
    }

    fn not_ready_reason_at(&self, now: Duration) -> Option<String> {
        if self.draining.load(Ordering::Relaxed) {
            return Some("draining".to_owned());
        }
        let broken: Option<Vec<String>> =
            self.broken.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned().collect();
        // One device that works is enough.
        if let Some(broken) = broken.filter(|broken| !broken.is_empty()) {
            return Some(broken.join("; "));
        }
        let last = self.last_read.load(Ordering::Relaxed);
        let Ok(last) = u64::try_from(last) else {
            return Some("has not read its queue".to_owned());
        };
        let age = now.saturating_sub(Duration::from_millis(last));
        // A worker that is full does not read, and need not.
        if age > READ_LIMIT && self.running.get() == 0 {
            return Some(format!("last read its queue {} s ago", age.as_secs()));
        }
        match self.failures_in_a_row.load(Ordering::Relaxed) {
            0 => None,
            count => Some(format!("store or dispatcher failed {count} times in a row")),
        }
    }

    /// What was put right, or kept from going wrong.
    pub(crate) fn integrity(&self) -> Integrity {
        let losses = self.dispatcher.as_ref().map(|dispatcher| dispatcher.stats());
        Integrity {
            leases_reclaimed: self.leases_reclaimed.get(),
            leases_lost: self.leases_lost.get(),
            results_fenced: self.fenced.get(),
            duplicates_suppressed: self.duplicates.get(),
            dispatcher_losses: losses.map_or(0, |stats| stats.group_recreations),
            jobs_fed_again: self.fed_again.get(),
        }
    }

    /// The engines' steps so far, together.
    pub(crate) fn steps(&self) -> Steps {
        self.steps.sum()
    }

    /// Milliseconds since the queue was read.
    pub(crate) fn read_age_ms(&self) -> Option<u64> {
        self.age_ms(&self.last_read)
    }

    /// Milliseconds since leases were renewed, while there are any.
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

    /// Names the devices, by place.
    pub(crate) fn set_devices(&self, names: Vec<String>) {
        let none = vec![None; names.len()];
        *self.broken.lock().unwrap_or_else(PoisonError::into_inner) = none;
        self.steps.set_devices(names);
    }

    /// The devices' names.
    pub(crate) fn devices(&self) -> Vec<String> {
        self.steps.devices()
    }

    pub(crate) fn record_step(&self, place: usize, sequences: usize, stats: EngineStats) {
        self.steps.add(place, sequences, stats);
    }

    pub(crate) fn answered(&self, first_token: Option<Duration>, took: Duration, tokens: u64) {
        self.latencies.answered(first_token, took, tokens);
    }

    pub(crate) fn renewed(&self) {
        self.last_renewal.store(self.now_ms(), Ordering::Relaxed);
    }

    pub(crate) fn no_lease_held(&self) {
        self.last_renewal.store(-1, Ordering::Relaxed);
    }

    pub(crate) fn reclaimed(&self, jobs: u64) {
        self.leases_reclaimed.inc_by(jobs);
    }

    pub(crate) fn duplicates(&self, deliveries: usize) {
        self.duplicates.inc_by(deliveries as u64);
    }

    pub(crate) fn fed_again(&self, jobs: usize) {
        self.fed_again.inc_by(jobs as u64);
    }

    pub(crate) fn running(&self) -> i64 {
        self.running.get()
    }

    pub(crate) fn completion_tokens(&self) -> u64 {
        self.completion_tokens.get()
    }

    pub(crate) fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Relaxed)
    }

    pub(crate) fn pulled(&self) {
        self.last_read.store(self.now_ms(), Ordering::Relaxed);
        self.failures_in_a_row.store(0, Ordering::Relaxed);
    }

    pub(crate) fn dependency_failed(&self) {
        self.dependency_failures.inc();
        self.failures_in_a_row.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn device_failed(&self) {
        self.device_failures.inc();
    }

    /// Why a device is left alone, or that it is not.
    pub(crate) fn set_device_failure(&self, place: usize, why: Option<String>) {
        let mut broken = self.broken.lock().unwrap_or_else(PoisonError::into_inner);
        broken[place] = why;
        let resting = broken.iter().flatten().count();
        self.device_rests.set(i64::try_from(resting).unwrap_or(i64::MAX));
    }

    pub(crate) fn draining(&self) {
        self.draining.store(true, Ordering::Relaxed);
    }

    pub(crate) fn lease_lost(&self) {
        self.leases_lost.inc();
    }

    pub(crate) fn fenced(&self) {
        self.fenced.inc();
    }

    pub(crate) fn queue_depth(&self, depth: usize) {
        self.depth.set(i64::try_from(depth).unwrap_or(i64::MAX));
    }

    pub(crate) fn holding(&self, running: usize, uncommitted: usize) {
        self.running.set(i64::try_from(running).unwrap_or(i64::MAX));
        self.uncommitted.set(i64::try_from(uncommitted).unwrap_or(i64::MAX));
    }

    pub(crate) fn committed(&self, committed: &Committed) {
        for (_, state) in &committed.settled {
            match state {
                JobState::Completed => self.completed.inc(),
                JobState::Retrying | JobState::Queued => self.retried.inc(),
                _ => self.failed.inc(),
            };
        }
        self.prompt_tokens.inc_by(committed.prompt_tokens);
        self.completion_tokens.inc_by(committed.completion_tokens);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_is_ready_while_it_reads_and_nothing_fails() {
        let metrics = Metrics::default();
        assert!(metrics.not_ready_reason().is_some());
        metrics.pulled();
        assert_eq!(metrics.not_ready_reason(), None);
        metrics.dependency_failed();
        assert!(metrics.not_ready_reason().expect("not ready").contains("failed 1 times"));
        metrics.pulled();
        let later = READ_LIMIT * 2 + Duration::from_secs(1);
        assert!(
            metrics.not_ready_reason_at(later).expect("not ready").contains("last read its queue")
        );
        metrics.holding(3, 0);
        assert_eq!(metrics.not_ready_reason_at(later), None, "a full worker does not read");
        metrics.draining();
        assert_eq!(metrics.not_ready_reason().as_deref(), Some("draining"));
        assert!(metrics.encode().contains("tritmill_worker_dependency_failures_total 1"));
    }
}
