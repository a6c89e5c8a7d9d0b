//! The end of a worker: commits results, saves running work and hands it back.

use std::time::Duration;

use tokio::time::timeout;
use tritmill_queue::{ClaimRef, Delivery};

use super::{EventLoop, calls::Answer};
use crate::worker::{Mode, Worker, WorkerError};

/// Time limit of the whole shutdown: an unreachable store must not delay the exit.
const SHUTDOWN_LIMIT: Duration = Duration::from_secs(5);

impl EventLoop<'_> {
    /// Commits what has ended, saves and hands back what runs, if store and dispatcher answer in
    /// time. Leases of the rest expire.
    ///
    /// # Errors
    /// Only for an embedded worker, which waits without limit.
    pub(super) async fn shut_down(&mut self) -> Result<(), WorkerError> {
        let limit = match self.worker.config.mode {
            Mode::Service => SHUTDOWN_LIMIT,
            Mode::Embedded => Duration::MAX,
        };
        match timeout(limit, self.finish_calls()).await {
            Ok(result) => result,
            Err(_) => {
                tracing::warn!("no answer in time: leases of the remaining claims will expire");
                Ok(())
            }
        }
    }

    async fn finish_calls(&mut self) -> Result<(), WorkerError> {
        (self.calls.check, self.calls.pull, self.calls.prepare) = (None, None, None);
        // Current calls come first: one may bring a claim, and commits keep their order.
        self.handle_all_answers().await?;
        self.commit();
        self.save_checkpoints();
        self.handle_all_answers().await?;
        self.hand_back().await;
        self.handle_all_answers().await
    }

    /// Waits for every answer; new claims are held and not started.
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
            self.in_flight.leases().into_iter().map(|lease| (lease.held, lease.delivery)).unzip();
        let result = async {
            store.hand_back(&held).await?;
            dispatcher.hand_back(&config.owner, &deliveries).await?;
            Ok::<(), WorkerError>(())
        };
        if let Err(error) = result.await {
            tracing::warn!(%error, "claims not handed back: their leases will expire");
        }
    }
}
