//! Keeps the leases of running work alive, from a task of its own.

use std::{collections::HashMap, sync::Arc, time::Duration};

use tokio::{
    sync::{mpsc, watch},
    time::{Instant, MissedTickBehavior, interval, timeout},
};
use tritmill_queue::{ClaimRef, Delivery, Dispatcher, Store};

use crate::metrics::Metrics;

/// A claim that must not lapse.
#[derive(Debug, Clone)]
pub(super) struct Lease {
    pub held: ClaimRef,
    pub delivery: Delivery,
    /// Before the claim was asked for: its lease runs at least from here.
    pub claimed_at: Instant,
}

/// A claim whose work must stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LostLease {
    /// The store gave it to somebody else, or it was cancelled.
    Taken(ClaimRef),
    /// The store could not be reached before the lease's end; the claim may still be good.
    NotRenewed(ClaimRef),
}

/// Renews three times in a lease; ends when the sender of `held` is gone.
pub(super) struct Renewer {
    pub store: Arc<dyn Store>,
    pub dispatcher: Arc<dyn Dispatcher>,
    pub owner: String,
    pub lease: Duration,
    pub held: watch::Receiver<Vec<Lease>>,
    pub lost: mpsc::UnboundedSender<LostLease>,
    pub metrics: Arc<Metrics>,
}

impl Renewer {
    pub async fn run(self) {
        let period = (self.lease / 3).max(Duration::from_millis(1));
        let mut ticks = interval(period);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        // Leases start with the claim: the first tick, at once, would renew nothing.
        ticks.tick().await;
        let mut renewed: HashMap<ClaimRef, Instant> = HashMap::new();
        loop {
            ticks.tick().await;
            if self.held.has_changed().is_err() {
                return;
            }
            let leases = self.held.borrow().clone();
            renewed.retain(|held, _| leases.iter().any(|holding| holding.held == *held));
            if leases.is_empty() {
                self.metrics.no_lease_held();
                continue;
            }
            self.renew_claims(&leases, &mut renewed, period).await;
            // Before anything else that may have to be waited for.
            for Lease { held, claimed_at, .. } in &leases {
                // A little early: the lease runs on the store's clock, and stopping takes a step.
                let since = renewed.get(held).unwrap_or(claimed_at);
                if since.elapsed() + self.lease / 6 + period > self.lease {
                    self.report(LostLease::NotRenewed(*held));
                }
            }
            self.renew_deliveries(&leases, period).await;
        }
    }

    async fn renew_claims(
        &self,
        leases: &[Lease],
        renewed: &mut HashMap<ClaimRef, Instant>,
        limit: Duration,
    ) {
        let held: Vec<ClaimRef> = leases.iter().map(|holding| holding.held).collect();
        let began = Instant::now();
        match timeout(limit, self.store.renew(&held, self.lease)).await {
            Ok(Ok(lost)) => {
                renewed.extend(held.iter().map(|held| (*held, began)));
                self.metrics.renewed();
                lost.into_iter().for_each(|held| self.report(LostLease::Taken(held)));
            }
            Ok(Err(error)) => tracing::warn!(%error, jobs = held.len(), "leases not renewed"),
            Err(_) => tracing::warn!(jobs = held.len(), "leases not renewed: no answer in time"),
        }
    }

    async fn renew_deliveries(&self, leases: &[Lease], limit: Duration) {
        let deliveries: Vec<Delivery> =
            leases.iter().map(|holding| holding.delivery.clone()).collect();
        // Deliveries lost here were taken by somebody whose claim the store refused, or will.
        match timeout(limit, self.dispatcher.renew(&self.owner, &deliveries)).await {
            Ok(Ok(_)) => {}
            Ok(Err(error)) => tracing::warn!(%error, "deliveries not renewed"),
            Err(_) => tracing::warn!("deliveries not renewed: no answer in time"),
        }
    }

    fn report(&self, lost: LostLease) {
        // Nobody listens only when the worker is ending.
        let _ = self.lost.send(lost);
    }
}
