//! Settings of queues and workers, which are in the first database; samples, dead letters and maintenance.

use std::{
    sync::atomic::{AtomicU32, Ordering},
    time::Duration,
};

use async_trait::async_trait;
use futures_util::future::{join, join_all};

use super::{Databases, merge};
use crate::{
    dispatch::Quotas,
    job::{JobId, QueueName, Tenant, Timestamp},
    store::{
        DeadLetters, Maintained, Maintenance, NumericsClasses, Page, QueueHistory, QueueSettings,
        Serving, StoreError, Workers,
        classes::{ClassError, RegisteredQueue, ResetClassError},
        dead_letters::{DeadLetter, Pace, Replay},
        history::{Period, Point, Snapshot},
        maintenance::Erased,
        queue_settings::{QueueOverview, QueueState},
        workers::{Directive, Heartbeat, Integrity, Worker},
    },
};

/// Time limit for noting that a worker reaches the other databases.
const NOTE_LIMIT: Duration = Duration::from_secs(1);

#[async_trait]
impl QueueSettings for Databases {
    async fn queue_state(&self, queue: &QueueName) -> Result<QueueState, StoreError> {
        self.first().queue_state(queue).await
    }

    async fn queue_states(&self) -> Result<Vec<QueueState>, StoreError> {
        self.first().queue_states().await
    }

    async fn queues(&self) -> Result<Vec<QueueOverview>, StoreError> {
        Ok(merge::overviews(self.each(|store| store.queues()).await?))
    }

    /// Writes to all databases: `wanted_workers` reads it in each.
    async fn set_paused(&self, queue: &QueueName, paused: bool) -> Result<(), StoreError> {
        self.each(|store| store.set_paused(queue, paused)).await.map(drop)
    }

    async fn set_limit(
        &self,
        queue: &QueueName,
        limit_tokens: Option<u64>,
    ) -> Result<(), StoreError> {
        self.first().set_limit(queue, limit_tokens).await
    }

    async fn set_max_wait(
        &self,
        queue: &QueueName,
        max_wait: Option<Duration>,
    ) -> Result<(), StoreError> {
        self.first().set_max_wait(queue, max_wait).await
    }

    async fn quotas(&self, queue: &QueueName) -> Result<Quotas, StoreError> {
        self.first().quotas(queue).await
    }

    async fn set_quota(
        &self,
        queue: &QueueName,
        tenant: Option<&Tenant>,
        limit_tokens: Option<u64>,
    ) -> Result<(), StoreError> {
        self.first().set_quota(queue, tenant, limit_tokens).await
    }
}

#[async_trait]
impl QueueHistory for Databases {
    async fn sample(&self) -> Result<bool, StoreError> {
        Ok(self.each_reached(|store| store.sample()).await?.contains(&true))
    }

    async fn snapshot(&self) -> Result<Option<Snapshot>, StoreError> {
        Ok(merge::snapshots(self.each(|store| store.snapshot()).await?))
    }

    async fn samples(
        &self,
        queue: Option<&QueueName>,
        period: Period,
        from: Timestamp,
        to: Timestamp,
    ) -> Result<Vec<Point>, StoreError> {
        Ok(merge::points(self.each(|store| store.samples(queue, period, from, to)).await?))
    }
}

#[async_trait]
impl NumericsClasses for Databases {
    async fn register_class(&self, queue: &QueueName, class: &str) -> Result<(), ClassError> {
        self.first().register_class(queue, class).await
    }

    async fn allow_class(&self, queue: &QueueName, class: &str) -> Result<bool, StoreError> {
        self.first().allow_class(queue, class).await
    }

    async fn withdraw_class(&self, queue: &QueueName, class: &str) -> Result<bool, StoreError> {
        self.first().withdraw_class(queue, class).await
    }

    async fn reset_class(&self, queue: &QueueName) -> Result<Option<String>, ResetClassError> {
        self.first().reset_class(queue).await
    }

    async fn registered_queues(&self) -> Result<Vec<RegisteredQueue>, StoreError> {
        self.first().registered_queues().await
    }
}

#[async_trait]
impl Workers for Databases {
    /// Also notes in the other databases that they are reached: see `PULSE` in `postgres/reconcile.rs`.
    async fn heartbeat(&self, heartbeat: &Heartbeat) -> Result<Directive, StoreError> {
        let others = self.stores[1..].iter().map(|store| store.note_reached());
        let noted = tokio::time::timeout(NOTE_LIMIT, join_all(others));
        // Whatever uses a database that is away fails by itself.
        join(self.first().heartbeat(heartbeat), noted).await.0
    }

    async fn workers(&self) -> Result<Vec<Worker>, StoreError> {
        self.first().workers().await
    }

    async fn serving(&self, queue: &QueueName) -> Result<Serving, StoreError> {
        self.first().serving(queue).await
    }

    async fn request_drain(&self, owner: &str) -> Result<bool, StoreError> {
        self.first().request_drain(owner).await
    }

    async fn forget_worker(&self, owner: &str) -> Result<(), StoreError> {
        self.first().forget_worker(owner).await
    }

    async fn integrity(&self) -> Result<Integrity, StoreError> {
        self.first().integrity().await
    }
}

#[async_trait]
impl DeadLetters for Databases {
    async fn dead_letters(
        &self,
        queue: &QueueName,
        limit: u32,
        after: Option<JobId>,
    ) -> Result<Vec<DeadLetter>, StoreError> {
        let pages = self.each(|store| store.dead_letters(queue, limit, after)).await?;
        let page = Page { after, limit, ascending: true };
        Ok(merge::page(pages, page, |letter| letter.record.job.id))
    }

    /// One transaction in each database. With a pace, the databases take turns.
    async fn replay(&self, ids: &[JobId], pace: Option<Pace>) -> Result<Vec<Replay>, StoreError> {
        let (turn, count) = (AtomicU32::new(0), self.count() as u32);
        let replays = self.with(
            ids,
            |id| *id,
            |store, ids| {
                let turn = turn.fetch_add(1, Ordering::Relaxed);
                let pace = pace.map(|pace| Pace {
                    from: pace.from.after(pace.every.saturating_mul(turn)),
                    every: pace.every.saturating_mul(count),
                });
                async move { store.replay(&ids, pace).await }
            },
        );
        Ok(replays.await?.concat())
    }

    async fn purge(&self, ids: &[JobId]) -> Result<u64, StoreError> {
        let purged = self.with(ids, |id| *id, |store, ids| async move { store.purge(&ids).await });
        Ok(purged.await?.into_iter().sum())
    }
}

#[async_trait]
impl Maintenance for Databases {
    async fn maintain(&self) -> Result<Maintained, StoreError> {
        let mut all = Maintained::default();
        for part in self.each(|store| store.maintain()).await? {
            all.created += part.created;
            all.dropped += part.dropped;
            all.kept_unfinished += part.kept_unfinished;
            all.kept_recent += part.kept_recent;
        }
        Ok(all)
    }

    async fn erase_tenant(&self, tenant: &Tenant) -> Result<Erased, StoreError> {
        let mut all = Erased { done: true, ..Erased::default() };
        for part in self.each(|store| store.erase_tenant(tenant)).await? {
            all.keys += part.keys;
            all.batches += part.batches;
            all.files += part.files;
            all.jobs += part.jobs;
            all.done &= part.done;
        }
        Ok(all)
    }
}
