//! One worker's state, and the loop over what can happen to it: the end of a request, a lost lease,
//! an answer of store or dispatcher, the flush timer, the watchdog, or the wish to stop.
//!
//! The loop asks and goes on: calls of store and dispatcher are on their way beside it ([`calls`]),
//! so that one that hangs holds up neither the watchdog nor the end of work whose lease is lost. It
//! waits for none of them by itself: calls may share a connection, and the one that has it must go on.
//! What is asked, and what becomes of the answer, is next door: `intake.rs` for what comes in,
//! `results.rs` for what goes out, `parting.rs` for what is left at the end.
//!
//! Results are committed together: when enough have come, when the oldest has waited
//! [`FLUSH_WAIT`], or when the engine has nothing else to do.

mod calls;
mod device;
mod intake;
mod parting;
mod results;

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
    flights::Flights,
    renewer::{Holding, Lost},
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
pub(super) struct Turn<'a> {
    worker: &'a Worker,
    devices: Devices,
    flights: Flights,
    /// What store and dispatcher were asked and have not answered.
    calls: Calls<'a>,
    /// Deliveries that are done with, for the next acknowledgement.
    acknowledged: Vec<Delivery>,
    /// Tells the renewer what to renew.
    holding: watch::Sender<Vec<Holding>>,
    losses: mpsc::UnboundedReceiver<Lost>,
    /// What operators want.
    directive: watch::Receiver<Directive>,
    /// Where events of jobs that stream go.
    telling: Option<mpsc::UnboundedSender<(JobId, JobEvent)>>,
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

impl<'a> Turn<'a> {
    pub fn new(
        worker: &'a Worker,
        devices: Devices,
        holding: watch::Sender<Vec<Holding>>,
        losses: mpsc::UnboundedReceiver<Lost>,
        directive: watch::Receiver<Directive>,
        telling: Option<mpsc::UnboundedSender<(JobId, JobEvent)>>,
    ) -> Self {
        Self {
            worker,
            flights: Flights::new(devices.count()),
            devices,
            calls: Calls::default(),
            acknowledged: Vec::new(),
            holding,
            losses,
            directive,
            telling,
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
            let paused = self.obey(told);
            if self.drain_until.is_some() && self.is_empty() {
                return Ok(());
            }
            if !paused {
                self.look_for_work();
            }
            let resting = self.backoff.until();
            let flush_at = self.flights.flush_at(FLUSH_WAIT).max(resting);
            let may_flush = flush_at.is_some() && self.calls.commit.is_none();
            let forever = Instant::now() + FOREVER;
            let (drain_until, retry_at) = (self.drain_until, self.devices.retry_at());
            tokio::select! {
                biased;
                (place, report) = self.devices.next_report() => {
                    let Some(report) = report else {
                        return Err(WorkerError::EngineStopped(self.devices.at(place).name.clone()));
                    };
                    self.note(place, report);
                    while let Some((place, report)) = self.devices.waiting_report() {
                        self.note(place, report);
                    }
                }
                Some(lost) = self.losses.recv() => self.lose(lost),
                _ = saves.tick() => self.save(),
                () = watchdog.wait() => {
                    if let Some(place) = watchdog.look(&self.devices.running_steps()) {
                        let hung = self.devices.at(place);
                        hung.thread.forsake();
                        let (device, limit) = (hung.name.clone(), self.worker.config.step_limit);
                        self.part().await?;
                        return Err(WorkerError::EngineHangs { device, limit });
                    }
                }
                Ok(()) = stop.changed(), if drain_until.is_none() => {}
                Ok(()) = self.directive.changed() => {}
                () = sleep_until(flush_at.unwrap_or(forever)), if may_flush => self.commit(),
                () = sleep_until(drain_until.unwrap_or(forever)), if drain_until.is_some() => {
                    return self.part().await;
                }
                () = sleep_until(retry_at.unwrap_or(forever)), if retry_at.is_some() => {}
                answer = self.calls.next() => {
                    if self.hear(answer)? {
                        return Ok(());
                    }
                }
            }
            if let Some((device, error)) = self.lost_device.take() {
                self.part().await?;
                return Err(WorkerError::DeviceLost { device, error });
            }
            self.worker.vitals.holding(self.flights.running_count(), self.flights.waiting_count());
            let enough = self.flights.done_count() >= FLUSH_COUNT;
            let idle = self.flights.running_count() == 0 && self.flights.done_count() > 0;
            if (enough || idle) && self.backoff.until().is_none() {
                self.commit();
            }
        }
    }

    /// Takes note of what it is told to do; whether it is to take nothing for now.
    fn obey(&mut self, told_to_drain: bool) -> bool {
        let Directive { drain, paused } = *self.directive.borrow_and_update();
        if paused {
            self.calls.pull = None;
            // Not to read is what it was told: it is as ready as the queue lets it be.
            self.worker.vitals.pulled();
        }
        if self.drain_until.is_none() && (told_to_drain || drain) {
            self.drain_until = Some(Instant::now() + self.worker.config.drain);
            self.worker.vitals.draining();
            self.calls.pull = None;
        }
        paused
    }

    /// Whether nothing is held and nobody's answer about anything held is awaited.
    fn is_empty(&self) -> bool {
        self.flights.is_empty() && self.acknowledged.is_empty() && !self.calls.concern_claims()
    }

    /// Asks for work if there is room for it; an embedded worker that knows of none looks what has
    /// become due.
    fn look_for_work(&mut self) {
        if self.drain_until.is_some() || self.backoff.until().is_some() || self.calls.bring_work() {
            return;
        }
        if !self.feed.is_dry {
            self.pull();
        } else if self.is_empty() {
            self.look();
        }
    }

    /// A failure of store or dispatcher: the end of an embedded worker, a wait for a service.
    fn excuse(&mut self, error: WorkerError) -> Result<(), WorkerError> {
        if self.worker.config.mode == Mode::Embedded {
            return Err(error);
        }
        self.backoff.failed();
        self.worker.vitals.trouble();
        tracing::warn!(%error, "trying again");
        Ok(())
    }

    /// Takes an answer to where it belongs; true when an embedded run has nothing left.
    fn hear(&mut self, answer: Answer) -> Result<bool, WorkerError> {
        match answer {
            Answer::Looked(done) => return self.note_look(done),
            Answer::Pulled(pulled) => self.claim(pulled)?,
            Answer::Claimed(claimed) => {
                let claims = self.note_claimed(claimed)?;
                self.prepare(claims);
            }
            Answer::Prepared(prepared) => self.submit(prepared),
            Answer::Committed(done, settled) => self.note_commit(done, settled)?,
            Answer::Saved(saved, result) => self.note_saved(saved, result),
            Answer::Acknowledged(result) => {
                self.acknowledge(Vec::new());
                result.map(|_| ()).or_else(|error| self.excuse(error))?;
            }
        }
        Ok(false)
    }

    /// Takes note of what a device's engine tells.
    fn note(&mut self, place: usize, report: Report) {
        match report {
            Report::Ended(held, end) => self.note_end(place, held, end),
            Report::Progress(held, tokens) => {
                self.device_works(place);
                self.unsaved.insert(held, tokens);
            }
            Report::FirstToken(held, at) => self.flights.began(held, at.into()),
            Report::Text(held, choice, text) => {
                self.tell(held.id, JobEvent::Delta { choice, text });
            }
        }
    }

    /// Stops work whose claim is gone, or may be.
    fn lose(&mut self, lost: Lost) {
        let (held, why) = match lost {
            Lost::Taken(held) => (held, "lease lost or job cancelled, stopping it"),
            Lost::Unrenewed(held) => (held, "lease not renewed in time, stopping the job"),
        };
        let running = match lost {
            Lost::Taken(_) => self.flights.prompt(held).is_some(),
            Lost::Unrenewed(_) => self.flights.will_go_back(held),
        };
        if running {
            self.flights.span(held).in_scope(|| tracing::warn!("{why}"));
            self.worker.vitals.lease_lost();
            self.halt(held);
        }
    }

    /// Stops a running claim's work.
    fn halt(&mut self, held: ClaimRef) {
        match self.flights.device(held) {
            Some(place) if self.flights.is_submitted(held) => {
                self.devices.at(place).thread.cancel(held);
            }
            _ => self.flights.end(held, None),
        }
    }

    /// Tells the renewer what is held now.
    fn show(&self) {
        self.holding.send_replace(self.flights.holdings());
    }

    /// Tells subscribers.
    fn tell(&self, job: JobId, event: JobEvent) {
        if let Some(telling) = &self.telling {
            // The herald ends only with this side.
            let _ = telling.send((job, event));
        }
    }
}
