//! The [`Store`] trait.

use std::time::Duration;

use async_trait::async_trait;

use super::{SqlStore, calls::query, claims, reads, reconcile, rows};
use crate::{
    dispatch::Entry,
    job::{Job, JobId, JobState, QueueName, Timestamp},
    store::attempts::LOSSES_MAX,
    store::{
        Claim, ClaimRef, Claimant, FinishedAttempt, FinishedJob, JobRecord, Progress, Reconciled,
        Settled, Store, StoreError,
    },
};

#[async_trait]
impl Store for SqlStore {
    async fn submit(&self, jobs: &[Job]) -> Result<(), StoreError> {
        self.within(async {
            let mut connection = self.pool.acquire().await?;
            claims::insert_jobs(&mut connection, jobs, None, self.clock_parameter()).await
        })
        .await
    }

    async fn claim(&self, ids: &[JobId], by: Claimant<'_>) -> Result<Vec<Claim>, StoreError> {
        claims::claim(self, ids, by).await
    }

    async fn renew(
        &self,
        claims: &[ClaimRef],
        lease: Duration,
    ) -> Result<Vec<ClaimRef>, StoreError> {
        claims::renew(self, claims, lease).await
    }

    async fn checkpoint(&self, saved: &[(ClaimRef, Vec<u8>)]) -> Result<Vec<ClaimRef>, StoreError> {
        claims::checkpoint(self, saved).await
    }

    async fn finish(&self, finished: &[FinishedAttempt]) -> Result<Vec<Settled>, StoreError> {
        claims::finish(self, finished).await
    }

    async fn hand_back(&self, claims: &[ClaimRef]) -> Result<Vec<JobId>, StoreError> {
        claims::hand_back(self, claims, 0).await
    }

    async fn hand_back_suspects(&self, claims: &[ClaimRef]) -> Result<Vec<JobId>, StoreError> {
        claims::hand_back(self, claims, LOSSES_MAX).await
    }

    async fn cancel(&self, ids: &[JobId]) -> Result<Vec<JobId>, StoreError> {
        claims::cancel(self, ids).await
    }

    async fn reconcile(&self) -> Result<Reconciled, StoreError> {
        self.within(reconcile::reconcile(self)).await
    }

    async fn queued(
        &self,
        queue: &QueueName,
        after: Option<JobId>,
        limit: u32,
    ) -> Result<Vec<Entry>, StoreError> {
        reads::queued(self, queue, after, limit).await
    }

    async fn now(&self) -> Result<Timestamp, StoreError> {
        let now = concat!("SELECT ", now!(), " AS now");
        rows::time(&self.fetch_one(query(now).bind(self.clock_parameter())).await?, "now")
    }

    async fn state(&self, id: JobId) -> Result<Option<JobState>, StoreError> {
        reads::state(self, id).await
    }

    async fn job(&self, id: JobId) -> Result<Option<JobRecord>, StoreError> {
        Ok(reads::records(self, &[id]).await?.pop())
    }

    async fn finished(&self, ids: &[JobId]) -> Result<Vec<FinishedJob>, StoreError> {
        reads::finished(self, ids).await
    }

    async fn unfinished(&self, queue: &QueueName) -> Result<u64, StoreError> {
        reads::unfinished(self, queue).await
    }

    async fn progress(&self, queue: Option<&QueueName>) -> Result<Progress, StoreError> {
        reads::progress(self, queue).await
    }
}
