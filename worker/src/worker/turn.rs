//! One worker's state, and the loop over what can happen to it: the end of a request, a lost lease,
//! a pull, the flush timer, the watchdog, or the wish to stop.
//!
//! Results are committed together: when enough have come, when the oldest has waited
//! [`FLUSH_WAIT`], or when the engine has nothing else to do.

use std::{
    collections::{HashMap, HashSet},
    future::Future,
    pin::Pin,
    sync::Arc,
    time::Duration,
};

use tokio::{
    sync::{mpsc, watch},
    time::{Instant, MissedTickBehavior, interval, sleep, sleep_until, timeout},
};
use tritmill_engine::Request;
use tritmill_queue::{
    Claim, Claimant, Delivery, DispatchError, Held, JobError, JobEvent, JobId, Outcome, Pull,
    Settled, store::operations::Directive,
};

use super::{
    Committed, Mode, Stop, Worker, WorkerError,
    backoff::Backoff,
    flights::{self, Done, Flights},
    renewer::{Holding, Lost},
};
use crate::{
    engine_thread::{End, EngineThread, Report},
    served::Served,
    translate,
    watchdog::Watchdog,
};

/// Results per transaction before a flush does not wait any longer.
const FLUSH_COUNT: usize = 64;
/// How long a result may wait for company.
const FLUSH_WAIT: Duration = Duration::from_millis(50);
/// Jobs fed to the dispatcher at a time when it runs low.
const FEED_COUNT: u32 = 256;
/// Longest wait for the first entry of a pull; a stop does not wait for it.
const PULL_WAIT: Duration = Duration::from_secs(5);
/// Wait before looking again whether a retrying job is due.
const IDLE_WAIT: Duration = Duration::from_millis(50);
/// How often the tokens of long generations are saved: what a crash costs at most.
const CHECKPOINT_INTERVAL: Duration = Duration::from_secs(3);
/// How long handing back may take at the end: a store that is away must not hold up an exit.
const ABANDON_LIMIT: Duration = Duration::from_secs(5);

type PullFuture<'a> =
    Pin<Box<dyn Future<Output = Result<Vec<Delivery>, DispatchError>> + Send + 'a>>;

/// A claim and its request, or why it can have none.
type Prepared = (Claim, Result<Request, JobError>);

/// A worker at work.
pub(super) struct Turn<'a> {
    worker: &'a Worker,
    thread: EngineThread,
    flights: Flights,
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
    reclaim_at: Instant,
    /// Tokens of running answers that are in no checkpoint yet.
    unsaved: HashMap<Held, Vec<u32>>,
    /// Last job fed to the dispatcher.
    cursor: Option<JobId>,
    /// Whether the store had nothing queued beyond the cursor.
    fed_all: bool,
}

impl<'a> Turn<'a> {
    pub fn new(
        worker: &'a Worker,
        thread: EngineThread,
        holding: watch::Sender<Vec<Holding>>,
        losses: mpsc::UnboundedReceiver<Lost>,
        directive: watch::Receiver<Directive>,
        telling: Option<mpsc::UnboundedSender<(JobId, JobEvent)>>,
    ) -> Self {
        Self {
            worker,
            thread,
            flights: Flights::default(),
            holding,
            losses,
            directive,
            telling,
            streaming: HashSet::new(),
            backoff: Backoff::default(),
            reclaim_at: Instant::now(),
            unsaved: HashMap::new(),
            cursor: None,
            fed_all: false,
        }
    }

    pub async fn run(&mut self, stop: &mut watch::Receiver<Stop>) -> Result<(), WorkerError> {
        let worker = self.worker;
        let mut watchdog = Watchdog::new(worker.config.step_limit);
        let mut saves = interval(CHECKPOINT_INTERVAL);
        saves.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut pulling: Option<PullFuture<'_>> = None;
        let mut draining: Option<Instant> = None;
        loop {
            let Directive { drain, paused } = *self.directive.borrow_and_update();
            let told = *stop.borrow_and_update() == Stop::Drain;
            if paused {
                pulling = None;
                // Not to read is what it was told: it is as ready as the queue lets it be.
                worker.vitals.pulled();
            }
            if draining.is_none() && (told || drain) {
                draining = Some(Instant::now() + worker.config.drain);
                worker.vitals.draining();
                pulling = None;
            }
            if draining.is_some() && self.flights.is_empty() {
                return Ok(());
            }
            let resting = self.backoff.until();
            if draining.is_none() && !paused && pulling.is_none() && resting.is_none() {
                match self.next_pull().await {
                    Ok(pull) => pulling = pull,
                    Err(error) => self.excuse(error)?,
                }
                if worker.config.mode == Mode::Embedded
                    && pulling.is_none()
                    && self.flights.is_empty()
                {
                    if self.is_done().await? {
                        return Ok(());
                    }
                    continue;
                }
            }
            let flush_at = self.flights.flush_at(FLUSH_WAIT).max(resting);
            let forever = Instant::now() + Duration::from_secs(86_400);
            tokio::select! {
                biased;
                report = self.thread.reports.recv() => {
                    self.note(report.ok_or(WorkerError::EngineStopped)?);
                    while let Ok(report) = self.thread.reports.try_recv() {
                        self.note(report);
                    }
                }
                Some(lost) = self.losses.recv() => self.lose(lost),
                _ = saves.tick() => self.save().await,
                () = watchdog.wait() => {
                    if watchdog.look(self.thread.running_step()) {
                        self.thread.forsake();
                        self.flush().await?;
                        self.abandon().await;
                        return Err(WorkerError::EngineHangs(worker.config.step_limit));
                    }
                }
                Ok(()) = stop.changed(), if draining.is_none() => {}
                Ok(()) = self.directive.changed() => {}
                () = sleep_until(flush_at.unwrap_or(forever)), if flush_at.is_some() => {
                    self.flush().await?;
                }
                () = sleep_until(draining.unwrap_or(forever)), if draining.is_some() => {
                    self.flush().await?;
                    self.abandon().await;
                    return Ok(());
                }
                pulled = async { pulling.as_mut().expect("guarded").await }, if pulling.is_some() => {
                    pulling = None;
                    match pulled {
                        Ok(deliveries) => {
                            worker.vitals.pulled();
                            self.start(deliveries).await?;
                        }
                        Err(error) => self.excuse(error.into())?,
                    }
                }
            }
            let enough = self.flights.done_count() >= FLUSH_COUNT;
            let idle = self.flights.running_count() == 0 && self.flights.done_count() > 0;
            if (enough || idle) && self.backoff.until().is_none() {
                self.flush().await?;
            }
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

    /// Asks the dispatcher for what fits, if there is room and anything to be had.
    async fn next_pull<'w>(&mut self) -> Result<Option<PullFuture<'w>>, WorkerError>
    where
        Self: 'w,
        'a: 'w,
    {
        let worker = self.worker;
        let max = worker.config.slots.saturating_sub(self.flights.choices());
        if max == 0 {
            return Ok(None);
        }
        // Entries of workers that are gone are taken at most this much later than they could be.
        let reclaim_interval = worker.config.lease / 3;
        let pull = Pull {
            queue: &worker.config.queue,
            consumer: &worker.config.owner,
            max,
            wait: PULL_WAIT.min(reclaim_interval),
        };
        match worker.config.mode {
            Mode::Embedded if !self.feed(max).await? => return Ok(None),
            Mode::Service if Instant::now() >= self.reclaim_at => {
                self.reclaim_at = Instant::now() + reclaim_interval;
                return Ok(Some(worker.dispatcher.reclaim(pull, worker.config.lease)));
            }
            Mode::Embedded | Mode::Service => {}
        }
        Ok(Some(worker.dispatcher.pull(pull)))
    }

    /// Keeps the dispatcher from running dry; false when it is empty.
    async fn feed(&mut self, wanted: usize) -> Result<bool, WorkerError> {
        let Worker { store, dispatcher, config, .. } = self.worker;
        let depth = dispatcher.depth(&config.queue).await?;
        if depth >= wanted || self.fed_all {
            return Ok(depth > 0);
        }
        let entries = store.queued(&config.queue, self.cursor, FEED_COUNT).await?;
        self.cursor = entries.last().map(|entry| entry.id).or(self.cursor);
        self.fed_all = entries.is_empty();
        dispatcher.enqueue(&entries).await?;
        Ok(depth > 0 || !entries.is_empty())
    }

    /// Whether an embedded run has nothing left; otherwise looks what has become due.
    async fn is_done(&mut self) -> Result<bool, WorkerError> {
        let Worker { store, config, .. } = self.worker;
        store.reconcile().await?;
        (self.cursor, self.fed_all) = (None, false);
        if store.unfinished(&config.queue).await? == 0 {
            return Ok(true);
        }
        if store.queued(&config.queue, None, 1).await?.is_empty() {
            sleep(IDLE_WAIT).await;
        }
        Ok(false)
    }

    /// Claims what was delivered and gives it to the engine.
    async fn start(&mut self, deliveries: Vec<Delivery>) -> Result<(), WorkerError> {
        if deliveries.is_empty() {
            return Ok(());
        }
        let Worker { store, dispatcher, config, served, .. } = self.worker;
        let ids: Vec<JobId> = deliveries.iter().map(|delivery| delivery.id).collect();
        let by = Claimant { owner: &config.owner, lease: config.lease };
        let claimed_at = Instant::now();
        let claims = match store.claim(&ids, by).await {
            Ok(claims) => claims,
            Err(error) => {
                // Left pending if this fails too: idle entries are reclaimed.
                let _ = dispatcher.hand_back(&config.owner, &deliveries).await;
                return self.excuse(error.into());
            }
        };
        self.backoff.worked();
        let (claimed, over): (Vec<Delivery>, Vec<Delivery>) = deliveries
            .into_iter()
            .partition(|delivery| claims.iter().any(|claim| claim.job.id == delivery.id));
        // Final, withdrawn, or under somebody's live lease: nothing to do here.
        self.acknowledge(&over).await?;
        for (claim, request) in prepare(Arc::clone(served), claims).await {
            let held = claim.held();
            let Some(delivery) = claimed.iter().find(|delivery| delivery.id == held.id) else {
                continue;
            };
            self.flights.start(&claim, delivery.clone(), claimed_at);
            let stream = claim.job.stream && self.telling.is_some();
            if stream {
                self.streaming.insert(held.id);
                self.tell(held.id, JobEvent::Started);
            }
            match request {
                Ok(request) => self.thread.submit(held, request, stream),
                Err(error) => self.flights.end(held, Some(Outcome::Error(error))),
            }
        }
        self.show();
        Ok(())
    }

    /// Forgets deliveries for good. What cannot be acknowledged now comes back and is refused a
    /// claim.
    async fn acknowledge(&mut self, deliveries: &[Delivery]) -> Result<(), WorkerError> {
        if deliveries.is_empty() {
            return Ok(());
        }
        let Worker { dispatcher, config, .. } = self.worker;
        match dispatcher.acknowledge(&config.owner, deliveries).await {
            Ok(_) => Ok(()),
            Err(error) => self.excuse(error.into()),
        }
    }

    /// Tells renewer and onlookers what is held now.
    fn show(&self) {
        self.holding.send_replace(self.flights.holdings());
        self.worker.vitals.holding(self.flights.running_count(), self.flights.done_count());
    }

    /// Takes note of what the engine tells.
    fn note(&mut self, report: Report) {
        match report {
            Report::Ended(held, end) => self.note_end(held, end),
            Report::Progress(held, tokens) => {
                self.unsaved.insert(held, tokens);
            }
            Report::Text(held, choice, text) => {
                self.tell(held.id, JobEvent::Delta { choice, text });
            }
        }
    }

    /// Tells subscribers.
    fn tell(&self, job: JobId, event: JobEvent) {
        if let Some(telling) = &self.telling {
            // The herald ends only with this side.
            let _ = telling.send((job, event));
        }
    }

    /// Saves what long generations have so far, for whoever may have to go on with them.
    async fn save(&mut self) {
        self.unsaved.retain(|held, _| self.flights.prompt(*held).is_some());
        let save = |(held, tokens): (&Held, &Vec<u32>)| (*held, translate::checkpoint(tokens));
        let checkpoints: Vec<(Held, Vec<u8>)> = self.unsaved.iter().map(save).collect();
        if checkpoints.is_empty() {
            return;
        }
        match self.worker.store.checkpoint(&checkpoints).await {
            // Lost claims are the renewer's business.
            Ok(_) => self.unsaved.clear(),
            Err(error) => tracing::warn!(%error, "checkpoints not saved, trying again"),
        }
    }

    fn note_end(&mut self, held: Held, end: End) {
        let Some(prompt) = self.flights.prompt(held) else { return };
        let outcome = translate::outcome(&self.worker.served, prompt, end);
        self.flights.end(held, outcome);
    }

    /// Stops work whose claim is gone, or may be.
    fn lose(&mut self, lost: Lost) {
        let (held, why) = match lost {
            Lost::Taken(held) => (held, "lease lost or job cancelled, stopping it"),
            Lost::Unrenewed(held) => (held, "lease not renewed in time, stopping the job"),
        };
        let running = match lost {
            Lost::Taken(_) => self.flights.prompt(held).is_some(),
            Lost::Unrenewed(_) => self.flights.unrenewed(held),
        };
        if running {
            tracing::warn!(job = %held.id, epoch = held.epoch, "{why}");
            self.worker.vitals.lease_lost();
            self.thread.cancel(held);
        }
    }

    /// Commits every result that waits, then acknowledges. What a service cannot commit waits on.
    async fn flush(&mut self) -> Result<(), WorkerError> {
        let done = self.flights.take_done();
        if done.is_empty() {
            return Ok(());
        }
        let settled = match self.commit(&done).await {
            Ok(settled) => settled,
            Err(error) => {
                self.flights.put_back(done);
                return self.excuse(error);
            }
        };
        self.backoff.worked();
        let report = self.report(&done, &settled);
        for Settled { id, state } in &settled {
            if self.streaming.contains(id) {
                let over = JobEvent::Finished { state: *state };
                self.tell(*id, if state.is_terminal() { over } else { JobEvent::Queued });
            }
        }
        for done in &done {
            self.streaming.remove(&done.held.id);
        }
        let deliveries: Vec<Delivery> = done.into_iter().map(|done| done.delivery).collect();
        self.acknowledge(&deliveries).await?;
        self.show();
        // Nobody may be listening, which is their choice.
        let _ = self.worker.committed.send(report);
        Ok(())
    }

    async fn commit(&self, done: &[Done]) -> Result<Vec<Settled>, WorkerError> {
        let store = &self.worker.store;
        let back = flights::handed_back(done);
        if !back.is_empty() {
            store.hand_back(&back).await?;
        }
        let finished = flights::finished(done);
        if finished.is_empty() {
            return Ok(Vec::new());
        }
        Ok(store.finish(&finished).await?)
    }

    fn report(&self, done: &[Done], settled: &[Settled]) -> Committed {
        let mut report = Committed::default();
        report.settled.extend(settled.iter().map(|settled| (settled.id, settled.state)));
        for finished in flights::finished(done) {
            let written = settled.iter().any(|settled| settled.id == finished.held.id);
            match finished.outcome {
                Outcome::Completed(completion) if written => {
                    report.prompt_tokens += completion.usage.prompt_tokens;
                    report.completion_tokens += completion.usage.completion_tokens;
                }
                _ if written => {}
                _ => {
                    let Held { id, epoch } = finished.held;
                    tracing::warn!(job = %id, epoch, "result fenced out");
                    self.worker.vitals.fenced();
                }
            }
        }
        self.worker.vitals.committed(&report);
        report
    }

    /// Hands back what is still running, if store and dispatcher can be reached. What is left
    /// lapses.
    async fn abandon(&mut self) {
        // A limit of its own: a store that is away must not hold up the rest either.
        if timeout(ABANDON_LIMIT, self.save()).await.is_err() {
            tracing::warn!("checkpoints not saved: no answer in time");
        }
        let Worker { store, dispatcher, config, .. } = self.worker;
        let (held, deliveries): (Vec<Held>, Vec<Delivery>) =
            self.flights.holdings().into_iter().map(|one| (one.held, one.delivery)).unzip();
        let back = async {
            store.hand_back(&held).await?;
            dispatcher.hand_back(&config.owner, &deliveries).await?;
            Ok::<(), WorkerError>(())
        };
        match timeout(ABANDON_LIMIT, back).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::warn!(%error, "claims are left to lapse"),
            Err(_) => tracing::warn!("claims are left to lapse: no answer in time"),
        }
    }
}

/// Tokenizes on a thread where that may take its time.
async fn prepare(served: Arc<Served>, claims: Vec<Claim>) -> Vec<Prepared> {
    let work = move || {
        let each = |claim: Claim| {
            let request = translate::request(&served, &claim);
            (claim, request)
        };
        claims.into_iter().map(each).collect()
    };
    tokio::task::spawn_blocking(work).await.expect("preparing a prompt does not panic")
}
