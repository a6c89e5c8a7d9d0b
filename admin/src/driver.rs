//! [`Driver`]: processes batches, from a file of lines to a file of answers.
//!
//! A batch proceeds in steps. A step claims the batch, does a bounded amount of work ([`budget`]), saves what
//! the next step needs, and releases the batch with the time of the next step: at once while there is more to
//! do, later while jobs run or the queue is full. A batch that waits holds nothing. Claims go round the tenants.
//!
//! An interrupted step is repeated by the next process that claims the batch. Repeating is harmless: all that a
//! step writes, it writes in one transaction under the epoch of its claim, and the id of a line's job depends
//! on the line alone.
//!
//! | state | step | in |
//! | --- | --- | --- |
//! | `validating` | wait for the earlier batch and make lines of it, if there is one | `chain.rs` |
//! | `validating` | read the next pages of the source of its lines, if that lies elsewhere | `fetch.rs` |
//! | `validating` | read the next lines, or reject the file | `validate.rs` |
//! | `in_progress` | submit lines as the queue has room, count finished jobs and number them | `progress.rs`, `numbering.rs` |
//! | `paused` | hold the jobs that have not started, count finished jobs and number them | `pause.rs`, `numbering.rs` |
//! | `finalizing`, `cancelling` | write the next part of the output files | `finish.rs` |
//! | `finalizing`, `cancelling` | write the output to where the batch wants it, too | `finish/export.rs` |
//!
//! A step that fails is tried again later. A batch that was claimed twice at the same place by processes that
//! died or froze, or whose step twice did not end in time, is failed alone (`fail.rs`). A process drives such a
//! suspect while it drives nothing else, so that the death of the process counts against that batch only.

mod appended;
mod budget;
mod chain;
mod erase;
mod fail;
mod fetch;
mod finish;
mod front;
mod kept;
pub(crate) mod lines;
mod numbering;
mod objects;
mod pause;
mod progress;
mod rerun;
mod retries;
mod stored_answers;
mod sweep;
mod validate;

use std::{sync::Arc, time::Duration};

use tokio::{
    sync::watch,
    task::JoinSet,
    time::{Instant, sleep, sleep_until, timeout},
};
use tritmill_queue::{QueueName, StoreError, Timestamp, store::Claimant};

use self::budget::Budget;
pub(crate) use self::{
    fetch::{SOURCES_MAX, SourceReader},
    finish::export::{EXPORTS_MAX, Export},
    kept::Kept,
    validate::hash as custom_id_hash,
};
use crate::{
    App,
    store::{
        BatchId, BatchState, FrontStore,
        batch_steps::{BatchClaim, BatchWrites, Claimable},
    },
};

/// Lease of a claimed batch.
const LEASE: Duration = Duration::from_secs(15);
/// Most steps at once.
const STEPS_MAX: usize = 16;
/// Longest pause between two claims.
const POLL: Duration = Duration::from_secs(1);
/// Delay of the next step after a failed one.
const RETRY: Duration = Duration::from_secs(2);
/// Time limit of a step: more than all calls of a step may take, of which each has its own limit.
const STEP_WITHIN: Duration = Duration::from_secs(300);
/// Failures at the same place that end a batch.
const FAILURES_MAX: u64 = 2;
/// Pause between two tries to release a batch while the store is away.
const RELEASE_AGAIN: Duration = Duration::from_millis(500);

/// A step ended early.
#[derive(Debug, thiserror::Error)]
enum Interrupted {
    /// The claim is no longer valid: the batch was cancelled or claimed by another process.
    #[error("the claim is no longer valid")]
    Fenced,
    /// The step did not end in time.
    #[error("the step did not end within {} s", STEP_WITHIN.as_secs())]
    Hung,
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// When a batch has its next step.
enum Next {
    /// At once.
    Now,
    /// After this time.
    After(Duration),
    /// Never: the batch is in a terminal state.
    Finished,
}

/// Processes the batches of a service.
pub struct Driver {
    app: App,
    owner: String,
    stop: watch::Receiver<bool>,
    /// Running steps; each returns the delay of the batch's next step.
    steps: JoinSet<Duration>,
    claim_at: Instant,
    probe_at: Instant,
    /// Whether a suspect batch is due. It waits until the running steps have ended.
    has_suspect: bool,
}

impl Driver {
    /// A driver that stops when `stop` is true or its sender is dropped; `owner` names its process, for
    /// people.
    pub fn new(app: App, owner: String, stop: watch::Receiver<bool>) -> Self {
        let now = Instant::now();
        let (steps, has_suspect) = (JoinSet::new(), false);
        Self { app, owner, stop, steps, claim_at: now, probe_at: now, has_suspect }
    }

    /// Runs until it is stopped, then releases its batches.
    pub async fn run(mut self) {
        let (app, mut stop) = (self.app.clone(), self.stop.clone());
        let erasing = tokio::spawn(erase::run(app.clone(), stop.clone()));
        let sweeping = tokio::spawn(sweep::run(app.clone(), stop.clone()));
        let sweeping_objects = tokio::spawn(objects::run(app.clone(), stop.clone()));
        loop {
            while let Some(ended) = self.steps.try_join_next() {
                self.step_ended(ended);
            }
            self.begin_steps().await;
            app.metrics.batches_driven.set(i64::try_from(self.steps.len()).unwrap_or(i64::MAX));
            let may_claim = self.steps.len() < STEPS_MAX && !self.has_suspect;
            tokio::select! {
                _ = stop.wait_for(|stop| *stop) => break,
                Some(ended) = self.steps.join_next() => self.step_ended(ended),
                () = app.batch_changed.notified() => self.claim_at = Instant::now(),
                () = sleep_until(self.claim_at), if may_claim => {}
            }
        }
        // They stop at the same signal.
        while self.steps.join_next().await.is_some() {}
        app.sources.clear();
        app.exports.clear();
        let _ = (erasing.await, sweeping.await, sweeping_objects.await);
    }

    fn step_ended(&mut self, ended: Result<Duration, tokio::task::JoinError>) {
        match ended {
            // With all slots in use, other batches may have become due.
            Ok(_) if self.steps.len() + 1 >= STEPS_MAX => self.claim_at = Instant::now(),
            Ok(after) => self.claim_at = self.claim_at.min(Instant::now() + after),
            Err(error) => tracing::error!(%error, "a step of a batch panicked"),
        }
    }

    /// Claims due batches and begins their steps.
    async fn begin_steps(&mut self) {
        if !self.has_suspect && self.probe_at <= Instant::now() {
            self.probe_at = Instant::now() + POLL;
            self.app.sources.drop_idle();
            self.app.exports.drop_idle();
            self.has_suspect = self.app.store.has_suspect_batches().await.unwrap_or_else(|error| {
                tracing::warn!(%error, "cannot look for batches, trying again");
                false
            });
        }
        if self.has_suspect {
            if self.steps.is_empty() {
                self.begin(Claimable::Suspect, 1).await;
                // Nothing runs beside it. Other batches come before the next suspect.
                while let Some(ended) = self.steps.join_next().await {
                    self.step_ended(ended);
                }
                (self.has_suspect, self.claim_at) = (false, Instant::now());
                self.probe_at = Instant::now() + POLL;
            }
            return;
        }
        let room = STEPS_MAX.saturating_sub(self.steps.len());
        if room > 0 && self.claim_at <= Instant::now() {
            self.claim_at = Instant::now() + POLL;
            self.begin(Claimable::Released, room).await;
        }
    }

    async fn begin(&mut self, which: Claimable, room: usize) {
        let (by, max) = (Claimant::new(&self.owner, LEASE), room as u32);
        match self.app.store.claim_batches(which, by, max).await {
            Ok(claims) => {
                for claim in claims {
                    self.steps.spawn(drive(self.app.clone(), claim, self.stop.clone()));
                }
            }
            Err(error) => tracing::warn!(%error, "cannot claim batches, trying again"),
        }
    }
}

/// Does one step of a batch and releases it. Returns the delay of the next step.
async fn drive(app: App, claim: BatchClaim, mut stop: watch::Receiver<bool>) -> Duration {
    let (id, epoch) = (claim.batch.id, claim.epoch);
    let ended = tokio::select! {
        ended = timeout(STEP_WITHIN, step(&app, claim)) => {
            ended.unwrap_or(Err(Interrupted::Hung))
        }
        () = renew(&app.store, id, epoch) => Err(Interrupted::Fenced),
        _ = stop.wait_for(|stop| *stop) => Ok(Next::Now),
    };
    let is_hung = matches!(ended, Err(Interrupted::Hung));
    let is_finished = matches!(ended, Ok(Next::Finished));
    let after = match ended {
        Ok(Next::Now) => Duration::ZERO,
        Ok(Next::After(delay)) => delay,
        Ok(Next::Finished) => POLL,
        Err(Interrupted::Fenced) => {
            tracing::info!(batch = %id, "the batch was cancelled or claimed by another process");
            return Duration::ZERO;
        }
        Err(error) => {
            tracing::warn!(batch = %id, %error, "a step of the batch failed, trying again");
            RETRY
        }
    };
    release(&app.store, id, epoch, after, is_hung).await;
    if is_finished {
        app.notice_due.notify_one();
    }
    after
}

/// Renews a claim until it is no longer valid.
async fn renew(store: &Arc<dyn FrontStore>, id: BatchId, epoch: i64) {
    let mut held_until = Instant::now() + LEASE;
    loop {
        sleep(LEASE / 3).await;
        let started = Instant::now();
        match store.renew_batch(id, epoch, LEASE).await {
            Ok(true) => held_until = started + LEASE,
            Ok(false) => return,
            // The last third of the lease is for the step that is running.
            Err(_) if Instant::now() + LEASE / 3 >= held_until => return,
            Err(error) => {
                tracing::warn!(batch = %id, %error, "cannot renew the claim of a batch")
            }
        }
    }
}

/// Releases a claim. While the store is away, it tries for a lease, so that the outage does not count as a
/// failure of the batch.
async fn release(
    store: &Arc<dyn FrontStore>,
    id: BatchId,
    epoch: i64,
    after: Duration,
    is_hung: bool,
) {
    let until = Instant::now() + LEASE;
    loop {
        let released = match is_hung {
            true => store.charge_batch(id, epoch, after).await,
            false => store.release_batch(id, epoch, after).await,
        };
        match released {
            Ok(()) => return,
            Err(error) if Instant::now() >= until => {
                return tracing::warn!(batch = %id, %error, "cannot release a batch, its lease expires");
            }
            Err(_) => sleep(RELEASE_AGAIN).await,
        }
    }
}

/// Does the next step of a batch.
async fn step(app: &App, mut claim: BatchClaim) -> Result<Next, Interrupted> {
    let claim = &mut claim;
    if claim.failures >= FAILURES_MAX {
        return fail::fail(app, claim).await;
    }
    let budget = Budget::new();
    let next = match claim.batch.state {
        BatchState::Validating if !claim.batch.has_input() => match claim.batch.input_url {
            Some(_) => fetch::step(app, claim, budget).await?,
            None => chain::step(app, claim, budget).await?,
        },
        BatchState::Validating => validate::step(app, claim, budget).await?,
        BatchState::InProgress => progress::step(app, claim, budget).await?,
        BatchState::Paused => pause::step(app, claim, budget).await?,
        BatchState::Finalizing | BatchState::Cancelling => finish::step(app, claim, budget).await?,
        _ => Next::Finished,
    };
    if claim.failures > 0 && !matches!(next, Next::Finished) {
        // Also if the step found nothing to do: it ended, so the batch is no longer suspect.
        save(app, claim, BatchWrites::default()).await?;
    }
    if matches!(next, Next::Finished) {
        tracing::info!(batch = %claim.batch.id, state = claim.batch.state.as_str(), "batch finished");
    }
    Ok(next)
}

/// Writes a batch, with jobs and files, in one transaction.
async fn save(app: &App, claim: &BatchClaim, writes: BatchWrites<'_>) -> Result<(), Interrupted> {
    match app.store.save_batch(claim, writes).await? {
        true => Ok(()),
        false => Err(Interrupted::Fenced),
    }
}

/// A change of all unfinished jobs of a batch.
#[derive(Debug, Clone, Copy)]
enum JobsChange<'a> {
    /// They are cancelled.
    Cancel,
    /// They cannot start; with `running`, those that run stop.
    Hold { running: bool },
    /// They may start, and have this deadline.
    Release { expires_at: Timestamp },
    /// Those that wait go to this queue.
    Move { to: &'a QueueName },
}

/// Changes unfinished jobs of a batch. Returns whether none is left to change.
async fn change_jobs(
    app: &App,
    id: BatchId,
    change: JobsChange<'_>,
    budget: &mut Budget,
) -> Result<bool, StoreError> {
    /// Jobs changed by one call.
    const CHUNK: u32 = 5000;
    loop {
        let (store, jobs) = (&app.store, id.all_jobs());
        let changed = match change {
            JobsChange::Cancel => store.cancel_range(jobs, CHUNK).await?,
            JobsChange::Hold { running } => store.hold_range(jobs, running, CHUNK).await?,
            JobsChange::Release { expires_at } => {
                store.release_range(jobs, expires_at, CHUNK).await?
            }
            JobsChange::Move { to } => store.move_range(jobs, to, CHUNK).await?,
        };
        if !changed.more {
            return Ok(true);
        }
        budget.spend(CHUNK as usize, 0);
        if budget.is_spent() {
            return Ok(false);
        }
    }
}
