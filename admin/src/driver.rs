//! [`Driver`]: moves batches on, from a file of lines to a file of answers.
//!
//! Each step reads the batch, does its work and writes the batch under the epoch of its claim; a step
//! that is interrupted is done again by whoever claims next, and does no harm twice: validation has no
//! effect but its verdict, a line's job has an id of its line's, and an output file is seen only when
//! the same transaction that completes it ends the batch.
//!
//! | state | step | in |
//! | --- | --- | --- |
//! | `validating` | read every line, or say why it is no batch | `validate.rs` |
//! | `in_progress` | submit lines as there is room, count what is over | `progress.rs` |
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

use crate::app::App;

/// How long a batch stays a driver's without a sign of life.
const LEASE: Duration = Duration::from_secs(15);
/// Batches driven at once.
const TOGETHER: usize = 16;
/// Between two looks for batches that nobody drives.
const LOOK: Duration = Duration::from_secs(1);
/// Wait after a step failed, before the batch is let go.
const RETRY: Duration = Duration::from_secs(2);
/// Between two sweeps of files.
const SWEEP: Duration = Duration::from_secs(3600);

/// Why a step ended early.
#[derive(Debug, thiserror::Error)]
enum Interrupted {
    /// The claim holds no more: somebody cancelled the batch, or drives it.
    #[error("the claim is gone")]
    Fenced,
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Drives the batches of a service.
pub struct Driver {
    app: App,
    owner: String,
}

impl Driver {
    /// A driver; `owner` names its process, for people.
    pub fn new(app: App, owner: String) -> Self {
        Self { app, owner }
    }

    /// Drives until `stop` says so, or nobody can say so any more; then lets go of what it holds.
    pub async fn run(self, mut stop: watch::Receiver<bool>) {
        let mut driven = JoinSet::new();
        let mut sweep_at = Instant::now();
        loop {
            while driven.try_join_next().is_some() {}
            if sweep_at <= Instant::now() {
                self.sweep().await;
                sweep_at = Instant::now() + SWEEP;
            }
            for held in self.claim(TOGETHER.saturating_sub(driven.len())).await {
                driven.spawn(drive(self.app.clone(), held, stop.clone()));
            }
            self.app.metrics().batches_driven.set(i64::try_from(driven.len()).unwrap_or(i64::MAX));
            tokio::select! {
                _ = stop.wait_for(|stop| *stop) => break,
                () = self.app.batches().notified() => {}
                () = sleep(LOOK) => {}
            }
        }
        // They hear it too.
        while driven.join_next().await.is_some() {}
    }

    async fn claim(&self, room: usize) -> Vec<BatchClaim> {
        let limit = u32::try_from(room).unwrap_or(u32::MAX);
        if limit == 0 {
            return Vec::new();
        }
        let claimed = self.app.store().claim_batches(&self.owner, LEASE, limit).await;
        claimed.unwrap_or_else(|error| {
            tracing::warn!(%error, "batches not claimed, trying again");
            Vec::new()
        })
    }

    async fn sweep(&self) {
        match self.app.store().sweep_files().await {
            Ok(0) => {}
            Ok(files) => tracing::info!(files, "files swept: expired, or never completed"),
            Err(error) => tracing::warn!(%error, "files not swept, trying again in an hour"),
        }
    }
}

/// Drives one batch to its end, or as long as the claim holds.
async fn drive(app: App, held: BatchClaim, mut stop: watch::Receiver<bool>) {
    let (id, epoch) = (held.batch.id, held.epoch);
    let renewing = Arc::clone(app.store());
    let renewed = async move {
        let mut held_until = Instant::now() + LEASE;
        loop {
            sleep(LEASE / 3).await;
            let asked = Instant::now();
            match renewing.renew_batch(id, epoch, LEASE).await {
                Ok(true) => held_until = asked + LEASE,
                Ok(false) => return,
                // The last third is for what is under way.
                Err(_) if Instant::now() + LEASE / 3 >= held_until => return,
                Err(error) => tracing::warn!(batch = %id, %error, "claim of a batch not renewed"),
            }
        }
    };
    let ended = tokio::select! {
        ended = advance(&app, held) => ended,
        () = renewed => Err(Interrupted::Fenced),
        _ = stop.wait_for(|stop| *stop) => Ok(()),
    };
    match ended {
        Ok(()) => {}
        Err(Interrupted::Fenced) => {
            tracing::info!(batch = %id, "a batch was cancelled, or is driven elsewhere");
            app.batches().notify_one();
            return;
        }
        Err(error) => {
            tracing::warn!(batch = %id, %error, "a batch does not move on, trying again");
            sleep(RETRY).await;
        }
    }
    // One that is over is nobody's; this only tells others that they need not wait for the lease.
    if let Err(error) = app.store().release_batch(id, epoch).await {
        tracing::debug!(batch = %id, %error, "a claim is left to run out");
    }
    app.webhooks().notify_one();
}

/// Takes step after step until the batch is over.
async fn advance(app: &App, mut held: BatchClaim) -> Result<(), Interrupted> {
    loop {
        match held.batch.state {
            BatchState::Validating => validate::validate(app, &mut held).await?,
            BatchState::InProgress => progress::answer(app, &mut held).await?,
            BatchState::Finalizing | BatchState::Cancelling => {
                finish::finish(app, &mut held).await?
            }
            state => {
                tracing::info!(batch = %held.batch.id, state = state.as_str(), "batch is over");
                return Ok(());
            }
        }
    }
}

/// Writes a batch with what goes along.
async fn save(app: &App, held: &BatchClaim, along: BatchWrites<'_>) -> Result<(), Interrupted> {
    match app.store().save_batch(held, along).await? {
        true => Ok(()),
        false => Err(Interrupted::Fenced),
    }
}
