//! The worker's decisions, without I/O: [`Core::on`] takes one input after another and returns what to
//! do. It reads no clock, starts no task and calls nothing that can wait, so a simulation runs
//! thousands of lives of a worker in a second (`core/simulation`). `shell.rs` runs the commands.
//!
//! ```text
//! pull ─► claim ─► prepare ─► engine ─► commit ─► acknowledge
//! ```
//!
//! At most one call of each kind runs at a time: two commits could be reordered, and two pulls would
//! count the same free slots. What a failed call was about is kept and tried again, so no delivery and
//! no claim is held for nothing.
//!
//! | file | decides |
//! | --- | --- |
//! | `intake.rs` | which jobs are pulled, claimed and started |
//! | `results.rs` | what is saved, committed and acknowledged |
//! | `leases.rs` | which leases are renewed, and what happens when one is lost |
//! | `devices.rs` | which device runs a job, and which devices are suspended |
//! | `shutdown.rs` | how the worker ends |
//!
//! Results are committed together: when there are [`FLUSH_COUNT`], when the oldest has waited
//! [`FLUSH_WAIT`], or when the engines have nothing else to do.

mod breaker;
mod devices;
mod in_flight;
mod intake;
pub(super) mod io;
mod leases;
pub(super) mod policy;
mod results;
mod shutdown;
#[cfg(test)]
mod simulation;
pub(super) mod watchdog;

use std::{
    collections::{BTreeMap, HashSet, VecDeque},
    sync::Arc,
    time::{Duration, Instant},
};

use tritmill_queue::{
    Backoff, Claim, ClaimRef, Delivery, JobEvent, JobId, store::workers::Directive,
};

use self::{
    devices::Devices,
    in_flight::InFlight,
    intake::ClaimCall,
    io::{Command, Feed, Input},
    leases::Renewals,
    policy::Policy,
    shutdown::Shutdown,
    watchdog::Watchdog,
};
pub(super) use self::{devices::check_interval, leases::period as renewal_period};
use super::{WorkerConfig, WorkerError};
use crate::{engine_thread::Report, metrics::Metrics, served::ServedModel};

/// Results that are committed without waiting for more.
const FLUSH_COUNT: usize = 64;
/// Uncommitted results beyond which no new jobs are taken.
const UNCOMMITTED_MAX: usize = 16 * FLUSH_COUNT;
/// How long a result may wait for others to be committed with.
const FLUSH_WAIT: Duration = Duration::from_millis(50);
/// How often the tokens of long generations are saved: the most that a crash costs.
const CHECKPOINT_INTERVAL: Duration = Duration::from_secs(3);
/// Part of the slots that a pull is for at least, while the others are taken: jobs with prompts that begin alike are
/// pulled together.
const PULL_PART: usize = 10;
/// How long free slots may be too few for a pull.
const FEW_WAIT: Duration = Duration::from_secs(1);
/// Slots for each additional slot that only jobs of priority high take.
const RESERVED_PART: usize = 8;
/// How often a worker without other free slots looks for jobs of priority high. It looks instead of waiting, since
/// a new job wakes one waiting worker, which should be able to take any job.
const HIGH_INTERVAL: Duration = Duration::from_millis(250);
/// Waits after failures of store or dispatcher.
const BACKOFF: Backoff = Backoff::new(Duration::from_millis(50), Duration::from_secs(5));

/// The calls without an answer, one of each kind at most.
#[derive(Debug, Default)]
struct Calls {
    check: bool,
    pull: bool,
    claim: Option<ClaimCall>,
    prepare: bool,
    commit: bool,
    /// The tokens that are being saved.
    save: Option<BTreeMap<ClaimRef, Vec<u32>>>,
    acknowledge: Option<Vec<Delivery>>,
    release: Option<Vec<Delivery>>,
}

impl Calls {
    /// Returns whether a call may bring work: the free slots are reserved for it.
    fn may_bring_work(&self) -> bool {
        self.check || self.pull || self.claim.is_some() || self.prepare
    }

    /// Returns whether a call about claims or deliveries of this worker has no answer yet.
    fn involve_claims(&self) -> bool {
        self.claim.is_some()
            || self.prepare
            || self.commit
            || self.acknowledge.is_some()
            || self.release.is_some()
    }
}

/// The state of a worker.
pub(super) struct Core {
    policy: Policy,
    lease: Duration,
    drain_limit: Duration,
    step_limit: Duration,
    served: Arc<ServedModel>,
    /// Counts what happens; nothing is decided by it.
    metrics: Arc<Metrics>,
    /// Whether events of streaming jobs have a listener.
    has_events: bool,
    /// Time of the current input.
    now: Instant,
    /// What to do after the current input.
    commands: Vec<Command>,
    directive: Directive,
    /// Free slots from which jobs are pulled, except by a worker with few jobs.
    pull_min: usize,
    devices: Devices,
    watchdog: Watchdog,
    in_flight: InFlight,
    renewals: Renewals,
    calls: Calls,
    /// Deliveries for the next acknowledgement.
    acknowledged: Vec<Delivery>,
    /// Deliveries to hand back.
    released: Vec<Delivery>,
    /// Running jobs that stream.
    streaming: HashSet<JobId>,
    /// Claims that wait until they can run alone.
    suspects: VecDeque<Claim>,
    /// Waits after failures of store or dispatcher, and the end of the current one.
    backoff: Backoff,
    retry_at: Option<Instant>,
    /// Time from which a pull takes over deliveries of dead workers.
    reclaim_at: Instant,
    /// Time of the next pull for jobs of priority high alone, if there is room for these alone.
    high_at: Option<Instant>,
    /// Since when there is room for too few jobs to pull.
    few_since: Option<Instant>,
    checkpoint_at: Instant,
    /// Tokens of running answers that are in no checkpoint yet.
    unsaved: BTreeMap<ClaimRef, Vec<u32>>,
    /// Position up to which an embedded worker has fed its dispatcher.
    feed: Feed,
    shutdown: Shutdown,
}

/// What a core needs to know besides its configuration.
pub(super) struct CoreSetup {
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

    /// Handles an input; returns what to do, in order. Nothing follows [`Command::Exit`].
    pub fn on(&mut self, now: Instant, input: Input) -> Vec<Command> {
        self.now = now;
        if matches!(self.shutdown, Shutdown::Exited) {
            return Vec::new();
        }
        if let Err(error) = self.handle(input) {
            self.exit(Err(error));
        }
        self.advance();
        std::mem::take(&mut self.commands)
    }

    /// Returns the time at which the core needs [`Input::Tick`] if there is no other input before.
    pub fn wake_at(&self) -> Instant {
        let commits = !self.calls.commit && !self.shutdown.is_closing();
        let flush_at = self.in_flight.flush_at(FLUSH_WAIT).filter(|_| commits);
        // Failed results wait like everything else that the failure was about.
        let flush_at = flush_at.max(flush_at.and(self.retry_at));
        let device_at = self.devices.retry_at().filter(|at| *at > self.now);
        let regular = self.renewals.due_at().min(self.checkpoint_at);
        let high_at = self.high_at.filter(|at| *at > self.now);
        let others = [flush_at, self.retry_at, device_at, high_at, self.shutdown.until()];
        others.into_iter().flatten().fold(regular, Instant::min)
    }

    fn handle(&mut self, input: Input) -> Result<(), WorkerError> {
        match input {
            Input::Tick => Ok(()),
            Input::Directive(directive) => {
                self.directive = directive;
                Ok(())
            }
            Input::Drain => {
                self.start_drain();
                Ok(())
            }
            Input::Finish => {
                self.finish_running();
                Ok(())
            }
            Input::Report(device, report) => {
                self.handle_report(device, report);
                Ok(())
            }
            Input::EngineStopped(device) => {
                let name = self.devices.get(device).name.clone();
                self.end_broken_device(device, WorkerError::EngineStopped(name));
                Ok(())
            }
            Input::NotSubmitted(held) => {
                self.handle_not_submitted(held);
                Ok(())
            }
            Input::NotCancelled(held) => {
                if let Some(claim) = self.in_flight.get_mut(held) {
                    claim.stopping = false;
                }
                Ok(())
            }
            Input::Steps(running) => {
                self.check_steps(&running);
                Ok(())
            }
            Input::Checked(finished) => self.handle_checked(finished),
            Input::Pulled(pulled) => self.handle_pulled(pulled),
            Input::Claimed(claims) => self.handle_claimed(claims),
            Input::Prepared(prepared) => {
                self.handle_prepared(prepared);
                Ok(())
            }
            Input::Committed(settled) => self.handle_committed(settled),
            Input::Saved(result) => {
                self.handle_saved(result);
                Ok(())
            }
            Input::Acknowledged(result) => self.handle_acknowledged(result),
            Input::Released(result) => self.handle_released(result),
            Input::Renewed(lost) => {
                self.handle_renewed(lost);
                Ok(())
            }
        }
    }

    /// Does everything that is due.
    fn advance(&mut self) {
        let paused = self.apply_directive();
        self.renew_leases();
        if self.retry_at.is_some_and(|at| at <= self.now) {
            self.retry_at = None;
        }
        if self.checkpoint_at <= self.now {
            self.checkpoint_at = self.now + CHECKPOINT_INTERVAL;
            self.save_checkpoints();
        }
        self.acknowledge();
        self.release();
        self.advance_shutdown();
        if !self.shutdown.is_closing() {
            self.start_suspect();
            self.commit_if_due();
        }
        if !paused && matches!(self.shutdown, Shutdown::No) {
            self.look_for_work();
        }
        let (running, uncommitted) =
            (self.in_flight.running_count(), self.in_flight.uncommitted_count());
        self.metrics.set_in_flight(running, uncommitted);
    }

    /// Applies what operators ask for; returns whether the queue is paused.
    fn apply_directive(&mut self) -> bool {
        let Directive { drain, paused, .. } = self.directive;
        if paused {
            self.cancel_pull();
            // A paused worker does not read its queue, but counts as ready.
            self.metrics.queue_read();
        }
        if drain {
            self.start_drain();
        }
        paused
    }

    /// Handles a report of a device's engine.
    fn handle_report(&mut self, device: usize, report: Report) {
        match report {
            Report::Ended(held, end) => self.handle_end(device, held, end),
            Report::Progress(held, tokens) => {
                self.record_device_success(device);
                self.unsaved.insert(held, tokens);
            }
            Report::FirstToken(held, at) => {
                if let Some(claim) = self.in_flight.get_mut(held) {
                    claim.first_token_at = Some(at);
                }
            }
            Report::Text(held, choice, text) => {
                self.publish(held.id, JobEvent::Delta { choice, text });
            }
        }
    }

    /// Handles a failure of store or dispatcher.
    ///
    /// # Errors
    /// The error itself, if the first failure ends the worker.
    fn on_dependency_error(&mut self, error: WorkerError) -> Result<(), WorkerError> {
        if !self.policy.retries {
            return Err(error);
        }
        self.retry_at = Some(self.now + self.backoff.record_failure());
        self.metrics.dependency_failed();
        tracing::warn!(%error, "trying again");
        Ok(())
    }

    /// Returns whether calls wait after a failure.
    fn is_backing_off(&self) -> bool {
        self.retry_at.is_some_and(|at| at > self.now)
    }

    /// Returns whether the worker holds no jobs and every call about claims is answered.
    fn is_empty(&self) -> bool {
        self.in_flight.is_empty()
            && self.acknowledged.is_empty()
            && self.released.is_empty()
            && !self.calls.involve_claims()
    }

    fn publish(&mut self, job: JobId, event: JobEvent) {
        if self.has_events {
            self.commands.push(Command::Publish(job, event));
        }
    }
}
