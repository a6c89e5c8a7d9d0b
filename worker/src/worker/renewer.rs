//! Keeps the leases of running work alive, from a task of its own.

use std::{collections::HashMap, sync::Arc, time::Duration};

use tokio::{
    sync::{mpsc, watch},
    time::{Instant, MissedTickBehavior, interval, timeout},
};
use tritmill_queue::{ClaimRef, Delivery, Dispatcher, Store};

use crate::vitals::Vitals;

/// A claim that must not lapse.
#[derive(Debug, Clone)]
pub(super) struct Holding {
    pub held: ClaimRef,
    pub delivery: Delivery,
    /// Before the claim was asked for: its lease runs at least from here.
    pub claimed_at: Instant,
}

/// A claim whose work must stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Lost {
    /// The store gave it to somebody else, or it was cancelled.
    Taken(ClaimRef),
    /// The store could not be reached before the lease's end; the claim may still be good.
    Unrenewed(ClaimRef),
}

/// Renews three times in a lease; ends when the sender of `held` is gone.
pub(super) struct Renewer {
    pub store: Arc<dyn Store>,
    pub dispatcher: Arc<dyn Dispatcher>,
    pub owner: String,
    pub lease: Duration,
    pub held: watch::Receiver<Vec<Holding>>,
    pub lost: mpsc::UnboundedSender<Lost>,
    pub vitals: Arc<Vitals>,
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
            let holdings = self.held.borrow().clone();
            renewed.retain(|held, _| holdings.iter().any(|holding| holding.held == *held));
            if holdings.is_empty() {
                self.vitals.holds_no_lease();
                continue;
            }
            self.renew_claims(&holdings, &mut renewed, period).await;
            // Before anything else that may have to be waited for.
            for Holding { held, claimed_at, .. } in &holdings {
                // A little early: the lease runs on the store's clock, and stopping takes a step.
                let since = renewed.get(held).unwrap_or(claimed_at);
                if since.elapsed() + self.lease / 6 + period > self.lease {
                    self.report(Lost::Unrenewed(*held));
                }
            }
            self.renew_deliveries(&holdings, period).await;
        }
    }

    async fn renew_claims(
        &self,
        holdings: &[Holding],
        renewed: &mut HashMap<ClaimRef, Instant>,
        limit: Duration,
    ) {
        let held: Vec<ClaimRef> = holdings.iter().map(|holding| holding.held).collect();
        let began = Instant::now();
        match timeout(limit, self.store.renew(&held, self.lease)).await {
            Ok(Ok(lost)) => {
                renewed.extend(held.iter().map(|held| (*held, began)));
                self.vitals.renewed();
                lost.into_iter().for_each(|held| self.report(Lost::Taken(held)));
            }
            Ok(Err(error)) => tracing::warn!(%error, jobs = held.len(), "leases not renewed"),
            Err(_) => tracing::warn!(jobs = held.len(), "leases not renewed: no answer in time"),
        }
    }

    async fn renew_deliveries(&self, holdings: &[Holding], limit: Duration) {
        let deliveries: Vec<Delivery> =
            holdings.iter().map(|holding| holding.delivery.clone()).collect();
        // Deliveries lost here were taken by somebody whose claim the store refused, or will.
        match timeout(limit, self.dispatcher.renew(&self.owner, &deliveries)).await {
            Ok(Ok(_)) => {}
            Ok(Err(error)) => tracing::warn!(%error, "deliveries not renewed"),
            Err(_) => tracing::warn!("deliveries not renewed: no answer in time"),
        }
    }

    fn report(&self, lost: Lost) {
        // Nobody listens only when the worker is ending.
        let _ = self.lost.send(lost);
    }
}
