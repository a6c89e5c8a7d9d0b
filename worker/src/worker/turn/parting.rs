//! What is left at the end: results to commit, work to save and to hand back.

use std::time::Duration;

use tokio::time::timeout;
use tritmill_queue::{Delivery, Held};

use super::Turn;
use crate::worker::{Mode, Worker, WorkerError};

/// How long all of it may take: a store that is away must not hold up an exit.
const PARTING_LIMIT: Duration = Duration::from_secs(5);

impl Turn<'_> {
    /// Commits what is done, saves and hands back what runs, if store and dispatcher answer in
    /// time. What is left lapses.
    ///
    /// # Errors
    /// Only of an embedded worker, which has nobody to wait for.
    pub(super) async fn part(&mut self) -> Result<(), WorkerError> {
        let limit = match self.worker.config.mode {
            Mode::Service => PARTING_LIMIT,
            Mode::Embedded => Duration::MAX,
        };
        match timeout(limit, self.settle()).await {
            Ok(result) => result,
            Err(_) => {
                tracing::warn!("claims are left to lapse: no answer in time");
                Ok(())
            }
        }
    }

    async fn settle(&mut self) -> Result<(), WorkerError> {
        // What is on its way comes first: a claim may be held, and commits keep their order.
        if let Some(claim) = self.calls.claim.take() {
            let claimed = claim.await;
            self.note_claimed(claimed)?;
        }
        self.hear_commit().await?;
        // What has ended since.
        self.commit();
        self.hear_commit().await?;
        self.hear_save().await;
        self.save();
        self.hear_save().await;
        self.hand_back().await;
        while let Some(acknowledge) = self.calls.acknowledge.take() {
            if let Err(error) = acknowledge.await {
                tracing::warn!(%error, "entries not acknowledged: they come back once more");
            }
            self.acknowledge(Vec::new());
        }
        Ok(())
    }

    async fn hear_commit(&mut self) -> Result<(), WorkerError> {
        let Some(commit) = self.calls.commit.take() else { return Ok(()) };
        let (done, settled) = commit.await;
        self.note_commit(done, settled)
    }

    async fn hear_save(&mut self) {
        if let Some(save) = self.calls.save.take() {
            let (saved, result) = save.await;
            self.note_saved(saved, result);
        }
    }

    async fn hand_back(&mut self) {
        let Worker { store, dispatcher, config, .. } = self.worker;
        let (held, deliveries): (Vec<Held>, Vec<Delivery>) =
            self.flights.holdings().into_iter().map(|one| (one.held, one.delivery)).unzip();
        let back = async {
            store.hand_back(&held).await?;
            dispatcher.hand_back(&config.owner, &deliveries).await?;
            Ok::<(), WorkerError>(())
        };
        if let Err(error) = back.await {
            tracing::warn!(%error, "claims are left to lapse");
        }
    }
}
