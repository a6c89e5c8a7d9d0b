//! What goes out: checkpoints, commits, and the acknowledgements that follow them.

use std::{sync::Arc, time::Duration};

use tritmill_queue::{ClaimRef, Delivery, JobEvent, Outcome, Settled};

use super::{
    EventLoop,
    calls::{Tokens, within},
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
    pub(super) fn handle_end(&mut self, place: usize, held: ClaimRef, end: End) {
        self.record_device_result(place, &end);
        let Some(prompt) = self.in_flight.prompt(held) else { return };
        let outcome = translate::outcome(&self.worker.served, prompt, end);
        self.in_flight.end(held, outcome);
    }

    /// Saves what long generations have so far, for whoever may have to go on with them.
    pub(super) fn save_checkpoints(&mut self) {
        self.unsaved.retain(|held, _| self.in_flight.prompt(*held).is_some());
        if self.calls.save.is_some() || self.unsaved.is_empty() {
            return;
        }
        let (worker, limit) = (self.worker, self.call_limit());
        let tokens = std::mem::take(&mut self.unsaved);
        self.calls.save = Some(Box::pin(async move {
            let save = |(held, tokens): (&ClaimRef, &Vec<u32>)| {
                (*held, translate::checkpoint(&worker.served, tokens))
            };
            let checkpoints: Vec<(ClaimRef, Vec<u8>)> = tokens.iter().map(save).collect();
            // LostLease claims are the renewer's business.
            let result = within(limit, worker.store.checkpoint(&checkpoints)).await.map(|_| ());
            (tokens, result)
        }));
    }

    pub(super) fn handle_saved(&mut self, saved: Tokens, result: Result<(), WorkerError>) {
        let Err(error) = result else { return };
        tracing::warn!(%error, "checkpoints not saved, trying again");
        for (held, tokens) in saved {
            // Unless there are more by now.
            self.unsaved.entry(held).or_insert(tokens);
        }
    }

    /// Commits every result that waits, unless a commit is on its way: then they wait for the next.
    pub(super) fn commit(&mut self) {
        if self.calls.commit.is_some() {
            return;
        }
        let done = self.in_flight.take_done();
        if !done.is_empty() {
            let (worker, limit) = (self.worker, self.call_limit());
            self.calls.commit = Some(Box::pin(async move {
                let settled = commit(worker, limit, &done).await;
                (done, settled)
            }));
        }
    }

    /// Acknowledges what was committed; what a service could not commit waits on.
    pub(super) fn handle_committed(
        &mut self,
        done: Vec<EndedClaim>,
        settled: Result<Vec<Settled>, WorkerError>,
    ) -> Result<(), WorkerError> {
        let settled = match settled {
            Ok(settled) => settled,
            Err(error) => {
                self.in_flight.put_back(done);
                return self.on_dependency_error(error);
            }
        };
        self.in_flight.committed();
        self.backoff.worked();
        let report = self.report(&done, &settled);
        for Settled { id, state } in &settled {
            if self.streaming.contains(id) {
                let over = JobEvent::Finished { state: *state };
                self.publish(*id, if state.is_terminal() { over } else { JobEvent::Queued });
            }
        }
        for done in &done {
            self.streaming.remove(&done.held.id);
        }
        let (back, over): (Vec<EndedClaim>, Vec<EndedClaim>) =
            done.into_iter().partition(EndedClaim::is_hand_back);
        self.acknowledge(over.into_iter().map(|done| done.delivery).collect());
        self.release_deliveries(back.into_iter().map(|done| done.delivery).collect());
        self.publish_leases();
        // Nobody may be listening, which is their choice.
        let _ = self.worker.committed.send(report);
        Ok(())
    }

    /// Forgets deliveries for good, these and those that waited for an earlier acknowledgement. What
    /// cannot be acknowledged comes back and is refused a claim.
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

    /// Leaves entries of claims that were given back to others. Nobody waits for it: an entry that
    /// stays is idle soon, and taken then.
    fn release_deliveries(&self, deliveries: Vec<Delivery>) {
        if deliveries.is_empty() {
            return;
        }
        let (dispatcher, limit) = (Arc::clone(&self.worker.dispatcher), self.call_limit());
        let owner = self.worker.config.owner.clone();
        tokio::spawn(async move {
            if let Err(error) = within(limit, dispatcher.hand_back(&owner, &deliveries)).await {
                tracing::warn!(%error, "entries not given back: others take them when they are idle");
            }
        });
    }

    fn report(&self, done: &[EndedClaim], settled: &[Settled]) -> Committed {
        let mut report = Committed::default();
        report.settled.extend(settled.iter().map(|settled| (settled.id, settled.state)));
        for done in done {
            let Disposition::Record(outcome) = &done.end else { continue };
            let written = settled.iter().any(|settled| settled.id == done.held.id);
            match outcome {
                Outcome::Completed(completion) if written => {
                    report.prompt_tokens += completion.usage.prompt_tokens;
                    report.completion_tokens += completion.usage.completion_tokens;
                    let tokens = completion.usage.completion_tokens;
                    self.worker.metrics.answered(done.first_token, done.took(), tokens);
                }
                _ if written => {}
                _ => {
                    done.span.in_scope(|| tracing::warn!("result fenced out"));
                    self.worker.metrics.fenced();
                }
            }
        }
        self.worker.metrics.committed(&report);
        report
    }
}

/// One commit: claims given back, results recorded.
async fn commit(
    worker: &Worker,
    limit: Duration,
    done: &[EndedClaim],
) -> Result<Vec<Settled>, WorkerError> {
    let store = &worker.store;
    let back = in_flight::handed_back(done);
    if !back.is_empty() {
        within(limit, store.hand_back(&back)).await?;
    }
    let finished = in_flight::finished(done);
    if finished.is_empty() {
        return Ok(Vec::new());
    }
    within(limit, store.finish(&finished)).await
}
