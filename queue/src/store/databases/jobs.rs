//! The [`Store`] trait over several databases.

use std::{collections::HashMap, sync::atomic::Ordering, time::Duration};

use async_trait::async_trait;

use super::{Databases, merge};
use crate::{
    database_index::DatabaseIndex,
    dispatch::{Entry, Missing},
    job::{Job, JobId, JobState, QueueName, Timestamp},
    store::{
        Claim, ClaimRef, Claimant, FinishedAttempt, FinishedJob, JobRecord, Page, Progress,
        Reconciled, Settled, Store, StoreError, Unannounced,
    },
};

/// Most attempts to remember for calls that are repeated.
const RECORDED_MAX: usize = 1 << 16;

#[async_trait]
impl Store for Databases {
    fn next_database(&self) -> DatabaseIndex {
        let turn = self.turn.fetch_add(1, Ordering::Relaxed);
        let mut in_turn = (0..self.count()).map(|after| turn.wrapping_add(after) % self.count());
        let index = in_turn.find(|index| self.is_reached(*index));
        DatabaseIndex::new(index.unwrap_or(turn % self.count())).unwrap_or_default()
    }

    async fn submit(&self, jobs: &[Job]) -> Result<(), StoreError> {
        self.check(jobs, |job| job.id)?;
        let submitted =
            self.with(jobs, |job| job.id, |store, jobs| async move { store.submit(&jobs).await });
        submitted.await.map(drop)
    }

    /// Also grants no claims when a database cannot be used: those of the other ones must be handed back.
    async fn claim(&self, ids: &[JobId], by: Claimant<'_>) -> Result<Vec<Claim>, StoreError> {
        self.check(ids, |id| *id)?;
        let by = &by;
        let claims = self.with(
            ids,
            |id| *id,
            |store, ids| async move { store.claim(&ids, by.clone()).await },
        );
        Ok(merge::in_order_of(ids, claims.await?.concat(), |claim| claim.job.id))
    }

    async fn renew(
        &self,
        claims: &[ClaimRef],
        lease: Duration,
    ) -> Result<Vec<ClaimRef>, StoreError> {
        let lost = self.with(
            claims,
            |claim| claim.id,
            |store, claims| async move { store.renew(&claims, lease).await },
        );
        let mut lost = lost.await?.concat();
        // The caller does not know yet that these attempts are recorded.
        let recorded = self.recorded.lock();
        lost.retain(|claim| !recorded.contains_key(claim));
        Ok(lost)
    }

    async fn checkpoint(&self, saved: &[(ClaimRef, Vec<u8>)]) -> Result<Vec<ClaimRef>, StoreError> {
        let lost = self.with(
            saved,
            |(claim, _)| claim.id,
            |store, saved| async move { store.checkpoint(&saved).await },
        );
        Ok(lost.await?.concat())
    }

    async fn finish(&self, finished: &[FinishedAttempt]) -> Result<Vec<Settled>, StoreError> {
        let results = self.try_with(
            finished,
            |attempt| attempt.claim.id,
            |store, finished| async move { store.finish(&finished).await },
        );
        let (mut settled, mut failed) = (Vec::with_capacity(finished.len()), None);
        for result in results.await {
            match result {
                Ok(part) => settled.extend(part),
                Err(error) => failed = failed.or(Some(error)),
            }
        }
        let mut recorded = self.recorded.lock();
        if let Some(error) = failed {
            // The call will be repeated, and then these attempts are not written again.
            let settled: HashMap<_, _> = settled.into_iter().map(|job| (job.id, job)).collect();
            let claims = finished.iter().map(|attempt| attempt.claim);
            let pairs = claims.filter_map(|claim| Some((claim, *settled.get(&claim.id)?)));
            let room = RECORDED_MAX.saturating_sub(recorded.len());
            recorded.extend(pairs.take(room));
            return Err(error);
        }
        if !recorded.is_empty() {
            settled.extend(finished.iter().filter_map(|attempt| recorded.remove(&attempt.claim)));
        }
        Ok(settled)
    }

    async fn hand_back(&self, claims: &[ClaimRef]) -> Result<Vec<JobId>, StoreError> {
        let released = self.with(
            claims,
            |claim| claim.id,
            |store, claims| async move { store.hand_back(&claims).await },
        );
        Ok(released.await?.concat())
    }

    async fn hand_back_suspects(&self, claims: &[ClaimRef]) -> Result<Vec<JobId>, StoreError> {
        let released = self.with(
            claims,
            |claim| claim.id,
            |store, claims| async move { store.hand_back_suspects(&claims).await },
        );
        Ok(released.await?.concat())
    }

    async fn cancel(&self, ids: &[JobId]) -> Result<Vec<JobId>, StoreError> {
        let cancelled =
            self.with(ids, |id| *id, |store, ids| async move { store.cancel(&ids).await });
        Ok(cancelled.await?.concat())
    }

    async fn reconcile(&self) -> Result<Reconciled, StoreError> {
        let mut all = Reconciled::default();
        for part in self.each_reached(|store| store.reconcile()).await? {
            all.extend(part.moved, part.queued);
            all.lapsed += part.lapsed;
        }
        all.queued.sort_by_key(|entry| entry.id);
        Ok(all)
    }

    fn announced(&self, entries: &[Entry]) {
        // The entries of one submission are of few databases.
        for (index, entries) in merge::split(entries, self.count(), |entry| entry.id.database()) {
            self.stores[index].announced(&entries);
        }
    }

    async fn unannounced(&self, queue: &QueueName) -> Result<Unannounced, StoreError> {
        let mut all = Unannounced::default();
        for part in self.each_reached(|store| store.unannounced(queue)).await? {
            all.entries.extend(part.entries);
            all.rows.extend(part.rows);
            all.more |= part.more;
        }
        Ok(all)
    }

    async fn forget_announcements(&self, done: &Unannounced) -> Result<(), StoreError> {
        let forgotten = self.with(
            &done.rows,
            |(first, ..)| *first,
            |store, rows| async move {
                let done = Unannounced { rows: rows.into_owned(), ..Unannounced::default() };
                store.forget_announcements(&done).await
            },
        );
        forgotten.await.map(drop)
    }

    async fn queued(
        &self,
        queue: &QueueName,
        after: Option<JobId>,
        limit: u32,
    ) -> Result<Vec<Entry>, StoreError> {
        let pages = self.each(|store| store.queued(queue, after, limit)).await?;
        Ok(merge::page(pages, Page { after, limit, ascending: true }, |entry| entry.id))
    }

    async fn queued_heads(
        &self,
        queue: &QueueName,
        each: u32,
        limit: u32,
    ) -> Result<(Missing, Vec<Entry>), StoreError> {
        let parts = self.each(|store| store.queued_heads(queue, each, limit)).await?;
        Ok(merge::heads(parts, each, limit))
    }

    async fn now(&self) -> Result<Timestamp, StoreError> {
        self.first().now().await
    }

    async fn state(&self, id: JobId) -> Result<Option<JobState>, StoreError> {
        match self.get(id.database()) {
            Some(store) => store.state(id).await,
            None => Ok(None),
        }
    }

    async fn job(&self, id: JobId) -> Result<Option<JobRecord>, StoreError> {
        match self.get(id.database()) {
            Some(store) => store.job(id).await,
            None => Ok(None),
        }
    }

    async fn finished(&self, ids: &[JobId]) -> Result<Vec<FinishedJob>, StoreError> {
        let finished =
            self.with(ids, |id| *id, |store, ids| async move { store.finished(&ids).await });
        Ok(finished.await?.concat())
    }

    async fn unfinished(&self, queue: &QueueName) -> Result<u64, StoreError> {
        Ok(self.each(|store| store.unfinished(queue)).await?.into_iter().sum())
    }

    async fn progress(&self, queue: Option<&QueueName>) -> Result<Progress, StoreError> {
        let mut all = Progress::default();
        for part in self.each(|store| store.progress(queue)).await? {
            all.merge(&part);
        }
        Ok(all)
    }
}
