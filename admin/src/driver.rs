//! [`Driver`]: processes batches, from a file of lines to a file of answers.
//!
//! Each step reads the batch, does its work and writes the batch under the epoch of its claim. An
//! interrupted step is repeated by the next process that claims the batch. Repeating is harmless:
//! validation only writes its result, the id of a line's job depends on the line alone, and an output file
//! becomes visible in the transaction that finishes the batch.
//!
//! | state | step | in |
//! | --- | --- | --- |
//! | `validating` | read every line, or reject the file | `validate.rs` |
//! | `in_progress` | submit lines as the queue has room, count finished jobs | `progress.rs` |
//! | `finalizing`, `cancelling` | write the output files | `finish.rs` |

mod finish;
mod lines;
mod progress;
mod validate;

use std::{sync::Arc, time::Duration};

use tokio::{
    sync::watch,
    task::JoinSet,
    time::{Instant, sleep},
};
use tritmill_queue::{
    StoreError,
    store::{
        BatchState,
        batches::{BatchClaim, BatchWrites},
    },
};

use crate::App;

/// Lease of a claimed batch.
const LEASE: Duration = Duration::from_secs(15);
/// Most batches processed at once.
const BATCHES_MAX: usize = 16;
/// Pause between two claims.
const POLL: Duration = Duration::from_secs(1);
/// Pause after a failed step, before the batch is released.
const RETRY: Duration = Duration::from_secs(2);
/// Pause between two sweeps of files.
const SWEEP: Duration = Duration::from_secs(3600);

/// A step ended early.
#[derive(Debug, thiserror::Error)]
enum Interrupted {
    /// The claim is no longer valid: the batch was cancelled or claimed by another process.
    #[error("the claim is no longer valid")]
    Fenced,
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Processes the batches of a service.
pub struct Driver {
    app: App,
    owner: String,
}

impl Driver {
    /// A driver; `owner` names its process, for people.
    pub fn new(app: App, owner: String) -> Self {
        Self { app, owner }
    }

    /// Runs until `stop` is true or its sender is dropped, then releases its batches.
    pub async fn run(self, mut stop: watch::Receiver<bool>) {
        let mut driven = JoinSet::new();
        let mut sweep_at = Instant::now();
        loop {
            while driven.try_join_next().is_some() {}
            if sweep_at <= Instant::now() {
                self.sweep().await;
                sweep_at = Instant::now() + SWEEP;
            }
            for claim in self.claim(BATCHES_MAX.saturating_sub(driven.len())).await {
                driven.spawn(drive(self.app.clone(), claim, stop.clone()));
            }
            self.app.metrics.batches_driven.set(i64::try_from(driven.len()).unwrap_or(i64::MAX));
            tokio::select! {
                _ = stop.wait_for(|stop| *stop) => break,
                () = self.app.batch_changed.notified() => {}
                () = sleep(POLL) => {}
            }
        }
        // They stop at the same signal.
        while driven.join_next().await.is_some() {}
    }

    async fn claim(&self, room: usize) -> Vec<BatchClaim> {
        let limit = u32::try_from(room).unwrap_or(u32::MAX);
        if limit == 0 {
            return Vec::new();
        }
        let claimed = self.app.store.claim_batches(&self.owner, LEASE, limit).await;
        claimed.unwrap_or_else(|error| {
            tracing::warn!(%error, "cannot claim batches, trying again");
            Vec::new()
        })
    }

    async fn sweep(&self) {
        match self.app.store.sweep_files().await {
            Ok(0) => {}
            Ok(files) => {
                tracing::info!(files, "deleted files that expired or were never completed")
            }
            Err(error) => tracing::warn!(%error, "cannot sweep files, trying again in an hour"),
        }
    }
}

/// Processes one batch until it is finished or the claim is no longer valid.
async fn drive(app: App, claim: BatchClaim, mut stop: watch::Receiver<bool>) {
    let (id, epoch) = (claim.batch.id, claim.epoch);
    let store = Arc::clone(&app.store);
    let renewed = async move {
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
    };
    let ended = tokio::select! {
        ended = advance(&app, claim) => ended,
        () = renewed => Err(Interrupted::Fenced),
        _ = stop.wait_for(|stop| *stop) => Ok(()),
    };
    match ended {
        Ok(()) => {}
        Err(Interrupted::Fenced) => {
            tracing::info!(batch = %id, "the batch was cancelled or claimed by another process");
            app.batch_changed.notify_one();
            return;
        }
        Err(error) => {
            tracing::warn!(batch = %id, %error, "a step of the batch failed, trying again");
            sleep(RETRY).await;
        }
    }
    // Saves other processes the wait for the end of the lease.
    if let Err(error) = app.store.release_batch(id, epoch).await {
        tracing::debug!(batch = %id, %error, "cannot release a batch, its lease will expire");
    }
    app.webhook_due.notify_one();
}

/// Runs step after step until the batch is finished.
async fn advance(app: &App, mut claim: BatchClaim) -> Result<(), Interrupted> {
    loop {
        match claim.batch.state {
            BatchState::Validating => validate::validate(app, &mut claim).await?,
            BatchState::InProgress => progress::submit_and_count(app, &mut claim).await?,
            BatchState::Finalizing | BatchState::Cancelling => {
                finish::finish(app, &mut claim).await?
            }
            state => {
                tracing::info!(batch = %claim.batch.id, state = state.as_str(), "batch finished");
                return Ok(());
            }
        }
    }
}

/// Writes a batch, with jobs and files, in one transaction.
async fn save(app: &App, claim: &BatchClaim, writes: BatchWrites<'_>) -> Result<(), Interrupted> {
    match app.store.save_batch(claim, writes).await? {
        true => Ok(()),
        false => Err(Interrupted::Fenced),
    }
}
