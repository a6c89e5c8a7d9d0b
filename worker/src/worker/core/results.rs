//! Writes results: checkpoints, commits, and the acknowledgements that follow them.

use tritmill_queue::{ClaimRef, Delivery, JobEvent, Outcome, Settled};

use super::{
    in_flight::{Disposition, EndedClaim},
    io::{Answer, Command},
    state::{Core, FLUSH_COUNT, FLUSH_WAIT},
};
use crate::{
    engine_thread::End,
    translate,
    worker::{committed::Committed, error::WorkerError},
};

impl Core {
    pub(super) fn handle_end(&mut self, device: usize, held: ClaimRef, end: End) {
        self.record_device_result(device, &end);
        let Some(claim) = self.in_flight.get(held) else { return };
        let disposition =
            match translate::outcome(&self.served, (&claim.prompt, &claim.expected), end) {
                Some(outcome) => Disposition::Record(outcome.readable()),
                None if claim.hand_back => Disposition::HandBack,
                None => Disposition::Forget,
            };
        self.in_flight.end(held, disposition, self.now);
    }

    /// Saves the tokens of long generations, so that another worker can continue them.
    pub(super) fn save_checkpoints(&mut self) {
        self.unsaved.retain(|held, _| self.in_flight.get(*held).is_some());
        if self.calls.save.is_none() && !self.unsaved.is_empty() {
            let tokens = std::mem::take(&mut self.unsaved);
            let list = tokens.iter().map(|(held, tokens)| (*held, tokens.clone())).collect();
            self.commands.push(Command::Save(list));
            self.calls.save = Some(tokens);
        }
    }

    pub(super) fn handle_saved(&mut self, result: Answer<()>) {
        let Some(saved) = self.calls.save.take() else { return };
        let Err(error) = result else { return };
        tracing::warn!(%error, "checkpoints not saved, trying again");
        for (held, tokens) in saved {
            // Kept unless there are newer tokens.
            self.unsaved.entry(held).or_insert(tokens);
        }
    }

    /// Commits ended claims if there are many, if one has waited long enough, or if nothing runs.
    pub(super) fn commit_if_due(&mut self) {
        let (running, ended) = (self.in_flight.running_count(), self.in_flight.ended_count());
        let is_late = self.in_flight.flush_at(FLUSH_WAIT).is_some_and(|at| at <= self.now);
        let is_due = ended >= FLUSH_COUNT || (running == 0 && ended > 0) || is_late;
        if is_due && !self.is_backing_off() {
            self.commit();
        }
    }

    /// Commits all ended claims. During a commit they wait for the next one.
    pub(super) fn commit(&mut self) {
        if self.calls.commit {
            return;
        }
        if let Some(commit) = self.in_flight.start_commit() {
            self.calls.commit = true;
            self.commands.push(Command::Commit(commit));
        }
    }

    /// Acknowledges what was recorded; results of a failed commit wait for the next one. A delivery
    /// without a recorded result may be the only one that its job has, so it is handed back.
    pub(super) fn handle_committed(
        &mut self,
        settled: Answer<Vec<Settled>>,
    ) -> Result<(), WorkerError> {
        self.calls.commit = false;
        let settled = match settled {
            Ok(settled) => settled,
            Err(error) => {
                self.in_flight.restore(self.now);
                return self.on_dependency_error(error);
            }
        };
        self.backoff.reset();
        self.metrics.store_answered();
        let ended = self.in_flight.take_committed();
        let report = self.report(&ended, &settled);
        for Settled { id, state } in &settled {
            if self.streaming.contains(id) {
                let finished = JobEvent::Finished { state: *state };
                self.publish(*id, if state.is_terminal() { finished } else { JobEvent::Queued });
            }
        }
        for EndedClaim { lease, disposition, .. } in ended {
            let id = lease.held.id;
            self.streaming.remove(&id);
            let is_recorded = matches!(disposition, Disposition::Record(_))
                && settled.iter().any(|settled| settled.id == id);
            let list = if is_recorded { &mut self.acknowledged } else { &mut self.released };
            list.push(lease.delivery);
        }
        self.commands.push(Command::Report(report));
        Ok(())
    }

    /// Acknowledges the deliveries of recorded results.
    pub(super) fn acknowledge(&mut self) {
        if self.calls.acknowledge.is_none()
            && !self.acknowledged.is_empty()
            && !self.is_backing_off()
        {
            let deliveries = std::mem::take(&mut self.acknowledged);
            self.commands.push(Command::Acknowledge(deliveries.clone()));
            self.calls.acknowledge = Some(deliveries);
        }
    }

    pub(super) fn handle_acknowledged(&mut self, result: Answer<()>) -> Result<(), WorkerError> {
        let deliveries = self.calls.acknowledge.take().unwrap_or_default();
        result.or_else(|error| {
            self.acknowledged.extend(deliveries);
            self.on_dependency_error(error)
        })
    }

    /// Hands back the deliveries of jobs that others may run.
    pub(super) fn release(&mut self) {
        if self.calls.release.is_none() && !self.released.is_empty() && !self.is_backing_off() {
            let deliveries = std::mem::take(&mut self.released);
            self.commands.push(Command::Release(deliveries.clone()));
            self.calls.release = Some(deliveries);
        }
    }

    pub(super) fn handle_released(&mut self, result: Answer<()>) -> Result<(), WorkerError> {
        let deliveries: Vec<Delivery> = self.calls.release.take().unwrap_or_default();
        result.or_else(|error| {
            self.released.extend(deliveries);
            self.on_dependency_error(error)
        })
    }

    /// Counts what was committed.
    fn report(&self, ended: &[EndedClaim], settled: &[Settled]) -> Committed {
        let mut report = Committed::default();
        report.settled.extend(settled.iter().map(|settled| (settled.id, settled.state)));
        for ended in ended {
            let Disposition::Record(outcome) = &ended.disposition else { continue };
            if !settled.iter().any(|settled| settled.id == ended.lease.held.id) {
                ended.span.in_scope(|| tracing::warn!("result fenced out"));
                self.metrics.result_fenced();
            } else if let Outcome::Completed(completion) = outcome {
                let tokens = completion.usage.completion_tokens;
                report.usage.add(completion.usage);
                self.metrics.add_answered(ended.cost, completion.usage);
                self.metrics.record_latency(ended.first_token, ended.elapsed, tokens);
            }
        }
        self.metrics.record_commit(&report);
        report
    }
}
