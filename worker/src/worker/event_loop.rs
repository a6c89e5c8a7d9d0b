//! One worker's state, and the loop over what can happen to it: the end of a request, a lost lease,
//! an answer of store or dispatcher, the flush timer, the watchdog, or the wish to stop.
//!
//! The loop asks and goes on: calls of store and dispatcher are on their way beside it ([`calls`]),
//! so that one that hangs holds up neither the watchdog nor the end of work whose lease is lost. It
//! waits for none of them by itself: calls may share a connection, and the one that has it must go on.
//! What is asked, and what becomes of the answer, is next door: `intake.rs` for what comes in,
//! `results.rs` for what goes out, `shutdown.rs` for what is left at the end.
//!
//! Results are committed together: when enough have come, when the oldest has waited
//! [`FLUSH_WAIT`], or when the engine has nothing else to do.

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
    sync::{mpsc, watch},
    time::{Instant, MissedTickBehavior, interval, sleep_until},
};
use tritmill_engine::backend::StepError;
use tritmill_queue::{ClaimRef, Delivery, JobEvent, JobId, store::operations::Directive};

use self::calls::{Answer, Calls, Feed};
use super::{
    Mode, Stop, Worker, WorkerError,
    backoff::Backoff,
    devices::Devices,
    in_flight::InFlight,
    renewer::{Lease, LostLease},
};
use crate::{engine_thread::Report, watchdog::Watchdog};

/// Results per transaction before a flush does not wait any longer.
const FLUSH_COUNT: usize = 64;
/// How long a result may wait for company.
const FLUSH_WAIT: Duration = Duration::from_millis(50);
/// How often the tokens of long generations are saved: what a crash costs at most.
const CHECKPOINT_INTERVAL: Duration = Duration::from_secs(3);
/// A time that does not come.
const FOREVER: Duration = Duration::from_secs(86_400);

/// A worker at work.
pub(super) struct EventLoop<'a> {
    worker: &'a Worker,
    devices: Devices,
    in_flight: InFlight,
    /// What store and dispatcher were asked and have not answered.
    calls: Calls<'a>,
    /// Deliveries that are done with, for the next acknowledgement.
    acknowledged: Vec<Delivery>,
    /// Tells the renewer what to renew.
    holding: watch::Sender<Vec<Lease>>,
    lost_leases: mpsc::UnboundedReceiver<LostLease>,
    /// What operators want.
    directive: watch::Receiver<Directive>,
    /// Where events of jobs that stream go.
    events: Option<mpsc::UnboundedSender<(JobId, JobEvent)>>,
    /// Running jobs that stream.
    streaming: HashSet<JobId>,
    /// Wait after a failure of store or dispatcher before anything new is taken.
    backoff: Backoff,
    /// The device that works no more and why, from when one does not.
    lost_device: Option<(String, Arc<StepError>)>,
    reclaim_at: Instant,
    /// When running jobs have had their time, once the worker drains.
    drain_until: Option<Instant>,
    /// Tokens of running answers that are in no checkpoint yet.
    unsaved: HashMap<ClaimRef, Vec<u32>>,
    /// How far an embedded worker has fed its dispatcher.
    feed: Feed,
}

impl<'a> EventLoop<'a> {
    pub fn new(
        worker: &'a Worker,
        devices: Devices,
        holding: watch::Sender<Vec<Lease>>,
        lost_leases: mpsc::UnboundedReceiver<LostLease>,
        directive: watch::Receiver<Directive>,
        events: Option<mpsc::UnboundedSender<(JobId, JobEvent)>>,
    ) -> Self {
        Self {
            worker,
            in_flight: InFlight::new(devices.count()),
            devices,
            calls: Calls::default(),
            acknowledged: Vec::new(),
            holding,
            lost_leases,
            directive,
            events,
            streaming: HashSet::new(),
            backoff: Backoff::default(),
            lost_device: None,
            reclaim_at: Instant::now(),
            drain_until: None,
            unsaved: HashMap::new(),
            feed: Feed::default(),
        }
    }

    pub async fn run(&mut self, stop: &mut watch::Receiver<Stop>) -> Result<(), WorkerError> {
        let mut watchdog = Watchdog::new(self.worker.config.step_limit, self.devices.count());
        let mut saves = interval(CHECKPOINT_INTERVAL);
        saves.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let told = *stop.borrow_and_update() == Stop::Drain;
            let paused = self.apply_directive(told);
            if self.drain_until.is_some() && self.is_empty() {
                return Ok(());
            }
            if !paused {
                self.look_for_work();
            }
            let resting = self.backoff.until();
            let flush_at = self.in_flight.flush_at(FLUSH_WAIT).max(resting);
            let may_flush = flush_at.is_some() && self.calls.commit.is_none();
            let forever = Instant::now() + FOREVER;
            let (drain_until, retry_at) = (self.drain_until, self.devices.retry_at());
            tokio::select! {
                biased;
                (place, report) = self.devices.next_report() => {
                    let Some(report) = report else {
                        return Err(WorkerError::EngineStopped(self.devices.at(place).name.clone()));
                    };
                    self.handle_report(place, report);
                    while let Some((place, report)) = self.devices.waiting_report() {
                        self.handle_report(place, report);
                    }
                }
                Some(lost) = self.lost_leases.recv() => self.handle_lost_lease(lost),
                _ = saves.tick() => self.save_checkpoints(),
                () = watchdog.wait() => {
                    if let Some(place) = watchdog.look(&self.devices.running_steps()) {
                        let hung = self.devices.at(place);
                        hung.thread.abandon();
                        let (device, limit) = (hung.name.clone(), self.worker.config.step_limit);
                        self.shut_down().await?;
                        return Err(WorkerError::EngineHangs { device, limit });
                    }
                }
                Ok(()) = stop.changed(), if drain_until.is_none() => {}
                Ok(()) = self.directive.changed() => {}
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
            self.worker
                .metrics
                .holding(self.in_flight.running_count(), self.in_flight.waiting_count());
            let enough = self.in_flight.done_count() >= FLUSH_COUNT;
            let idle = self.in_flight.running_count() == 0 && self.in_flight.done_count() > 0;
            if (enough || idle) && self.backoff.until().is_none() {
                self.commit();
            }
        }
    }

    /// Takes note of what it is told to do; whether it is to take nothing for now.
    fn apply_directive(&mut self, told_to_drain: bool) -> bool {
        let Directive { drain, paused } = *self.directive.borrow_and_update();
        if paused {
            self.calls.pull = None;
            // Not to read is what it was told: it is as ready as the queue lets it be.
            self.worker.metrics.pulled();
        }
        if self.drain_until.is_none() && (told_to_drain || drain) {
            self.drain_until = Some(Instant::now() + self.worker.config.drain);
            self.worker.metrics.draining();
            self.calls.pull = None;
        }
        paused
    }

    /// Whether nothing is held and nobody's answer about anything held is awaited.
    fn is_empty(&self) -> bool {
        self.in_flight.is_empty() && self.acknowledged.is_empty() && !self.calls.involve_claims()
    }

    /// Asks for work if there is room for it; an embedded worker that knows of none looks what has
    /// become due.
    fn look_for_work(&mut self) {
        if self.drain_until.is_some()
            || self.backoff.until().is_some()
            || self.calls.may_bring_work()
        {
            return;
        }
        if !self.feed.is_dry {
            self.pull();
        } else if self.is_empty() {
            self.check_finished();
        }
    }

    /// A failure of store or dispatcher: the end of an embedded worker, a wait for a service.
    fn on_dependency_error(&mut self, error: WorkerError) -> Result<(), WorkerError> {
        if self.worker.config.mode == Mode::Embedded {
            return Err(error);
        }
        self.backoff.failed();
        self.worker.metrics.dependency_failed();
        tracing::warn!(%error, "trying again");
        Ok(())
    }

    /// Takes an answer to where it belongs; true when an embedded run has nothing left.
    fn handle_answer(&mut self, answer: Answer) -> Result<bool, WorkerError> {
        match answer {
            Answer::Checked(done) => return self.handle_checked(done),
            Answer::Pulled(pulled) => self.claim(pulled)?,
            Answer::Claimed(claimed) => {
                let claims = self.handle_claimed(claimed)?;
                self.prepare(claims);
            }
            Answer::Prepared(prepared) => self.submit(prepared),
            Answer::Committed(done, settled) => self.handle_committed(done, settled)?,
            Answer::Saved(saved, result) => self.handle_saved(saved, result),
            Answer::Acknowledged(result) => {
                self.acknowledge(Vec::new());
                result.map(|_| ()).or_else(|error| self.on_dependency_error(error))?;
            }
        }
        Ok(false)
    }

    /// Takes note of what a device's engine tells.
    fn handle_report(&mut self, place: usize, report: Report) {
        match report {
            Report::Ended(held, end) => self.handle_end(place, held, end),
            Report::Progress(held, tokens) => {
                self.record_device_success(place);
                self.unsaved.insert(held, tokens);
            }
            Report::FirstToken(held, at) => self.in_flight.began(held, at.into()),
            Report::Text(held, choice, text) => {
                self.publish(held.id, JobEvent::Delta { choice, text });
            }
        }
    }

    /// Stops work whose claim is gone, or may be.
    fn handle_lost_lease(&mut self, lost: LostLease) {
        let (held, why) = match lost {
            LostLease::Taken(held) => (held, "lease lost or job cancelled, stopping it"),
            LostLease::NotRenewed(held) => (held, "lease not renewed in time, stopping the job"),
        };
        let running = match lost {
            LostLease::Taken(_) => self.in_flight.prompt(held).is_some(),
            LostLease::NotRenewed(_) => self.in_flight.mark_for_hand_back(held),
        };
        if running {
            self.in_flight.span(held).in_scope(|| tracing::warn!("{why}"));
            self.worker.metrics.lease_lost();
            self.stop_work(held);
        }
    }

    /// Stops a running claim's work.
    fn stop_work(&mut self, held: ClaimRef) {
        match self.in_flight.device(held) {
            Some(place) if self.in_flight.is_submitted(held) => {
                self.devices.at(place).thread.cancel(held);
            }
            _ => self.in_flight.end(held, None),
        }
    }

    /// Tells the renewer what is held now.
    fn publish_leases(&self) {
        self.holding.send_replace(self.in_flight.leases());
    }

    /// Tells subscribers.
    fn publish(&self, job: JobId, event: JobEvent) {
        if let Some(events) = &self.events {
            // The event_publisher ends only with this side.
            let _ = events.send((job, event));
        }
    }
}
