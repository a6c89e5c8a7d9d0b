//! Writes results: checkpoints, commits, and the acknowledgements that follow them.

use std::{sync::Arc, time::Duration};

use tritmill_queue::{ClaimRef, Delivery, JobEvent, Outcome, Settled};

use super::{
    EventLoop,
    calls::{Commit, Tokens, within},
};
use crate::{
    engine_thread::End,
    translate,
    worker::{
        Committed, Worker, WorkerError,
        in_flight::{self, Disposition, EndedClaim},
    },
};

impl EventLoop<'_> {
    pub(super) fn handle_end(&mut self, device: usize, held: ClaimRef, end: End) {
        self.record_device_result(device, &end);
        let Some(claim) = self.in_flight.get(held) else { return };
        let outcome = translate::outcome(&self.worker.served, &claim.prompt, end);
        self.in_flight.end(held, outcome);
    }

    /// Saves the tokens of long generations, so that another worker can continue them.
    pub(super) fn save_checkpoints(&mut self) {
        self.unsaved.retain(|held, _| self.in_flight.get(*held).is_some());
        if self.calls.save.is_some() || self.unsaved.is_empty() {
            return;
        }
        let (worker, limit) = (self.worker, self.call_limit());
        let tokens = std::mem::take(&mut self.unsaved);
        self.calls.save = Some(Box::pin(async move {
            let encode = |(held, tokens): (&ClaimRef, &Vec<u32>)| {
                (*held, translate::checkpoint(&worker.served, tokens))
            };
            let checkpoints: Vec<(ClaimRef, Vec<u8>)> = tokens.iter().map(encode).collect();
            // The renewer finds the claims that are lost.
            let result = within(limit, worker.store.checkpoint(&checkpoints)).await.map(|_| ());
            (tokens, result)
        }));
    }

    pub(super) fn handle_saved(&mut self, saved: Tokens, result: Result<(), WorkerError>) {
        let Err(error) = result else { return };
        tracing::warn!(%error, "checkpoints not saved, trying again");
        for (held, tokens) in saved {
            // Kept unless there are newer tokens.
            self.unsaved.entry(held).or_insert(tokens);
        }
    }

    /// Commits all ended claims. During a commit they wait for the next one.
    pub(super) fn commit(&mut self) {
        if self.calls.commit.is_some() {
            return;
        }
        let ended = self.in_flight.take_ended();
        if !ended.is_empty() {
            let (worker, limit) = (self.worker, self.call_limit());
            self.calls.commit = Some(Box::pin(async move {
                let permit = match &worker.committed {
                    // The receiver may be gone.
                    Some(committed) => committed.reserve().await.ok(),
                    None => None,
                };
                let settled = commit(worker, limit, &ended).await;
                Commit { ended, settled, permit }
            }));
        }
    }

    /// Acknowledges what was committed; results of a service's failed commit wait for the next one.
    pub(super) fn handle_committed(&mut self, commit: Commit<'_>) -> Result<(), WorkerError> {
        let Commit { ended, settled, permit } = commit;
        let settled = match settled {
            Ok(settled) => settled,
            Err(error) => {
                self.in_flight.restore(ended);
                return self.on_dependency_error(error);
            }
        };
        self.in_flight.committed();
        self.backoff.reset();
        let report = self.report(&ended, &settled);
        for Settled { id, state } in &settled {
            if self.streaming.contains(id) {
                let finished = JobEvent::Finished { state: *state };
                self.publish(*id, if state.is_terminal() { finished } else { JobEvent::Queued });
            }
        }
        for ended in &ended {
            self.streaming.remove(&ended.lease.held.id);
        }
        let (back, finished): (Vec<EndedClaim>, Vec<EndedClaim>) =
            ended.into_iter().partition(EndedClaim::is_hand_back);
        self.acknowledge(finished.into_iter().map(|ended| ended.lease.delivery).collect());
        self.release_deliveries(back.into_iter().map(|ended| ended.lease.delivery).collect());
        self.publish_leases();
        if let Some(permit) = permit {
            permit.send(report);
        }
        Ok(())
    }

    /// Acknowledges these deliveries and the deliveries that waited for an earlier acknowledgement.
    /// If the acknowledgement of a delivery fails, the delivery comes back and its claim is refused.
    pub(super) fn acknowledge(&mut self, deliveries: Vec<Delivery>) {
        self.acknowledged.extend(deliveries);
        if self.calls.acknowledge.is_some() || self.acknowledged.is_empty() {
            return;
        }
        let (worker, limit) = (self.worker, self.call_limit());
        let deliveries = std::mem::take(&mut self.acknowledged);
        self.calls.acknowledge = Some(Box::pin(async move {
            let Worker { dispatcher, config, .. } = worker;
            within(limit, dispatcher.acknowledge(&config.owner, &deliveries)).await
        }));
    }

    /// Releases the deliveries of claims that were handed back, in the background. If that fails,
    /// other workers take them over when they are idle.
    fn release_deliveries(&self, deliveries: Vec<Delivery>) {
        if deliveries.is_empty() {
            return;
        }
        let (dispatcher, limit) = (Arc::clone(&self.worker.dispatcher), self.call_limit());
        let owner = self.worker.config.owner.clone();
        tokio::spawn(async move {
            if let Err(error) = within(limit, dispatcher.hand_back(&owner, &deliveries)).await {
                tracing::warn!(%error, "deliveries not released: other workers reclaim them");
            }
        });
    }

    /// Counts what was committed.
    fn report(&self, ended: &[EndedClaim], settled: &[Settled]) -> Committed {
        let metrics = &self.worker.metrics;
        let mut report = Committed::default();
        report.settled.extend(settled.iter().map(|settled| (settled.id, settled.state)));
        for ended in ended {
            let Disposition::Record(outcome) = &ended.disposition else { continue };
            if !settled.iter().any(|settled| settled.id == ended.lease.held.id) {
                ended.span.in_scope(|| tracing::warn!("result fenced out"));
                metrics.result_fenced();
            } else if let Outcome::Completed(completion) = outcome {
                let tokens = completion.usage.completion_tokens;
                report.prompt_tokens += completion.usage.prompt_tokens;
                report.completion_tokens += tokens;
                metrics.record_latency(ended.first_token, ended.elapsed(), tokens);
            }
        }
        metrics.record_commit(&report);
        report
    }
}

/// Hands claims back and records results.
async fn commit(
    worker: &Worker,
    limit: Duration,
    ended: &[EndedClaim],
) -> Result<Vec<Settled>, WorkerError> {
    let store = &worker.store;
    let back = in_flight::handed_back(ended);
    if !back.is_empty() {
        within(limit, store.hand_back(&back)).await?;
    }
    let finished = in_flight::finished(ended);
    if finished.is_empty() {
        return Ok(Vec::new());
    }
    within(limit, store.finish(&finished)).await
}
