//! [`Databases`]: the store of a fleet, in one Postgres database or several.
//!
//! One database is the rule. Several are for queues that have outgrown one server: jobs, files and batches are
//! spread among them, and each has a [database](DatabaseIndex) that its id names. The jobs of a batch are in the
//! database of its input file, so a batch is whole in one database, and so is each submission under an
//! idempotency key. Everything else is in the first database: keys, sessions, the audit log, settings of queues
//! and workers. Only settings that statements of each database read are written to all: retention, and whether a
//! queue is paused.
//!
//! A call about some jobs goes to their databases at the same time, and is one transaction in each. It fails when
//! one of them fails; the others may have done their part then, so such a call is repeated as a whole; what was
//! recorded by calls of `finish` that failed is remembered for the next call. Calls without ids ask every database
//! and merge the answers. Reconciliation goes on in the databases that answer.
//!
//! Databases can be added, at the end of the list; they cannot be removed. Each one knows the installation and its
//! own index, so that URLs in the wrong order, or of another installation, are refused.

mod batch_steps;
mod batches;
mod front;
mod jobs;
mod merge;
mod operations;

use std::{
    borrow::Cow,
    collections::HashMap,
    future::Future,
    sync::{Arc, atomic::AtomicUsize},
    time::{Duration, Instant},
};

use futures_util::future::join_all;
use parking_lot::Mutex;

use super::{
    ClaimRef, Clock, PoolState, PostgresOptions, PostgresStore, Settled, StoreError, Submission,
    SubmitError,
};
use crate::{
    database_index::DatabaseIndex,
    job::{Job, JobId, Tenant},
};

/// Time for which a database gets no new jobs after a call failed.
const AVOIDED: Duration = Duration::from_secs(5);

/// A store in one Postgres database or several. Clones share the connections.
#[derive(Debug, Clone)]
pub struct Databases {
    /// By index; at least one.
    stores: Arc<[PostgresStore]>,
    /// Counts the calls of `next_database`.
    turn: Arc<AtomicUsize>,
    /// Time at which a call of each database failed last.
    failed_at: Arc<[Mutex<Option<Instant>>]>,
    /// Attempts that were recorded by calls of `finish` that failed in another database.
    recorded: Arc<Mutex<HashMap<ClaimRef, Settled>>>,
}

/// A call failed in one of several databases.
#[derive(Debug, thiserror::Error)]
#[error("database {number}: {source}")]
struct InDatabase {
    /// From 1, as in the list of URLs.
    number: usize,
    source: Box<dyn std::error::Error + Send + Sync>,
}

impl Databases {
    /// Creates the schema of each database or migrates it to the latest version. Adds databases to the
    /// installation that are new in the list. `urls` are separated by white space.
    ///
    /// # Errors
    /// As [`PostgresStore::migrate`]. [`StoreError::Migrate`] with a
    /// [`MembershipError`](super::MembershipError) when the list does not fit the installation.
    pub async fn migrate(urls: &str) -> Result<(), StoreError> {
        let list = list(urls)?;
        for url in &list {
            PostgresStore::migrate(url).await?;
        }
        let stores = open(&list, PostgresOptions::default()).await?;
        PostgresStore::join(&stores).await
    }

    /// Connects to databases with a schema of this release or later. `urls` are separated by white space.
    ///
    /// # Errors
    /// As [`PostgresStore::connect`]. [`StoreError::Migrate`] with a
    /// [`MembershipError`](super::MembershipError) when the list does not fit the installation.
    pub async fn connect(urls: &str) -> Result<Self, StoreError> {
        Self::connect_with(urls, PostgresOptions::default()).await
    }

    /// Like [`connect`](Self::connect), with options for each database.
    ///
    /// # Errors
    /// As [`connect`](Self::connect).
    pub async fn connect_with(urls: &str, options: PostgresOptions) -> Result<Self, StoreError> {
        let stores = open(&list(urls)?, options).await?;
        PostgresStore::check_members(&stores).await?;
        let turn = Arc::new(AtomicUsize::new(fastrand::usize(..)));
        let failed_at = stores.iter().map(|_| Mutex::default()).collect();
        Ok(Self { stores: stores.into(), turn, failed_at, recorded: Arc::default() })
    }

    /// Returns the same store with another clock than the servers': for tests.
    #[must_use]
    pub fn with_clock(self, clock: &Clock) -> Self {
        let stores = self.stores.iter().map(|store| store.clone().with_clock(Arc::clone(clock)));
        Self { stores: stores.collect(), ..self }
    }

    /// Returns the number of databases.
    pub fn count(&self) -> usize {
        self.stores.len()
    }

    /// Records jobs unless `tenant` has submitted under `key` before: see
    /// [`PostgresStore::submit_idempotent`]. The jobs get new ids in the database of the key.
    ///
    /// # Errors
    /// [`SubmitError::Conflict`] when the key belongs to another request.
    pub async fn submit_idempotent(
        &self,
        tenant: &Tenant,
        key: &str,
        request_hash: &[u8],
        jobs: &mut [Job],
    ) -> Result<Submission, SubmitError> {
        let home = merge::database_of_key(tenant, key, self.count());
        // The key may be from a time when there were fewer databases.
        for (index, store) in self.stores.iter().enumerate() {
            if index != home.number()
                && let Some(known) = store.known_submission(tenant, key, request_hash).await?
            {
                return Ok(known);
            }
        }
        for job in &mut *jobs {
            job.id = job.id.in_database(home);
        }
        self.stores[home.number()].submit_idempotent(tenant, key, request_hash, jobs).await
    }

    /// Deletes jobs in any state with their results and errors; a worker that runs one loses its claim.
    /// Returns how many were deleted. For benchmarks and test jobs.
    pub async fn delete_jobs(&self, ids: &[JobId]) -> Result<u64, StoreError> {
        let deleted =
            self.with(ids, |id| *id, |store, ids| async move { store.delete_jobs(&ids).await });
        Ok(deleted.await?.into_iter().sum())
    }

    /// Returns how long finished jobs are kept.
    pub async fn retention(&self) -> Result<Duration, StoreError> {
        self.first().retention().await
    }

    /// Sets how long finished jobs are kept, for all processes that maintain the databases.
    pub async fn set_retention(&self, retention: Duration) -> Result<(), StoreError> {
        self.each(|store| store.set_retention(retention)).await.map(drop)
    }

    /// Ends a rolling upgrade: see [`PostgresStore::finish_upgrade`].
    pub async fn finish_upgrade(&self) -> Result<Vec<String>, StoreError> {
        // The workers are registered in the first database.
        let alive = self.first().finish_upgrade().await?;
        if alive.is_empty() {
            self.each(PostgresStore::finish_upgrade).await?;
        }
        Ok(alive)
    }

    /// Returns the state of the pools of connections, over all databases.
    pub fn pools(&self) -> [PoolState; 2] {
        let mut pools = self.first().pools();
        for store in &self.stores[1..] {
            for (sum, pool) in pools.iter_mut().zip(store.pools()) {
                sum.add(&pool);
            }
        }
        pools
    }

    /// Waits for the calls in progress and closes every connection.
    pub async fn close(&self) {
        join_all(self.stores.iter().map(PostgresStore::close)).await;
    }

    /// Returns the database that holds what is not spread.
    fn first(&self) -> &PostgresStore {
        &self.stores[0]
    }

    /// Returns a database; `None` if there are not that many.
    fn get(&self, index: DatabaseIndex) -> Option<&PostgresStore> {
        self.stores.get(index.number())
    }

    /// Returns a database, or an error if there are not that many.
    fn need(&self, index: DatabaseIndex) -> Result<&PostgresStore, StoreError> {
        self.get(index).ok_or_else(|| StoreError::InvalidValue {
            what: "id",
            problem: format!("it is of database {} of {}", index.number() + 1, self.count()),
        })
    }

    /// Returns an error if an item's database does not exist.
    fn check<T>(&self, items: &[T], id: impl Fn(&T) -> JobId) -> Result<(), StoreError> {
        items.iter().try_for_each(|item| self.need(id(item).database()).map(drop))
    }

    /// Calls each database with its items; returns the results, or the first error when all calls have ended.
    /// Items of databases that do not exist are left out: nothing has such an id.
    async fn with<'a, I, T, F>(
        &'a self,
        items: &'a [I],
        id: impl Fn(&I) -> JobId + Send,
        call: impl Fn(&'a PostgresStore, Cow<'a, [I]>) -> F + Send,
    ) -> Result<Vec<T>, StoreError>
    where
        I: Clone + Sync + Send,
        T: Send,
        F: Future<Output = Result<T, StoreError>> + Send,
    {
        self.try_with(items, id, call).await.into_iter().collect()
    }

    async fn try_with<'a, I, T, F>(
        &'a self,
        items: &'a [I],
        id: impl Fn(&I) -> JobId + Send,
        call: impl Fn(&'a PostgresStore, Cow<'a, [I]>) -> F + Send,
    ) -> Vec<Result<T, StoreError>>
    where
        I: Clone + Sync + Send,
        T: Send,
        F: Future<Output = Result<T, StoreError>> + Send,
    {
        let parts = merge::split(items, self.count(), |item| id(item).database());
        let calls: Vec<_> = parts
            .into_iter()
            .map(|(index, items)| self.named(index, call(&self.stores[index], items)))
            .collect();
        join_all(calls).await
    }

    /// Calls every database; returns the results in order, or the first error when all calls have ended.
    async fn each<'a, T, F>(
        &'a self,
        call: impl Fn(&'a PostgresStore) -> F + Send,
    ) -> Result<Vec<T>, StoreError>
    where
        T: Send,
        F: Future<Output = Result<T, StoreError>> + Send,
    {
        self.try_each(call).await.into_iter().collect()
    }

    /// Calls every database; returns the results of those that answered, or the first error if none did.
    async fn each_reached<'a, T, F>(
        &'a self,
        call: impl Fn(&'a PostgresStore) -> F + Send,
    ) -> Result<Vec<T>, StoreError>
    where
        T: Send,
        F: Future<Output = Result<T, StoreError>> + Send,
    {
        let (mut done, mut failed) = (Vec::with_capacity(self.count()), None);
        for result in self.try_each(call).await {
            match result {
                Ok(value) => done.push(value),
                Err(error) => failed = failed.or(Some(error)),
            }
        }
        match failed {
            Some(error) if done.is_empty() => Err(error),
            Some(error) => {
                tracing::warn!(%error, "one of several databases cannot be used");
                Ok(done)
            }
            None => Ok(done),
        }
    }

    async fn try_each<'a, T, F>(
        &'a self,
        call: impl Fn(&'a PostgresStore) -> F + Send,
    ) -> Vec<Result<T, StoreError>>
    where
        T: Send,
        F: Future<Output = Result<T, StoreError>> + Send,
    {
        let stores = self.stores.iter().enumerate();
        let calls: Vec<_> = stores.map(|(index, store)| self.named(index, call(store))).collect();
        join_all(calls).await
    }

    /// Returns whether no call of a database failed a moment ago.
    fn is_reached(&self, index: usize) -> bool {
        self.failed_at[index].lock().is_none_or(|at| at.elapsed() >= AVOIDED)
    }

    /// Names the database in the error of a call, if there are several.
    async fn named<T>(
        &self,
        index: usize,
        call: impl Future<Output = Result<T, StoreError>> + Send,
    ) -> Result<T, StoreError> {
        match call.await {
            Err(StoreError::Unavailable(source)) if self.count() > 1 => {
                *self.failed_at[index].lock() = Some(Instant::now());
                let number = index + 1;
                Err(StoreError::Unavailable(Box::new(InDatabase { number, source })))
            }
            result => result,
        }
    }
}

/// Returns the URLs of a list.
fn list(urls: &str) -> Result<Vec<&str>, StoreError> {
    let list: Vec<&str> = urls.split_whitespace().collect();
    if (1..=DatabaseIndex::COUNT_MAX).contains(&list.len()) {
        return Ok(list);
    }
    let problem = format!("1 to {} URLs are allowed, not {}", DatabaseIndex::COUNT_MAX, list.len());
    Err(StoreError::InvalidValue { what: "list of databases", problem })
}

async fn open(urls: &[&str], options: PostgresOptions) -> Result<Vec<PostgresStore>, StoreError> {
    let opened = urls.iter().map(|url| PostgresStore::connect_with(url, options));
    join_all(opened).await.into_iter().collect()
}
