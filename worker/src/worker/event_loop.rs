//! The main loop of a worker. It owns all state and handles one event after another: reports of the
//! engines, lost leases, answers of store and dispatcher, timers, the watchdog, and stop requests.
//!
//! The loop never waits for the store or the dispatcher: their calls run beside it ([`calls`]), so that
//! a call that hangs delays neither the watchdog nor the end of work with a lost lease. All calls are
//! polled together, since they may share a connection.
//!
//! `intake.rs` takes jobs in, `results.rs` saves and commits results, `shutdown.rs` ends the worker.
//! Results are committed together: when there are [`FLUSH_COUNT`], when the oldest has waited
//! [`FLUSH_WAIT`], or when the engines have nothing else to do.

mod calls;
mod device;
mod intake;
mod results;
mod shutdown;

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
    time::Duration,
};

use tokio::{
    sync::watch,
    time::{Instant, MissedTickBehavior, interval, sleep_until},
};
use tritmill_engine::backend::StepError;
use tritmill_queue::{Backoff, ClaimRef, Delivery, JobEvent, JobId, store::workers::Directive};

use self::calls::{Answer, Calls, Feed};
use super::{
    Mode, Stop, Worker, WorkerError,
    devices::Devices,
    event_publisher::EventSender,
    in_flight::InFlight,
    renewer::{Lease, Loss, LostLeases},
};
use crate::{engine_thread::Report, watchdog::Watchdog};

/// Results that are committed without waiting for more.
const FLUSH_COUNT: usize = 64;
/// Uncommitted results beyond which no new jobs are taken.
const UNCOMMITTED_MAX: usize = 16 * FLUSH_COUNT;
/// How long a result may wait for others to be committed with.
const FLUSH_WAIT: Duration = Duration::from_millis(50);
/// How often the tokens of long generations are saved: the most that a crash costs.
const CHECKPOINT_INTERVAL: Duration = Duration::from_secs(3);
/// Waits after failures of store or dispatcher.
const BACKOFF: Backoff = Backoff::new(Duration::from_millis(50), Duration::from_secs(5));
/// Stands for a timer that is not set.
const FOREVER: Duration = Duration::from_secs(86_400);

/// The loop's inputs from other tasks.
pub(super) struct Inputs {
    pub lost_leases: Arc<LostLeases>,
    /// Directives from operators, received with heartbeats.
    pub directive: watch::Receiver<Directive>,
}

/// The state of a running worker.
pub(super) struct EventLoop<'a> {
    worker: &'a Worker,
    devices: Devices,
    in_flight: InFlight,
    /// Calls of store and dispatcher without an answer yet.
    calls: Calls<'a>,
    /// Deliveries for the next acknowledgement.
    acknowledged: Vec<Delivery>,
    /// Sends the renewer the leases to renew.
    leases: watch::Sender<Vec<Lease>>,
    inputs: Inputs,
    /// Publishes events of streaming jobs.
    events: Option<EventSender>,
    /// Running jobs that stream.
    streaming: HashSet<JobId>,
    /// Wait after a failure of store or dispatcher before new jobs are taken.
    backoff: Backoff,
    /// The first lost device and its error, if any.
    lost_device: Option<(String, Arc<StepError>)>,
    reclaim_at: Instant,
    /// Time at which a drain stops waiting for running jobs.
    drain_until: Option<Instant>,
    /// Tokens of running answers that are in no checkpoint yet.
    unsaved: HashMap<ClaimRef, Vec<u32>>,
    /// Position up to which an embedded worker has fed its dispatcher.
    feed: Feed,
}

impl<'a> EventLoop<'a> {
    pub fn new(
        worker: &'a Worker,
        devices: Devices,
        leases: watch::Sender<Vec<Lease>>,
        inputs: Inputs,
        events: Option<EventSender>,
    ) -> Self {
        Self {
            worker,
            in_flight: InFlight::new(devices.count()),
            devices,
            calls: Calls::default(),
            acknowledged: Vec::new(),
            leases,
            inputs,
            events,
            streaming: HashSet::new(),
            backoff: BACKOFF,
            lost_device: None,
            reclaim_at: Instant::now(),
            drain_until: None,
            unsaved: HashMap::new(),
            feed: Feed::default(),
        }
    }

    pub async fn run(&mut self, stop: &mut watch::Receiver<Stop>) -> Result<(), WorkerError> {
        let mut watchdog = Watchdog::new(self.worker.config.step_limit, self.devices.count());
        let mut checkpoints = interval(CHECKPOINT_INTERVAL);
        checkpoints.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let stop_requested = *stop.borrow_and_update() == Stop::Drain;
            let paused = self.apply_directive(stop_requested);
            if self.drain_until.is_some() && self.is_empty() {
                return Ok(());
            }
            if !paused {
                self.look_for_work();
            }
            let flush_at = self.in_flight.flush_at(FLUSH_WAIT).max(self.backoff.retry_at());
            let may_flush = flush_at.is_some() && self.calls.commit.is_none();
            let forever = Instant::now() + FOREVER;
            let (drain_until, retry_at) = (self.drain_until, self.devices.retry_at());
            tokio::select! {
                biased;
                (device, report) = self.devices.next_report() => {
                    let Some(report) = report else {
                        let name = self.devices.get(device).name.clone();
                        return Err(WorkerError::EngineStopped(name));
                    };
                    self.handle_report(device, report);
                    while let Some((device, report)) = self.devices.try_next_report() {
                        self.handle_report(device, report);
                    }
                }
                () = self.inputs.lost_leases.changed() => {
                    for (held, loss) in self.inputs.lost_leases.take() {
                        self.handle_lost_lease(held, loss);
                    }
                }
                _ = checkpoints.tick() => self.save_checkpoints(),
                () = watchdog.wait() => {
                    if let Some(device) = watchdog.check(&self.devices.running_steps()) {
                        let hung = self.devices.get(device);
                        hung.thread.abandon();
                        let (device, limit) = (hung.name.clone(), self.worker.config.step_limit);
                        self.shut_down().await?;
                        return Err(WorkerError::EngineHangs { device, limit });
                    }
                }
                Ok(()) = stop.changed(), if drain_until.is_none() => {}
                Ok(()) = self.inputs.directive.changed() => {}
                () = sleep_until(flush_at.unwrap_or(forever)), if may_flush => self.commit(),
                () = sleep_until(drain_until.unwrap_or(forever)), if drain_until.is_some() => {
                    return self.shut_down().await;
                }
                () = sleep_until(retry_at.unwrap_or(forever)), if retry_at.is_some() => {}
                answer = self.calls.next() => {
                    if self.handle_answer(answer)? {
                        return Ok(());
                    }
                }
            }
            if let Some((device, error)) = self.lost_device.take() {
                self.shut_down().await?;
                return Err(WorkerError::DeviceLost { device, error });
            }
            let (running, ended) = (self.in_flight.running_count(), self.in_flight.ended_count());
            self.worker.metrics.set_in_flight(running, self.in_flight.uncommitted_count());
            let flush = ended >= FLUSH_COUNT || (running == 0 && ended > 0);
            if flush && self.backoff.retry_at().is_none() {
                self.commit();
            }
        }
    }

    /// Applies what operators and the process ask for; returns whether the queue is paused.
    fn apply_directive(&mut self, stop_requested: bool) -> bool {
        let Directive { drain, paused } = *self.inputs.directive.borrow_and_update();
        if paused {
            self.calls.pull = None;
            // A paused worker does not read its queue, but counts as ready.
            self.worker.metrics.queue_read();
        }
        if self.drain_until.is_none() && (stop_requested || drain) {
            self.drain_until = Some(Instant::now() + self.worker.config.drain);
            self.worker.metrics.set_draining();
            self.calls.pull = None;
        }
        paused
    }

    /// Returns whether the worker holds no jobs and every call about claims is answered.
    fn is_empty(&self) -> bool {
        self.in_flight.is_empty() && self.acknowledged.is_empty() && !self.calls.involve_claims()
    }

    /// Pulls jobs if there is room; an embedded worker without any checks what has become due.
    fn look_for_work(&mut self) {
        let waits = self.drain_until.is_some()
            || self.backoff.retry_at().is_some()
            || self.in_flight.uncommitted_count() >= UNCOMMITTED_MAX;
        if waits || self.calls.may_bring_work() {
            return;
        }
        if !self.feed.is_dry {
            self.pull();
        } else if self.is_empty() {
            self.check_finished();
        }
    }

    /// Handles a failure of store or dispatcher: an embedded worker ends, a service waits.
    fn on_dependency_error(&mut self, error: WorkerError) -> Result<(), WorkerError> {
        if self.worker.config.mode == Mode::Embedded {
            return Err(error);
        }
        self.backoff.record_failure();
        self.worker.metrics.dependency_failed();
        tracing::warn!(%error, "trying again");
        Ok(())
    }

    /// Handles the answer to a call; returns true when an embedded worker has nothing left to do.
    fn handle_answer(&mut self, answer: Answer<'a>) -> Result<bool, WorkerError> {
        match answer {
            Answer::Checked(finished) => return self.handle_checked(finished),
            Answer::Pulled(pulled) => self.claim(pulled)?,
            Answer::Claimed(claimed) => {
                let claims = self.handle_claimed(claimed)?;
                self.prepare(claims);
            }
            Answer::Prepared(prepared) => self.submit(prepared),
            Answer::Committed(commit) => self.handle_committed(commit)?,
            Answer::Saved(saved, result) => self.handle_saved(saved, result),
            Answer::Acknowledged(result) => {
                self.acknowledge(Vec::new());
                result.map(|_| ()).or_else(|error| self.on_dependency_error(error))?;
            }
        }
        Ok(false)
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
                    claim.first_token_at = Some(at.into());
                }
            }
            Report::Text(held, choice, text) => {
                self.publish(held.id, JobEvent::Delta { choice, text });
            }
        }
    }

    /// Stops the work of a claim with a lost lease.
    fn handle_lost_lease(&mut self, held: ClaimRef, loss: Loss) {
        let Some(claim) = self.in_flight.get_mut(held) else { return };
        claim.hand_back |= loss == Loss::NotRenewed;
        if claim.stopping {
            return;
        }
        claim.span.in_scope(|| match loss {
            Loss::Taken => tracing::warn!("lease lost or job cancelled, stopping it"),
            Loss::NotRenewed => tracing::warn!("lease not renewed in time, stopping the job"),
        });
        self.worker.metrics.lease_lost();
        self.stop_work(held);
    }

    /// Stops the work of a running claim. If the engine cannot take the cancel now, the renewer
    /// reports the lost lease again.
    fn stop_work(&mut self, held: ClaimRef) {
        match self.in_flight.get_mut(held) {
            Some(claim) if claim.submitted => {
                if !claim.stopping {
                    claim.stopping = self.devices.get(claim.device).thread.cancel(held);
                }
            }
            _ => self.in_flight.end(held, None),
        }
    }

    /// Sends the renewer the leases to renew.
    fn publish_leases(&self) {
        self.leases.send_replace(self.in_flight.leases());
    }

    /// Publishes an event to subscribers.
    fn publish(&self, job: JobId, event: JobEvent) {
        if let Some(events) = &self.events {
            events.send(job, event);
        }
    }
}
