//! Steps of batches over several databases.

use std::{collections::HashMap, sync::atomic::Ordering, time::Duration};

use async_trait::async_trait;

use super::Databases;
use crate::{
    job::Tenant,
    store::{
        Batch, BatchId, BatchSteps, Claimant, PostgresStore, StoreError,
        batch_steps::{
            BatchClaim, BatchStart, BatchWrites, Claimable, CustomIdHash, WebhookBounds,
        },
    },
};

impl Databases {
    /// Returns the databases, another one first each time.
    fn in_turn(&self) -> impl Iterator<Item = (usize, &PostgresStore)> {
        let first = self.turn.fetch_add(1, Ordering::Relaxed) % self.count();
        let (before, after) = self.stores.split_at(first);
        let indices = (first..self.count()).chain(0..first);
        indices.zip(after.iter().chain(before))
    }
}

/// The claims of several databases: one that cannot be used does not stop the others.
#[derive(Default)]
struct Claimed {
    claims: Vec<BatchClaim>,
    failed: Option<StoreError>,
}

impl Claimed {
    fn add(&mut self, claimed: Result<Vec<BatchClaim>, StoreError>) {
        match claimed {
            Ok(more) => self.claims.extend(more),
            Err(error) => self.failed = self.failed.take().or(Some(error)),
        }
    }

    fn result(self) -> Result<Vec<BatchClaim>, StoreError> {
        match self.failed {
            Some(error) if self.claims.is_empty() => Err(error),
            Some(error) => {
                tracing::warn!(%error, "one of several databases cannot be used");
                Ok(self.claims)
            }
            None => Ok(self.claims),
        }
    }
}

/// How many claims of webhooks each host and each tenant has.
#[derive(Default)]
struct Seen {
    hosts: HashMap<String, u32>,
    tenants: HashMap<Tenant, u32>,
}

impl Seen {
    fn add(&mut self, batch: &Batch) {
        if let Some(webhook) = &batch.webhook {
            *self.hosts.entry(webhook.host()).or_default() += 1;
        }
        *self.tenants.entry(batch.tenant.clone()).or_default() += 1;
    }
}

/// Returns the names that may have no more claims, and how many each other one may have.
fn rest<T: Clone>(seen: HashMap<T, u32>, busy: &[T], each: u32) -> (Vec<T>, u32) {
    let mut busy = busy.to_vec();
    let mut most = 0;
    for (name, count) in seen {
        if count >= each {
            busy.push(name);
        } else {
            most = most.max(count);
        }
    }
    (busy, each - most)
}

#[async_trait]
impl BatchSteps for Databases {
    /// Goes round the tenants within each database.
    async fn claim_batches(
        &self,
        which: Claimable,
        by: Claimant<'_>,
        max: u32,
    ) -> Result<Vec<BatchClaim>, StoreError> {
        let mut claimed = Claimed::default();
        for (index, store) in self.in_turn() {
            let left = max.saturating_sub(claimed.claims.len() as u32);
            if left > 0 {
                let call = store.claim_batches(which, by.clone(), left);
                claimed.add(self.named(index, call).await);
            }
        }
        claimed.result()
    }

    async fn has_suspect_batches(&self) -> Result<bool, StoreError> {
        Ok(self.each(|store| store.has_suspect_batches()).await?.contains(&true))
    }

    async fn claim_webhooks(
        &self,
        by: Claimant<'_>,
        bounds: WebhookBounds<'_>,
    ) -> Result<Vec<BatchClaim>, StoreError> {
        let mut claimed = Claimed::default();
        for (index, store) in self.in_turn() {
            let max = bounds.max.saturating_sub(claimed.claims.len() as u32);
            if max == 0 {
                break;
            }
            let mut seen = Seen::default();
            claimed.claims.iter().for_each(|claim| seen.add(&claim.batch));
            let (hosts, per_host) = rest(seen.hosts, bounds.busy_hosts, bounds.per_host);
            let (tenants, per_tenant) = rest(seen.tenants, bounds.busy_tenants, bounds.per_tenant);
            let (busy_hosts, busy_tenants) = (&hosts[..], &tenants[..]);
            let bounds = WebhookBounds { max, per_host, per_tenant, busy_hosts, busy_tenants };
            let call = store.claim_webhooks(by.clone(), bounds);
            claimed.add(self.named(index, call).await);
        }
        claimed.result()
    }

    async fn renew_batch(
        &self,
        id: BatchId,
        epoch: i64,
        lease: Duration,
    ) -> Result<bool, StoreError> {
        self.need(id.database())?.renew_batch(id, epoch, lease).await
    }

    async fn release_batch(
        &self,
        id: BatchId,
        epoch: i64,
        after: Duration,
    ) -> Result<(), StoreError> {
        self.need(id.database())?.release_batch(id, epoch, after).await
    }

    async fn charge_batch(
        &self,
        id: BatchId,
        epoch: i64,
        after: Duration,
    ) -> Result<(), StoreError> {
        self.need(id.database())?.charge_batch(id, epoch, after).await
    }

    /// Calls at the same moment for different databases may each find a tenant's last free place.
    async fn start_batch(
        &self,
        claim: &BatchClaim,
        active_max: u32,
    ) -> Result<BatchStart, StoreError> {
        let home = self.need(claim.batch.id.database())?;
        let tenant = &claim.batch.tenant;
        let elsewhere = self.batches_elsewhere(home, |store| store.active_batches(tenant)).await?;
        home.start_batch(claim, active_max.saturating_sub(elsewhere)).await
    }

    async fn save_batch(
        &self,
        claim: &BatchClaim,
        writes: BatchWrites<'_>,
    ) -> Result<bool, StoreError> {
        self.need(claim.batch.id.database())?.save_batch(claim, writes).await
    }

    async fn known_custom_ids(
        &self,
        id: BatchId,
        hashes: &[CustomIdHash],
    ) -> Result<Vec<(CustomIdHash, u32)>, StoreError> {
        self.need(id.database())?.known_custom_ids(id, hashes).await
    }

    async fn forget_custom_ids(&self, id: BatchId, max: u32) -> Result<u64, StoreError> {
        self.need(id.database())?.forget_custom_ids(id, max).await
    }

    async fn sweep_batches(&self) -> Result<(), StoreError> {
        self.each(|store| store.sweep_batches()).await.map(drop)
    }
}
