//! Takes jobs in: deliveries are pulled, claimed, turned into requests and given to the engines.

use tritmill_queue::{Claim, ClaimRef, JobEvent, Priority};

use super::{
    calls::ClaimCall,
    in_flight::{Disposition, Lease},
    io::{Answer, Command, Feed, Prepared, PullPlan, Pulled, Submission},
    state::{Core, FEW_WAIT, HIGH_INTERVAL, UNCOMMITTED_MAX},
};
use crate::{translate::Work, worker::error::WorkerError};

/// Deliveries of one entry from which its job counts as a suspect: workers that claimed it may have
/// died before the store could know.
const SUSPECT_DELIVERIES: u32 = 8;

impl Core {
    /// Pulls jobs if there is room; an embedded worker without any checks what has become due.
    pub(super) fn look_for_work(&mut self) {
        let waits = self.is_backing_off()
            || self.in_flight.uncommitted_count() >= UNCOMMITTED_MAX
            || self.calls.may_bring_work()
            || self.has_suspect();
        if waits {
            return;
        }
        if !self.feed.is_dry {
            self.pull();
        } else if self.is_empty() {
            self.calls.check = true;
            self.commands.push(Command::Check);
        }
    }

    /// Pulls as many jobs as there is room for.
    fn pull(&mut self) {
        let max = self.devices.free_slots(&self.in_flight, self.now);
        let all = self.devices.all_slots();
        let is_nearly_full =
            max < self.pull_min && self.in_flight.running_count() + self.pull_min > all;
        let waits = self.policy.reserves && is_nearly_full && !self.has_waited(max);
        if max == 0 || waits {
            return self.pull_high();
        }
        (self.high_at, self.few_since) = (None, None);
        let feed = self.policy.feeds_itself.then_some(self.feed);
        let reclaim = feed.is_none() && self.now >= self.reclaim_at;
        if reclaim {
            // Deliveries of dead workers are taken over at most this much later than possible.
            self.reclaim_at = self.now + self.lease / 3;
        }
        self.calls.pull = true;
        self.commands.push(Command::Pull(PullPlan { max, only: None, reclaim, feed }));
    }

    /// Returns whether there has been room for a few jobs for a while.
    fn has_waited(&mut self, max: usize) -> bool {
        if max == 0 {
            self.few_since = None;
            return false;
        }
        let since = *self.few_since.get_or_insert(self.now);
        self.now >= since + FEW_WAIT
    }

    /// Pulls jobs of priority high at intervals, as many as there are reserved slots for.
    fn pull_high(&mut self) {
        if !self.policy.reserves {
            return;
        }
        let max = self.devices.free_slots_for_high(&self.in_flight, self.now);
        if max == 0 {
            self.high_at = None;
            return;
        }
        let due = *self.high_at.get_or_insert(self.now + HIGH_INTERVAL);
        if due <= self.now {
            self.high_at = Some(self.now + HIGH_INTERVAL);
            self.calls.pull = true;
            let only = Some(Priority::High);
            self.commands.push(Command::Pull(PullPlan { max, only, reclaim: false, feed: None }));
        }
    }

    pub(super) fn cancel_pull(&mut self) {
        if std::mem::take(&mut self.calls.pull) {
            self.commands.push(Command::CancelPull);
        }
    }

    pub(super) fn handle_checked(&mut self, finished: Answer<bool>) -> Result<(), WorkerError> {
        self.calls.check = false;
        self.feed = Feed::default();
        match finished {
            Ok(true) => self.exit(Ok(())),
            Ok(false) => {}
            Err(error) => self.on_dependency_error(error)?,
        }
        Ok(())
    }

    /// Claims the delivered jobs.
    pub(super) fn handle_pulled(&mut self, pulled: Pulled) -> Result<(), WorkerError> {
        let is_expected = std::mem::take(&mut self.calls.pull);
        self.feed = pulled.feed.unwrap_or(self.feed);
        let deliveries = match pulled.deliveries {
            Ok(deliveries) => deliveries,
            Err(error) if is_expected => return self.on_dependency_error(error),
            Err(_) => return Ok(()),
        };
        self.metrics.queue_read();
        if deliveries.is_empty() {
            return Ok(());
        }
        if !is_expected || self.shutdown.is_closing() {
            // The answer was on its way when the pull was cancelled.
            self.released.extend(deliveries);
            return Ok(());
        }
        let ids = deliveries.iter().map(|delivery| delivery.id).collect();
        let claim_id = fastrand::i64(..);
        self.calls.claim = Some(ClaimCall { deliveries, began: self.now, claim_id });
        self.commands.push(Command::Claim(ids, claim_id));
        Ok(())
    }

    /// Adds new claims; from now on their leases are renewed.
    pub(super) fn handle_claimed(&mut self, claims: Answer<Vec<Claim>>) -> Result<(), WorkerError> {
        let Some(ClaimCall { deliveries, began, claim_id }) = self.calls.claim.take() else {
            return Ok(());
        };
        let mut claims = match claims {
            Ok(claims) => claims,
            Err(error) => {
                // The store may have granted the claims.
                for delivery in deliveries {
                    let held = ClaimRef { id: delivery.id, epoch: 0, claim_id };
                    let lease = Lease { held, delivery, renewed_at: began };
                    self.in_flight.add_unsure(lease, self.now);
                }
                return self.on_dependency_error(error);
            }
        };
        self.backoff.reset();
        self.metrics.store_answered();
        let mut refused = Vec::new();
        for delivery in deliveries {
            let Some(claim) = claims.iter_mut().find(|claim| claim.job.id == delivery.id) else {
                refused.push(delivery);
                continue;
            };
            claim.alone |= delivery.deliveries >= SUSPECT_DELIVERIES;
            let device = self.devices.choose(&self.in_flight, self.now);
            let lease = Lease { held: claim.claim_ref(), delivery, renewed_at: began };
            self.in_flight.start(claim, lease, device);
        }
        // These jobs are finished, cancelled, or under the live lease of another worker: there is
        // nothing to do.
        self.metrics.add_duplicates(refused.len());
        self.acknowledged.extend(refused);
        if self.shutdown.is_closing() {
            // They are handed back with everything else.
            return Ok(());
        }
        let (suspects, claims): (Vec<Claim>, Vec<Claim>) =
            claims.into_iter().partition(|claim| claim.alone);
        self.suspects.extend(suspects);
        self.prepare(claims);
        Ok(())
    }

    fn prepare(&mut self, claims: Vec<Claim>) {
        if !claims.is_empty() {
            self.calls.prepare = true;
            self.commands.push(Command::Prepare(claims));
        }
    }

    /// Returns whether a job waits to run alone, or runs alone.
    fn has_suspect(&self) -> bool {
        !self.suspects.is_empty() || self.in_flight.running().any(|(_, claim)| claim.is_alone)
    }

    /// Starts a job that must run alone when nothing else runs.
    pub(super) fn start_suspect(&mut self) {
        self.suspects.retain(|claim| self.in_flight.get(claim.claim_ref()).is_some());
        if self.in_flight.running_count() == self.suspects.len()
            && let Some(claim) = self.suspects.pop_front()
        {
            tracing::warn!(job = %claim.job.id, "workers ended while they ran this job: it runs alone");
            self.prepare(vec![claim]);
        }
    }

    /// Gives requests to the engines, except for claims that were lost in the meantime.
    pub(super) fn handle_prepared(&mut self, prepared: Vec<Prepared>) {
        self.calls.prepare = false;
        if self.shutdown.is_closing() {
            return;
        }
        for Prepared { held, stream, work } in prepared {
            let Some(device) = self.in_flight.get(held).map(|claim| claim.device) else { continue };
            let has_room = self.devices.takes_another(device, &self.in_flight, self.now);
            let Some(claim) = self.in_flight.get_mut(held) else { continue };
            match work {
                // It was on its way when the device failed.
                _ if !has_room => {
                    self.in_flight.end(held, Disposition::HandBack, self.now);
                }
                Err(outcome) => {
                    self.in_flight.end(held, Disposition::Record(*outcome), self.now);
                }
                Ok(Work { requests, expected }) => {
                    claim.submitted = true;
                    claim.expected = expected;
                    let stream = stream && self.has_events;
                    self.commands.push(Command::Submit(Submission {
                        device,
                        held,
                        requests,
                        stream,
                    }));
                    if stream {
                        self.streaming.insert(held.id);
                        self.publish(held.id, JobEvent::Started);
                    }
                }
            }
        }
    }

    /// Hands back a claim that the engine has no room for.
    pub(super) fn handle_not_submitted(&mut self, held: ClaimRef) {
        self.streaming.remove(&held.id);
        self.in_flight.end(held, Disposition::HandBack, self.now);
    }
}
