//! What is left at the end: results to commit, work to save and to hand back.

use std::time::Duration;

use tokio::time::timeout;
use tritmill_queue::{ClaimRef, Delivery};

use super::{EventLoop, calls::Answer};
use crate::worker::{Mode, Worker, WorkerError};

/// How long all of it may take: a store that is away must not hold up an exit.
const SHUTDOWN_LIMIT: Duration = Duration::from_secs(5);

impl EventLoop<'_> {
    /// Commits what is done, saves and hands back what runs, if store and dispatcher answer in
    /// time. What is left lapses.
    ///
    /// # Errors
    /// Only of an embedded worker, which has nobody to wait for.
    pub(super) async fn shut_down(&mut self) -> Result<(), WorkerError> {
        let limit = match self.worker.config.mode {
            Mode::Service => SHUTDOWN_LIMIT,
            Mode::Embedded => Duration::MAX,
        };
        match timeout(limit, self.finish_calls()).await {
            Ok(result) => result,
            Err(_) => {
                tracing::warn!("claims are left to lapse: no answer in time");
                Ok(())
            }
        }
    }

    async fn finish_calls(&mut self) -> Result<(), WorkerError> {
        (self.calls.check, self.calls.pull, self.calls.prepare) = (None, None, None);
        // What is on its way comes first: a claim may be held, and commits keep their order.
        self.handle_all_answers().await?;
        self.commit();
        self.save_checkpoints();
        self.handle_all_answers().await?;
        self.hand_back().await;
        self.handle_all_answers().await
    }

    /// Waits for every answer; what was claimed meanwhile is held, and not begun.
    async fn handle_all_answers(&mut self) -> Result<(), WorkerError> {
        while self.calls.involve_claims() || self.calls.save.is_some() {
            match self.calls.next().await {
                Answer::Claimed(claimed) => drop(self.handle_claimed(claimed)?),
                answer => drop(self.handle_answer(answer)?),
            }
        }
        Ok(())
    }

    async fn hand_back(&mut self) {
        let Worker { store, dispatcher, config, .. } = self.worker;
        let (held, deliveries): (Vec<ClaimRef>, Vec<Delivery>) =
            self.in_flight.leases().into_iter().map(|one| (one.held, one.delivery)).unzip();
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
