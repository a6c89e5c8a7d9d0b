//! The worker's loop.
//!
//! ```text
//! feed ─► dispatcher ─pull─► claim ─► prepare ─► engine thread
//!                                                    │
//!              acknowledge ◄─ commit (finish) ◄─ collect ends
//! ```
//!
//! One task owns all state and waits on one thing at a time: ends of requests, a pull, the flush
//! timer, the renewal timer, or the wish to stop. Results are committed together: when enough have
//! come, when the oldest has waited [`FLUSH_WAIT`], or when the engine has nothing else to do.
//!
//! Embedded, the worker is its own feeder: it fills the dispatcher from the store in order of id and
//! ends when nothing is unfinished.

mod flights;

use std::{future::Future, pin::Pin, sync::Arc, time::Duration};

use tokio::{
    sync::{mpsc, watch},
    time::{Instant, MissedTickBehavior, interval, sleep, sleep_until},
};
use tritmill_engine::{Engine, Request};
use tritmill_queue::{
    Claim, Claimant, Delivery, DispatchError, Dispatcher, Finished, JobError, JobId, JobState,
    Outcome, Pull, QueueName, Store, StoreError,
};

use self::flights::Flights;
use crate::{
    engine_thread::{End, EngineThread},
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
/// Wait for the first entry of a pull; a stop does not wait for it.
const PULL_WAIT: Duration = Duration::from_secs(5);
/// Wait before looking again whether a retrying job is due.
const IDLE_WAIT: Duration = Duration::from_millis(50);
/// How often a commit is tried before the worker gives up, and the wait in between.
const COMMIT_TRIES: u32 = 5;
const COMMIT_WAIT: Duration = Duration::from_millis(200);

/// Who fills the dispatcher, and when the worker ends by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Others fill it; the worker runs until it is told to stop.
    Service,
    /// The worker fills it from the store and ends when nothing is unfinished.
    Embedded,
}

/// What a worker is told from outside.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stop {
    /// Go on.
    No,
    /// Take nothing new, finish and commit what runs, hand the rest back.
    Drain,
}

/// How a worker works.
#[derive(Debug, Clone)]
pub struct WorkerConfig {
    /// The queue it serves.
    pub queue: QueueName,
    /// Name of the process incarnation.
    pub owner: String,
    /// Choices it holds at once: what the engine runs, and a few prepared ones.
    pub slots: usize,
    /// Length of a claim; renewed three times as often.
    pub lease: Duration,
    /// How long a drain waits for running jobs before it hands them back.
    pub drain: Duration,
    /// How long one step may run before the worker takes the engine for hung.
    pub step_limit: Duration,
    /// Who fills the dispatcher.
    pub mode: Mode,
}

/// Results that were committed together.
#[derive(Debug, Clone, Default)]
pub struct Committed {
    /// Each job and its state now.
    pub settled: Vec<(JobId, JobState)>,
    /// Prompt tokens of the completed ones.
    pub prompt_tokens: u64,
    /// Generated tokens of the completed ones.
    pub completion_tokens: u64,
}

/// Why a worker ended before its work did. Claims that are left lapse.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WorkerError {
    /// The store failed for longer than the worker waits.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The dispatcher failed.
    #[error(transparent)]
    Dispatch(#[from] DispatchError),
    /// The engine's thread died.
    #[error("the engine stopped: its thread panicked")]
    EngineStopped,
    /// A step did not end. Claims were handed back; the process should end, its thread never may.
    #[error("the engine hangs: one step has run for more than {} s", .0.as_secs_f32())]
    EngineHangs(Duration),
    /// The engine's thread could not be started.
    #[error("cannot start the engine's thread: {0}")]
    Thread(#[source] std::io::Error),
}

/// A worker, ready to run.
pub struct Worker {
    /// The truth.
    pub store: Arc<dyn Store>,
    /// Says what is next.
    pub dispatcher: Arc<dyn Dispatcher>,
    /// What answers.
    pub served: Arc<Served>,
    /// How.
    pub config: WorkerConfig,
    /// Told of every commit; the worker does not mind if nobody listens.
    pub committed: mpsc::UnboundedSender<Committed>,
}

impl std::fmt::Debug for Worker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Worker").field("config", &self.config).finish_non_exhaustive()
    }
}

impl Worker {
    /// Runs until the work is done ([`Mode::Embedded`]) or `stop` says so.
    ///
    /// # Errors
    /// [`WorkerError`].
    pub async fn run(
        self,
        engine: Engine,
        mut stop: watch::Receiver<Stop>,
    ) -> Result<(), WorkerError> {
        let thread = EngineThread::start(engine).map_err(WorkerError::Thread)?;
        let mut turn = Turn {
            worker: &self,
            thread,
            flights: Flights::default(),
            cursor: None,
            fed_all: false,
        };
        turn.run(&mut stop).await
    }
}

type PullFuture<'a> =
    Pin<Box<dyn Future<Output = Result<Vec<Delivery>, DispatchError>> + Send + 'a>>;

/// A claim and its request, or why it can have none.
type Prepared = (Claim, Result<Request, JobError>);

struct Turn<'a> {
    worker: &'a Worker,
    thread: EngineThread,
    flights: Flights,
    /// Last job fed to the dispatcher.
    cursor: Option<JobId>,
    /// Whether the store had nothing queued beyond the cursor.
    fed_all: bool,
}

impl Turn<'_> {
    async fn run(&mut self, stop: &mut watch::Receiver<Stop>) -> Result<(), WorkerError> {
        let worker = self.worker;
        let mut renewals = interval((worker.config.lease / 3).max(Duration::from_millis(1)));
        renewals.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut watchdog = Watchdog::new(worker.config.step_limit);
        let mut pulling: Option<PullFuture<'_>> = None;
        let mut draining: Option<Instant> = None;
        loop {
            if draining.is_none() && *stop.borrow_and_update() == Stop::Drain {
                draining = Some(Instant::now() + worker.config.drain);
                pulling = None;
            }
            if draining.is_some() && self.flights.is_empty() {
                return Ok(());
            }
            if draining.is_none() && pulling.is_none() {
                pulling = self.next_pull().await?;
                if pulling.is_none() && self.flights.is_empty() {
                    if self.is_done().await? {
                        return Ok(());
                    }
                    continue;
                }
            }
            let flush_at = self.flights.flush_at(FLUSH_WAIT);
            let forever = Instant::now() + Duration::from_secs(86_400);
            tokio::select! {
                biased;
                end = self.thread.ended.recv() => {
                    let (held, end) = end.ok_or(WorkerError::EngineStopped)?;
                    self.note(held, end);
                    while let Ok((held, end)) = self.thread.ended.try_recv() {
                        self.note(held, end);
                    }
                }
                _ = renewals.tick() => self.renew().await?,
                () = watchdog.wait() => {
                    if watchdog.look(self.thread.running_step()) {
                        self.thread.forsake();
                        self.flush().await?;
                        self.abandon().await?;
                        return Err(WorkerError::EngineHangs(worker.config.step_limit));
                    }
                }
                Ok(()) = stop.changed(), if draining.is_none() => {}
                () = sleep_until(flush_at.unwrap_or(forever)), if flush_at.is_some() => {
                    self.flush().await?;
                }
                () = sleep_until(draining.unwrap_or(forever)), if draining.is_some() => {
                    self.flush().await?;
                    return self.abandon().await;
                }
                pulled = async { pulling.as_mut().expect("guarded").await }, if pulling.is_some() => {
                    pulling = None;
                    self.start(pulled?).await?;
                }
            }
            if self.flights.done_count() >= FLUSH_COUNT || self.flights.only_done() {
                self.flush().await?;
            }
        }
    }

    /// Asks the dispatcher for what fits, if there is room and anything to be had.
    async fn next_pull<'w>(&mut self) -> Result<Option<PullFuture<'w>>, WorkerError>
    where
        Self: 'w,
    {
        let worker = self.worker;
        let max = worker.config.slots.saturating_sub(self.flights.choices());
        if max == 0 {
            return Ok(None);
        }
        if worker.config.mode == Mode::Embedded && !self.feed(max).await? {
            return Ok(None);
        }
        let pull = Pull {
            queue: &worker.config.queue,
            consumer: &worker.config.owner,
            max,
            wait: PULL_WAIT,
        };
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
        let claims = store.claim(&ids, by).await?;
        let (claimed, over): (Vec<Delivery>, Vec<Delivery>) = deliveries
            .into_iter()
            .partition(|delivery| claims.iter().any(|claim| claim.job.id == delivery.id));
        // Final, withdrawn, or under somebody's live lease: nothing to do here.
        dispatcher.acknowledge(&config.owner, &over).await?;
        for ((claim, request), delivery) in
            prepare(Arc::clone(served), claims).await.into_iter().zip(claimed)
        {
            let held = claim.held();
            self.flights.start(&claim, delivery);
            match request {
                Ok(request) => self.thread.submit(held, request),
                Err(error) => self.flights.end(held, Some(Outcome::Error(error))),
            }
        }
        Ok(())
    }

    /// Takes note of a request's end.
    fn note(&mut self, held: tritmill_queue::Held, end: End) {
        let served = &self.worker.served;
        let Some(prompt) = self.flights.prompt(held) else { return };
        let outcome = translate::outcome(served, prompt, end);
        self.flights.end(held, outcome);
    }

    /// Commits every result that waits, then acknowledges.
    async fn flush(&mut self) -> Result<(), WorkerError> {
        let Worker { dispatcher, config, committed, .. } = self.worker;
        let done = self.flights.take_done();
        if done.is_empty() {
            return Ok(());
        }
        let (deliveries, finished): (Vec<Delivery>, Vec<Option<Finished>>) =
            done.into_iter().unzip();
        let finished: Vec<Finished> = finished.into_iter().flatten().collect();
        let settled = self.commit(&finished).await?;
        let mut report = Committed::default();
        for settled in &settled {
            report.settled.push((settled.id, settled.state));
        }
        for Finished { held, outcome } in &finished {
            let written = settled.iter().any(|settled| settled.id == held.id);
            match outcome {
                Outcome::Completed(completion) if written => {
                    report.prompt_tokens += completion.usage.prompt_tokens;
                    report.completion_tokens += completion.usage.completion_tokens;
                }
                _ if written => {}
                _ => tracing::warn!(job = %held.id, epoch = held.epoch, "result fenced out"),
            }
        }
        dispatcher.acknowledge(&config.owner, &deliveries).await?;
        // Nobody may be listening, which is their choice.
        let _ = committed.send(report);
        Ok(())
    }

    /// Repeats a commit that failed; finished results wait in memory meanwhile.
    async fn commit(
        &self,
        finished: &[Finished],
    ) -> Result<Vec<tritmill_queue::Settled>, WorkerError> {
        let mut tries = 0;
        loop {
            match self.worker.store.finish(finished).await {
                Ok(settled) => return Ok(settled),
                Err(error) => {
                    tries += 1;
                    if tries == COMMIT_TRIES {
                        return Err(error.into());
                    }
                    tracing::warn!(%error, tries, "commit failed, trying again");
                    sleep(COMMIT_WAIT).await;
                }
            }
        }
    }

    /// Renews every lease; work whose claim was lost or cancelled stops.
    async fn renew(&mut self) -> Result<(), WorkerError> {
        let held = self.flights.held();
        if held.is_empty() {
            return Ok(());
        }
        for lost in self.worker.store.renew(&held, self.worker.config.lease).await? {
            tracing::warn!(job = %lost.id, epoch = lost.epoch, "lease lost, stopping the job");
            self.thread.cancel(lost);
        }
        Ok(())
    }

    /// Hands back what is still running.
    async fn abandon(&mut self) -> Result<(), WorkerError> {
        let Worker { store, dispatcher, config, .. } = self.worker;
        store.hand_back(&self.flights.held()).await?;
        dispatcher.hand_back(&config.owner, &self.flights.deliveries()).await?;
        Ok(())
    }
}

/// Tokenizes on a thread where that may take its time.
async fn prepare(served: Arc<Served>, claims: Vec<Claim>) -> Vec<Prepared> {
    let work = move || {
        let each = |claim: Claim| {
            let request = translate::request(&served, &claim.job, claim.expires_in);
            (claim, request)
        };
        claims.into_iter().map(each).collect()
    };
    tokio::task::spawn_blocking(work).await.expect("preparing a prompt does not panic")
}
