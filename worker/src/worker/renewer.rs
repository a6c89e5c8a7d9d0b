//! Renews the leases of running work, in a task of its own.

use std::{collections::HashMap, sync::Arc, time::Duration};

use tokio::{
    sync::watch,
    time::{Instant, MissedTickBehavior, interval, timeout},
};
use tritmill_queue::{ClaimRef, Delivery, Dispatcher, Store};

use crate::{mailbox::Mailbox, metrics::Metrics};

/// The lease of a claim.
#[derive(Debug, Clone)]
pub(super) struct Lease {
    pub held: ClaimRef,
    pub delivery: Delivery,
    /// Time just before the claim was requested: its lease ends no earlier than counted from this
    /// time.
    pub claimed_at: Instant,
}

/// The reason why the work of a claim must stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Loss {
    /// Another worker claimed the job, or it was cancelled.
    Taken,
    /// The store was not reached in time; the claim may still be valid.
    NotRenewed,
}

/// Claims with lost leases, until the event loop takes them.
pub(super) type LostLeases = Mailbox<HashMap<ClaimRef, Loss>>;

/// The task that renews leases, three times in the length of a lease; ends when the sender of
/// `leases` is gone.
pub(super) struct Renewer {
    pub store: Arc<dyn Store>,
    pub dispatcher: Arc<dyn Dispatcher>,
    pub owner: String,
    pub lease: Duration,
    pub leases: watch::Receiver<Vec<Lease>>,
    pub lost: Arc<LostLeases>,
    pub metrics: Arc<Metrics>,
}

impl Renewer {
    pub async fn run(self) {
        let period = (self.lease / 3).max(Duration::from_millis(1));
        let mut ticks = interval(period);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        // Leases start with the claim: the immediate first tick has nothing to renew.
        ticks.tick().await;
        let mut renewed: HashMap<ClaimRef, Instant> = HashMap::new();
        loop {
            ticks.tick().await;
            if self.leases.has_changed().is_err() {
                return;
            }
            let leases = self.leases.borrow().clone();
            renewed.retain(|held, _| leases.iter().any(|lease| lease.held == *held));
            if leases.is_empty() {
                self.metrics.no_lease_held();
                continue;
            }
            self.renew_claims(&leases, &mut renewed, period).await;
            // Lost leases are reported before any other call, which may take long.
            for Lease { held, claimed_at, .. } in &leases {
                // A little early: the lease runs on the store's clock, and stopping takes a step.
                let since = renewed.get(held).unwrap_or(claimed_at);
                if since.elapsed() + self.lease / 6 + period > self.lease {
                    self.report(*held, Loss::NotRenewed);
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
        let held: Vec<ClaimRef> = leases.iter().map(|lease| lease.held).collect();
        let began = Instant::now();
        match timeout(limit, self.store.renew(&held, self.lease)).await {
            Ok(Ok(lost)) => {
                renewed.extend(held.iter().map(|held| (*held, began)));
                self.metrics.leases_renewed();
                lost.into_iter().for_each(|held| self.report(held, Loss::Taken));
            }
            Ok(Err(error)) => tracing::warn!(%error, jobs = held.len(), "leases not renewed"),
            Err(_) => tracing::warn!(jobs = held.len(), "leases not renewed: no answer in time"),
        }
    }

    async fn renew_deliveries(&self, leases: &[Lease], limit: Duration) {
        let deliveries: Vec<Delivery> = leases.iter().map(|lease| lease.delivery.clone()).collect();
        // A delivery that is lost here went to another worker, and the store refuses that worker's
        // claim.
        match timeout(limit, self.dispatcher.renew(&self.owner, &deliveries)).await {
            Ok(Ok(_)) => {}
            Ok(Err(error)) => tracing::warn!(%error, "deliveries not renewed"),
            Err(_) => tracing::warn!("deliveries not renewed: no answer in time"),
        }
    }

    /// A claim that was reported as taken stays so until the event loop has read the report.
    fn report(&self, held: ClaimRef, loss: Loss) {
        self.lost.update(|lost| {
            let known = lost.entry(held).or_insert(loss);
            if loss == Loss::Taken {
                *known = loss;
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use tritmill_queue::{JobId, dispatch::MemoryDispatcher, store::SqliteStore};

    use super::*;

    #[tokio::test]
    async fn lost_leases_that_are_not_read_are_merged() {
        let folder = tempfile::tempdir().expect("a folder");
        let store = SqliteStore::open(&folder.path().join("jobs")).await.expect("opens");
        let (_leases, leases) = watch::channel(Vec::new());
        let lost = Arc::new(LostLeases::default());
        let renewer = Renewer {
            store: Arc::new(store),
            dispatcher: Arc::new(MemoryDispatcher::new(1)),
            owner: "w".to_owned(),
            lease: Duration::from_secs(15),
            leases,
            lost: lost.clone(),
            metrics: Arc::default(),
        };
        let claim = || ClaimRef { id: JobId::generate(), epoch: 1 };
        let (one, two) = (claim(), claim());
        for _ in 0..1000 {
            renewer.report(one, Loss::Taken);
            renewer.report(one, Loss::NotRenewed);
            renewer.report(two, Loss::NotRenewed);
        }
        let expected = HashMap::from([(one, Loss::Taken), (two, Loss::NotRenewed)]);
        lost.changed().await;
        assert_eq!(lost.take(), expected);
        let more = timeout(Duration::from_millis(10), lost.changed()).await;
        assert!(more.is_err(), "nothing is reported twice");
    }
}
