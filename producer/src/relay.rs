//! [`Relay`]: moves the jobs of a local store to a remote queue and their outcomes back.
//!
//! The lines of a batch file are jobs of the SQLite store beside its output. The relay claims them
//! there, submits them under the same ids and finishes them with the remote outcomes. So a batch that
//! runs elsewhere is as durable as a local one: no job is submitted twice, and no recorded outcome is
//! read again.

use std::{collections::BTreeMap, ops::Bound, pin::pin, sync::Arc, time::Duration};

use tokio::{
    sync::mpsc,
    time::{Instant, sleep},
};
use tritmill_queue::{
    ClaimRef, Claimant, ErrorKind, FinishedAttempt, FinishedJob, Job, JobError, JobId, JobState,
    Outcome, QueueName, Store, StoreError, Usage,
};

use crate::client::{Client, ClientError};

/// Maximum number of jobs that wait for their answers.
const IN_FLIGHT: usize = 20_000;
/// Jobs claimed and submitted at a time.
const CHUNK: u32 = 1000;
/// Lease of local claims. No other process has the local store open, so it need not expire.
const LEASE: Duration = Duration::from_secs(365 * 86_400);
/// Time between two reads of outcomes: grows from the first to the last while no job finishes.
const WAIT_FIRST: Duration = Duration::from_millis(10);
const WAIT_LAST: Duration = Duration::from_millis(500);
/// Time to wait after a failure of the remote store.
const RETRY: Duration = Duration::from_secs(1);
/// How often unfinished jobs are looked up, and how many at a time: they may have been deleted.
const CHECK_EVERY: Duration = Duration::from_secs(10);
const CHECK_COUNT: usize = 64;

/// Outcomes that were recorded in one commit.
#[derive(Debug, Clone, Default)]
pub struct RelayProgress {
    /// New states of the local jobs.
    pub settled: Vec<JobState>,
    /// Tokens of the completed jobs.
    pub usage: Usage,
}

/// Moves jobs to a remote queue and their outcomes back.
pub struct Relay {
    local: Arc<dyn Store>,
    remote: Client,
    queue: QueueName,
    progress: mpsc::Sender<RelayProgress>,
    attempts_max: u32,
    in_flight: BTreeMap<JobId, ClaimRef>,
    /// The last local job that was submitted.
    cursor: Option<JobId>,
    sent_all: bool,
    /// Jobs to submit at a time: fewer after one that the remote store refuses, to find it.
    chunk: u32,
    /// Time of the next check of unfinished jobs, and the last job that was checked.
    check_at: Instant,
    checked: Option<JobId>,
}

impl std::fmt::Debug for Relay {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Relay").field("queue", &self.queue).finish_non_exhaustive()
    }
}

impl Relay {
    /// Creates a relay from `local` to `remote` for the jobs of one queue. It sends every commit to
    /// `progress`. Remote jobs have `attempts_max` attempts.
    pub fn new(
        local: Arc<dyn Store>,
        remote: Client,
        queue: QueueName,
        attempts_max: u32,
        progress: mpsc::Sender<RelayProgress>,
    ) -> Self {
        Self {
            local,
            remote,
            queue,
            progress,
            attempts_max,
            in_flight: BTreeMap::new(),
            cursor: None,
            sent_all: false,
            chunk: CHUNK,
            check_at: Instant::now() + CHECK_EVERY,
            checked: None,
        }
    }

    /// Runs until every local job is finished or `stop` resolves. Jobs in flight then continue
    /// remotely; the next start reads their outcomes. Retries while the remote store is down.
    ///
    /// # Errors
    /// Failures of the local store.
    pub async fn run(mut self, stop: impl Future<Output = ()>) -> Result<(), StoreError> {
        let mut stop = pin!(stop);
        let mut stopping = false;
        let mut wait = WAIT_FIRST;
        loop {
            if stopping {
                let held: Vec<ClaimRef> = self.in_flight.values().copied().collect();
                self.local.hand_back(&held).await?;
                return Ok(());
            }
            self.send().await?;
            if self.in_flight.is_empty() && self.sent_all {
                self.local.reconcile().await?;
                (self.cursor, self.sent_all) = (None, false);
                if self.local.unfinished(&self.queue).await? == 0 {
                    return Ok(());
                }
            }
            if Instant::now() >= self.check_at {
                self.resubmit_unknown().await?;
                self.check_at = Instant::now() + CHECK_EVERY;
            }
            wait = if self.collect().await? { WAIT_FIRST } else { (wait * 2).min(WAIT_LAST) };
            tokio::select! {
                () = sleep(wait) => {}
                () = &mut stop => stopping = true,
            }
        }
    }

    /// Claims the next jobs and submits them, while there is room.
    async fn send(&mut self) -> Result<(), StoreError> {
        while self.in_flight.len() < IN_FLIGHT && !self.sent_all {
            let entries = self.local.queued(&self.queue, self.cursor, self.chunk).await?;
            self.sent_all = entries.is_empty();
            let ids: Vec<JobId> = entries.iter().map(|entry| entry.id).collect();
            let by = Claimant::new("relay", LEASE);
            let claims = self.local.claim(&ids, by).await?;
            let held: Vec<ClaimRef> = claims.iter().map(|claim| claim.claim_ref()).collect();
            let attempts_max = self.attempts_max;
            let jobs: Vec<Job> =
                claims.into_iter().map(|claim| Job { attempts_max, ..claim.job }).collect();
            let Err(error) = self.remote.submit_many(&jobs).await else {
                self.chunk = (self.chunk * 2).min(CHUNK);
                self.in_flight.extend(held.into_iter().map(|held| (held.id, held)));
                self.cursor = ids.last().copied().or(self.cursor);
                continue;
            };
            let (accepted, pause) = match error {
                ClientError::Busy { accepted, retry_after, .. } => (accepted, retry_after),
                ClientError::Store(StoreError::InvalidValue { .. }) if jobs.len() > 1 => {
                    self.local.hand_back(&held).await?;
                    self.chunk = 1;
                    continue;
                }
                ClientError::Store(error @ StoreError::InvalidValue { .. }) => {
                    self.refuse(&held, &error).await?;
                    self.cursor = ids.last().copied().or(self.cursor);
                    continue;
                }
                error => {
                    tracing::warn!(%error, "jobs not submitted, trying again");
                    (0, RETRY)
                }
            };
            let (sent, unsent) = held.split_at(accepted);
            self.in_flight.extend(sent.iter().map(|held| (held.id, *held)));
            self.cursor = sent.last().map(|held| held.id).or(self.cursor);
            self.local.hand_back(unsent).await?;
            // Outcomes are read afterwards, so the pause is short.
            sleep(pause.min(RETRY)).await;
            return Ok(());
        }
        Ok(())
    }

    /// Records the refusal of jobs that the remote store cannot hold.
    async fn refuse(&self, held: &[ClaimRef], error: &StoreError) -> Result<(), StoreError> {
        tracing::error!(%error, "a line is refused by the database");
        let error = JobError::new(ErrorKind::InvalidRequest, "not_storable", error.to_string());
        let attempt = |held: &ClaimRef| FinishedAttempt {
            claim: *held,
            outcome: Outcome::Error(error.clone()),
            first_token: None,
        };
        let refused: Vec<FinishedAttempt> = held.iter().map(attempt).collect();
        let settled = self.local.finish(&refused).await?;
        let settled = settled.iter().map(|settled| settled.state).collect();
        // Fails if the receiver is gone; that is not an error.
        let _ = self.progress.send(RelayProgress { settled, usage: Usage::default() }).await;
        Ok(())
    }

    /// Looks up some of the unfinished jobs and submits those again that the remote store lost.
    async fn resubmit_unknown(&mut self) -> Result<(), StoreError> {
        let after = self.checked.map_or(Bound::Unbounded, Bound::Excluded);
        let range = self.in_flight.range((after, Bound::Unbounded));
        let some: Vec<(JobId, ClaimRef)> =
            range.take(CHECK_COUNT).map(|(id, h)| (*id, *h)).collect();
        self.checked = some.last().map(|(id, _)| *id);
        for (id, held) in some {
            if let Err(ClientError::Unknown(_)) = self.remote.poll(id).await {
                tracing::warn!(%id, "job is unknown to the queue, submitting it again");
                self.in_flight.remove(&id);
                self.local.hand_back(&[held]).await?;
                // Start over: the job may be before the cursor.
                (self.cursor, self.sent_all) = (None, false);
            }
        }
        Ok(())
    }

    /// Records the outcomes of finished jobs. Returns whether there were any.
    async fn collect(&mut self) -> Result<bool, StoreError> {
        let ids: Vec<JobId> = self.in_flight.keys().copied().collect();
        let jobs = match self.remote.finished(&ids).await {
            Ok(jobs) => jobs,
            Err(error) => {
                tracing::warn!(%error, "results not read, trying again");
                sleep(RETRY).await;
                return Ok(false);
            }
        };
        if jobs.is_empty() {
            return Ok(false);
        }
        let mut progress = RelayProgress::default();
        let (mut finished, mut cancelled) = (Vec::new(), Vec::new());
        for FinishedJob { id, outcome, .. } in jobs {
            let Some(held) = self.in_flight.remove(&id) else { continue };
            match outcome {
                Some(outcome) => {
                    if let Outcome::Completed(completion) = &outcome {
                        progress.usage.add(completion.usage);
                    }
                    finished.push(FinishedAttempt { claim: held, outcome, first_token: None });
                }
                None => cancelled.push(id),
            }
        }
        let settled = self.local.finish(&finished).await?;
        progress.settled.extend(settled.iter().map(|settled| settled.state));
        let cancelled = self.local.cancel(&cancelled).await?;
        progress.settled.extend(cancelled.iter().map(|_| JobState::Cancelled));
        // Fails if the receiver is gone; that is not an error.
        let _ = self.progress.send(progress).await;
        Ok(true)
    }
}
