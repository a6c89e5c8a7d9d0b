//! Renews the leases of everything in flight, three times in the length of a lease, and stops work
//! before its lease ends.

use std::time::Instant;

use tritmill_queue::ClaimRef;

use super::{
    in_flight::Disposition,
    io::{Answer, Command},
    state::Core,
};

/// The reason why the work of a claim must stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Loss {
    /// Another worker claimed the job, or it was cancelled.
    Taken,
    /// The store was not reached in time; the claim may still be valid.
    NotRenewed,
}

impl Core {
    /// Renews all leases if that is due.
    pub(super) fn renew_leases(&mut self) {
        if self.now < self.renewals.due_at {
            return;
        }
        self.renewals.due_at = self.now + self.renewals.period;
        let mut held: Vec<ClaimRef> = self.in_flight.leases().map(|lease| lease.held).collect();
        if held.is_empty() {
            self.metrics.no_lease_held();
            return;
        }
        self.stop_overdue_work();
        if self.renewals.call.is_none() {
            held.sort_unstable();
            self.commands.push(Command::Renew(held.clone()));
            self.renewals.call = Some((held, self.now));
        }
        let deliveries = self.in_flight.leases().map(|lease| lease.delivery.clone()).collect();
        self.commands.push(Command::RenewDeliveries(deliveries));
    }

    pub(super) fn handle_renewed(&mut self, lost: Answer<Vec<ClaimRef>>) {
        let Some((held, at)) = self.renewals.call.take() else { return };
        match lost {
            Ok(lost) => {
                if let Some(oldest) = self.in_flight.leases().map(|lease| lease.renewed_at).min() {
                    let left = (oldest + self.lease).saturating_duration_since(self.now);
                    self.metrics.upkeep.record_margin(left);
                }
                self.in_flight.renewed(&held, at);
                self.metrics.leases_renewed();
                lost.into_iter().for_each(|held| self.handle_lost_lease(held, Loss::Taken));
            }
            Err(error) => tracing::warn!(%error, jobs = held.len(), "leases not renewed"),
        }
    }

    /// Stops the work of claims with a lease that would end before the next look. A little early: the
    /// lease runs on the store's clock, and stopping takes a step.
    fn stop_overdue_work(&mut self) {
        let margin = self.lease / 6 + self.renewals.period;
        let ends = |renewed_at: Instant| renewed_at + self.lease < self.now + margin;
        let running = self.in_flight.running();
        let overdue: Vec<ClaimRef> = running
            .filter(|(_, claim)| ends(claim.lease.renewed_at))
            .map(|(held, _)| held)
            .collect();
        overdue.into_iter().for_each(|held| self.handle_lost_lease(held, Loss::NotRenewed));
    }

    /// Stops the work of a claim with a lost lease.
    fn handle_lost_lease(&mut self, held: ClaimRef, loss: Loss) {
        let Some(claim) = self.in_flight.get_mut(held) else { return };
        claim.hand_back |= loss == Loss::NotRenewed;
        if claim.stopping {
            return;
        }
        claim.span.in_scope(|| match loss {
            Loss::Taken => tracing::warn!("lease lost or job cancelled, stopping it"),
            Loss::NotRenewed => tracing::warn!("lease not renewed in time, stopping the job"),
        });
        self.metrics.lease_lost();
        self.stop_work(held);
    }

    /// Stops the work of a running claim. If the engine cannot take the cancel now, the next look at
    /// the leases tries again.
    pub(super) fn stop_work(&mut self, held: ClaimRef) {
        let Some(claim) = self.in_flight.get_mut(held) else { return };
        if !claim.submitted {
            let disposition =
                if claim.hand_back { Disposition::HandBack } else { Disposition::Forget };
            self.in_flight.end(held, disposition, self.now);
        } else if !claim.stopping {
            claim.stopping = true;
            self.commands.push(Command::Cancel(claim.device, held));
        }
    }
}
