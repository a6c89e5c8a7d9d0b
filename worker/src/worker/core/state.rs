//! The state of a worker, and what several decisions do with it.

use std::{
    collections::{BTreeMap, HashSet, VecDeque},
    sync::Arc,
    time::{Duration, Instant},
};

use tritmill_queue::{
    Backoff, Claim, ClaimRef, Delivery, JobEvent, JobId, store::workers::Directive,
};

use super::{
    calls::Calls,
    devices::Devices,
    in_flight::InFlight,
    io::{Command, Feed},
    policy::Policy,
    renewals::Renewals,
    shutdown::Shutdown,
    watchdog::Watchdog,
};
use crate::{
    metrics::Metrics,
    served::ServedModel,
    worker::{config::WorkerConfig, error::WorkerError},
};

/// Results that are committed without waiting for more.
pub(super) const FLUSH_COUNT: usize = 64;
/// Uncommitted results beyond which no new jobs are taken.
pub(super) const UNCOMMITTED_MAX: usize = 16 * FLUSH_COUNT;
/// How long a result may wait for others to be committed with.
pub(super) const FLUSH_WAIT: Duration = Duration::from_millis(50);
/// How often the tokens of long generations are saved: the most that a crash costs.
pub(super) const CHECKPOINT_INTERVAL: Duration = Duration::from_secs(3);
/// Part of the slots that a pull is for at least, while the others are taken: jobs with prompts that begin alike are
/// pulled together.
pub(super) const PULL_PART: usize = 10;
/// How long free slots may be too few for a pull.
pub(super) const FEW_WAIT: Duration = Duration::from_secs(1);
/// Slots for each additional slot that only jobs of priority high take.
pub(super) const RESERVED_PART: usize = 8;
/// How often a worker without other free slots looks for jobs of priority high. It looks instead of waiting, since
/// a new job wakes one waiting worker, which should be able to take any job.
pub(super) const HIGH_INTERVAL: Duration = Duration::from_millis(100);
/// Waits after failures of store or dispatcher.
pub(super) const BACKOFF: Backoff = Backoff::new(Duration::from_millis(50), Duration::from_secs(5));

/// The state of a worker.
pub(in crate::worker) struct Core {
    pub(super) policy: Policy,
    pub(super) lease: Duration,
    pub(super) drain_limit: Duration,
    pub(super) step_limit: Duration,
    pub(super) served: Arc<ServedModel>,
    /// Counts what happens; nothing is decided by it.
    pub(super) metrics: Arc<Metrics>,
    /// Whether events of streaming jobs have a listener.
    pub(super) has_events: bool,
    /// Time of the current input.
    pub(super) now: Instant,
    /// What to do after the current input.
    pub(super) commands: Vec<Command>,
    pub(super) directive: Directive,
    /// Free slots from which jobs are pulled, except by a worker with few jobs.
    pub(super) pull_min: usize,
    pub(super) devices: Devices,
    pub(super) watchdog: Watchdog,
    pub(super) in_flight: InFlight,
    pub(super) renewals: Renewals,
    pub(super) calls: Calls,
    /// Deliveries for the next acknowledgement.
    pub(super) acknowledged: Vec<Delivery>,
    /// Deliveries to hand back.
    pub(super) released: Vec<Delivery>,
    /// Running jobs that stream.
    pub(super) streaming: HashSet<JobId>,
    /// Claims that wait until they can run alone.
    pub(super) suspects: VecDeque<Claim>,
    /// Waits after failures of store or dispatcher, and the end of the current one.
    pub(super) backoff: Backoff,
    pub(super) retry_at: Option<Instant>,
    /// Time from which a pull takes over deliveries of dead workers.
    pub(super) reclaim_at: Instant,
    /// Time of the next pull for jobs of priority high alone, if there is room for these alone.
    pub(super) high_at: Option<Instant>,
    /// Since when there is room for too few jobs to pull.
    pub(super) few_since: Option<Instant>,
    pub(super) checkpoint_at: Instant,
    /// Tokens of running answers that are in no checkpoint yet.
    pub(super) unsaved: BTreeMap<ClaimRef, Vec<u32>>,
    /// Position up to which an embedded worker has fed its dispatcher.
    pub(super) feed: Feed,
    pub(super) shutdown: Shutdown,
}

/// What a core needs to know besides its configuration.
pub(in crate::worker) struct CoreSetup {
    pub policy: Policy,
    pub served: Arc<ServedModel>,
    pub metrics: Arc<Metrics>,
    /// Names of the devices, at least one.
    pub devices: Vec<String>,
    /// Whether events of streaming jobs have a listener.
    pub has_events: bool,
    /// The directive until the first answer of the store.
    pub directive: Directive,
}

impl Core {
    /// Creates the state of a worker that starts at `now`.
    pub fn new(config: &WorkerConfig, setup: CoreSetup, now: Instant) -> Self {
        let CoreSetup { policy, served, metrics, devices, has_events, directive } = setup;
        let reserved = if policy.reserves { config.slots.div_ceil(RESERVED_PART) } else { 0 };
        Self {
            policy,
            lease: config.lease,
            drain_limit: config.drain,
            step_limit: config.step_limit,
            served,
            metrics,
            has_events,
            now,
            commands: Vec::new(),
            directive,
            watchdog: Watchdog::new(devices.len()),
            in_flight: InFlight::new(devices.len()),
            pull_min: config.slots.div_ceil(PULL_PART),
            devices: Devices::new(devices, config.slots, reserved),
            renewals: Renewals::new(config.lease, now),
            calls: Calls::default(),
            acknowledged: Vec::new(),
            released: Vec::new(),
            streaming: HashSet::new(),
            suspects: VecDeque::new(),
            backoff: BACKOFF,
            retry_at: None,
            reclaim_at: now,
            high_at: None,
            few_since: None,
            checkpoint_at: now + CHECKPOINT_INTERVAL,
            unsaved: BTreeMap::new(),
            feed: Feed::default(),
            shutdown: Shutdown::No,
        }
    }

    /// Handles a failure of store or dispatcher. If only an operator can change it, the worker records what it can and
    /// ends.
    ///
    /// # Errors
    /// The error itself, if the first failure ends the worker.
    pub(super) fn on_dependency_error(&mut self, error: WorkerError) -> Result<(), WorkerError> {
        if !self.policy.retries {
            return Err(error);
        }
        self.retry_at = Some(self.now + self.backoff.record_failure());
        match error {
            WorkerError::Dispatch(_) => self.metrics.dispatcher_failed(),
            _ => self.metrics.store_failed(),
        }
        if error.needs_operator() {
            tracing::error!(%error, "a server refuses this worker: it ends");
            self.close(Err(error));
        } else {
            tracing::warn!(%error, "trying again");
        }
        Ok(())
    }

    /// Returns whether calls wait after a failure.
    pub(super) fn is_backing_off(&self) -> bool {
        self.retry_at.is_some_and(|at| at > self.now)
    }

    /// Returns whether the worker holds no jobs and every call about claims is answered.
    pub(super) fn is_empty(&self) -> bool {
        self.in_flight.is_empty()
            && self.acknowledged.is_empty()
            && self.released.is_empty()
            && !self.calls.involve_claims()
    }

    pub(super) fn publish(&mut self, job: JobId, event: JobEvent) {
        if self.has_events {
            self.commands.push(Command::Publish(job, event));
        }
    }
}
