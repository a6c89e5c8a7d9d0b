//! [`Relay`]: carries the jobs of a local store to a remote queue and their outcomes back.
//!
//! A batch file's lines are jobs of the SQLite store beside its output. The relay claims them
//! there, submits them under the same ids and finishes them with what comes back, so a batch that
//! runs elsewhere is as durable as one that runs here: a job that was submitted already is not
//! submitted twice, and an outcome that was recorded is not asked for again.

use std::{collections::BTreeMap, ops::Bound, pin::pin, sync::Arc, time::Duration};

use tokio::{
    sync::mpsc,
    time::{Instant, sleep},
};
use tritmill_queue::{
    ClaimRef, Claimant, FinishedAttempt, FinishedJob, Job, JobId, JobState, Outcome, QueueName,
    Store, StoreError,
};

use crate::client::{Client, ClientError};

/// Jobs that wait for their answers at most.
const IN_FLIGHT: usize = 20_000;
/// Jobs claimed and submitted at a time.
const CHUNK: u32 = 1000;
/// Nobody else has the local store open.
const LEASE: Duration = Duration::from_secs(365 * 86_400);
const WAIT_FIRST: Duration = Duration::from_millis(10);
const WAIT_LAST: Duration = Duration::from_millis(500);
/// Wait after a failure of the remote store.
const RETRY: Duration = Duration::from_secs(1);
/// How often jobs that have not ended are looked for, and how many of them: somebody may have
/// deleted them there.
const LOOK_EVERY: Duration = Duration::from_secs(10);
const LOOK_COUNT: usize = 64;

/// Outcomes that were recorded together.
#[derive(Debug, Clone, Default)]
pub struct RelayProgress {
    /// States of the local jobs.
    pub settled: Vec<JobState>,
    /// Generated tokens of the completed ones.
    pub completion_tokens: u64,
}

/// Carries jobs out and outcomes home.
pub struct Relay {
    local: Arc<dyn Store>,
    remote: Client,
    queue: QueueName,
    progress: mpsc::UnboundedSender<RelayProgress>,
    attempts_max: u32,
    in_flight: BTreeMap<JobId, ClaimRef>,
    cursor: Option<JobId>,
    sent_all: bool,
    /// When to look for jobs that have not ended, and after which one.
    look_at: Instant,
    looked: Option<JobId>,
}

impl std::fmt::Debug for Relay {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Relay").field("queue", &self.queue).finish_non_exhaustive()
    }
}

impl Relay {
    /// Between `local` and `remote`, for the jobs of one queue; `progress` is told of every commit.
    /// Elsewhere a job has `attempts_max` attempts.
    pub fn new(
        local: Arc<dyn Store>,
        remote: Client,
        queue: QueueName,
        attempts_max: u32,
        progress: mpsc::UnboundedSender<RelayProgress>,
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
            look_at: Instant::now() + LOOK_EVERY,
            looked: None,
        }
    }

    /// Runs until every local job is over, or `stop` resolves; then what is under way goes on
    /// elsewhere and is asked for at the next start. Failures of the remote are waited out.
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
            if Instant::now() >= self.look_at {
                self.look().await?;
                self.look_at = Instant::now() + LOOK_EVERY;
            }
            wait = if self.collect().await? { WAIT_FIRST } else { (wait * 2).min(WAIT_LAST) };
            tokio::select! {
                () = sleep(wait) => {}
                () = &mut stop => stopping = true,
            }
        }
    }

    /// Claims the next jobs and submits them, if there is room.
    async fn send(&mut self) -> Result<(), StoreError> {
        while self.in_flight.len() < IN_FLIGHT && !self.sent_all {
            let entries = self.local.queued(&self.queue, self.cursor, CHUNK).await?;
            self.sent_all = entries.is_empty();
            let ids: Vec<JobId> = entries.iter().map(|entry| entry.id).collect();
            let by = Claimant { owner: "relay", lease: LEASE };
            let claims = self.local.claim(&ids, by).await?;
            let held: Vec<ClaimRef> = claims.iter().map(|claim| claim.claim_ref()).collect();
            let attempts_max = self.attempts_max;
            let jobs: Vec<Job> =
                claims.into_iter().map(|claim| Job { attempts_max, ..claim.job }).collect();
            match self.remote.submit_many(&jobs).await {
                Ok(()) => {
                    self.in_flight.extend(held.into_iter().map(|held| (held.id, held)));
                    self.cursor = ids.last().copied().or(self.cursor);
                }
                Err(error) => {
                    let accepted = match error {
                        ClientError::Busy { accepted, .. } => accepted,
                        _ => 0,
                    };
                    let (sent, unsent) = held.split_at(accepted);
                    self.in_flight.extend(sent.iter().map(|held| (held.id, *held)));
                    self.cursor = sent.last().map(|held| held.id).or(self.cursor);
                    self.local.hand_back(unsent).await?;
                    let pause = match error {
                        ClientError::Busy { retry_after, .. } => retry_after,
                        _ => {
                            tracing::warn!(%error, "jobs not submitted, trying again");
                            RETRY
                        }
                    };
                    // Answers go on coming in meanwhile, a little later.
                    sleep(pause.min(RETRY)).await;
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    /// Looks for some of the jobs that have not ended; those that are not known any more are
    /// submitted again.
    async fn look(&mut self) -> Result<(), StoreError> {
        let after = self.looked.map_or(Bound::Unbounded, Bound::Excluded);
        let range = self.in_flight.range((after, Bound::Unbounded));
        let some: Vec<(JobId, ClaimRef)> =
            range.take(LOOK_COUNT).map(|(id, h)| (*id, *h)).collect();
        self.looked = some.last().map(|(id, _)| *id);
        for (id, held) in some {
            if let Err(ClientError::Unknown(_)) = self.remote.result(id).await {
                tracing::warn!(%id, "job is not known any more, submitting it again");
                self.in_flight.remove(&id);
                self.local.hand_back(&[held]).await?;
                // From the start: it may lie before the cursor.
                (self.cursor, self.sent_all) = (None, false);
            }
        }
        Ok(())
    }

    /// Records what has ended; whether anything had.
    async fn collect(&mut self) -> Result<bool, StoreError> {
        let ids: Vec<JobId> = self.in_flight.keys().copied().collect();
        let ended = match self.remote.ended(&ids).await {
            Ok(ended) => ended,
            Err(error) => {
                tracing::warn!(%error, "results not read, trying again");
                sleep(RETRY).await;
                return Ok(false);
            }
        };
        if ended.is_empty() {
            return Ok(false);
        }
        let mut progress = RelayProgress::default();
        let (mut finished, mut withdrawn) = (Vec::new(), Vec::new());
        for FinishedJob { id, outcome, .. } in ended {
            let Some(held) = self.in_flight.remove(&id) else { continue };
            match outcome {
                Some(outcome) => {
                    if let Outcome::Completed(completion) = &outcome {
                        progress.completion_tokens += completion.usage.completion_tokens;
                    }
                    finished.push(FinishedAttempt { claim: held, outcome, first_token: None });
                }
                None => withdrawn.push(id),
            }
        }
        let settled = self.local.finish(&finished).await?;
        progress.settled.extend(settled.iter().map(|settled| settled.state));
        let withdrawn = self.local.cancel(&withdrawn).await?;
        progress.settled.extend(withdrawn.iter().map(|_| JobState::Cancelled));
        // Nobody may be listening.
        let _ = self.progress.send(progress);
        Ok(true)
    }
}
