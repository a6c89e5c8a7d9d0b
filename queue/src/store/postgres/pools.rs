//! Calls on the two pools of connections, within their time, and how busy the pools are.

use std::{
    future::Future,
    sync::atomic::{AtomicU64, Ordering},
    time::Instant,
};

use sqlx::{PgPool, postgres::PgRow};

use super::{NoAnswer, PostgresStore, calls::Query, layout::Layout};
use crate::store::StoreError;

/// Connections of a pool now, and waits and timeouts of calls so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolState {
    /// `hot`: for statements that change open jobs by their ids, and heartbeats; `calls`: for all others.
    pub name: &'static str,
    /// Connections without a call.
    pub idle: u64,
    /// Connections with a call, or being opened.
    pub in_use: u64,
    /// Maximum number of connections.
    pub max: u64,
    /// Calls that began while every connection was in use.
    pub waits: u64,
    /// Calls that failed because no connection became free in time.
    pub timeouts: u64,
}

impl PoolState {
    /// Adds the same pool of another database.
    pub(in crate::store) fn add(&mut self, other: &Self) {
        self.idle += other.idle;
        self.in_use += other.in_use;
        self.max += other.max;
        self.waits += other.waits;
        self.timeouts += other.timeouts;
    }
}

/// Waits and timeouts of calls on both pools.
#[derive(Debug, Default)]
pub(super) struct PoolCounts {
    calls: Counts,
    hot: Counts,
}

/// Waits and timeouts of calls on one pool.
#[derive(Debug, Default)]
struct Counts {
    waits: AtomicU64,
    timeouts: AtomicU64,
}

impl Counts {
    fn begin(&self, pool: &PgPool) {
        if pool.num_idle() == 0 && pool.size() >= pool.options().get_max_connections() {
            self.waits.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn state(&self, name: &'static str, pool: &PgPool) -> PoolState {
        let idle = pool.num_idle() as u64;
        PoolState {
            name,
            idle,
            // Both numbers change meanwhile.
            in_use: u64::from(pool.size()).saturating_sub(idle),
            max: u64::from(pool.options().get_max_connections()),
            waits: self.waits.load(Ordering::Relaxed),
            timeouts: self.timeouts.load(Ordering::Relaxed),
        }
    }
}

impl PostgresStore {
    /// Returns the state of the two pools of connections.
    pub fn pools(&self) -> [PoolState; 2] {
        let PoolCounts { calls, hot } = &*self.counts;
        [calls.state("calls", &self.pool), hot.state("hot", &self.hot)]
    }

    /// Runs a statement that changes open jobs by their ids, or a heartbeat, where the jobs of this layout
    /// are. In the combined layout they share a table with all ended ones.
    pub(super) async fn fetch_open(
        &self,
        layout: Layout,
        query: Query<'_>,
    ) -> Result<Vec<PgRow>, StoreError> {
        match layout {
            Layout::Combined => self.fetch_all(query).await,
            Layout::Changing | Layout::Split => self.fetch_hot(query).await,
        }
    }

    /// Runs a statement on the pool `hot`.
    pub(super) async fn fetch_hot(&self, query: Query<'_>) -> Result<Vec<PgRow>, StoreError> {
        let call = async { Ok(query.fetch_all(&self.hot).await?) };
        self.within_pool(&self.hot, &self.counts.hot, call).await
    }

    /// Returns the result of a call on the pool `calls`, or an error when it takes too long.
    pub(super) async fn within<T>(
        &self,
        call: impl Future<Output = Result<T, StoreError>> + Send,
    ) -> Result<T, StoreError> {
        self.within_pool(&self.pool, &self.counts.calls, call).await
    }

    /// Returns the result of a call on the pool `calls` that may take any time.
    pub(super) async fn without_limit<T>(
        &self,
        call: impl Future<Output = Result<T, StoreError>> + Send,
    ) -> Result<T, StoreError> {
        self.observe(&self.pool, &self.counts.calls, call).await
    }

    async fn within_pool<T>(
        &self,
        pool: &PgPool,
        counts: &Counts,
        call: impl Future<Output = Result<T, StoreError>> + Send,
    ) -> Result<T, StoreError> {
        let limit = self.call_timeout;
        let limited = async {
            let result = tokio::time::timeout(limit, call).await;
            result.unwrap_or_else(|_| Err(StoreError::Unavailable(Box::new(NoAnswer(limit)))))
        };
        self.observe(pool, counts, limited).await
    }

    /// Counts the waits and timeouts of a call. After an error, later calls may go to another server.
    async fn observe<T>(
        &self,
        pool: &PgPool,
        counts: &Counts,
        call: impl Future<Output = Result<T, StoreError>> + Send,
    ) -> Result<T, StoreError> {
        let began = Instant::now();
        counts.begin(pool);
        let result = call.await;
        if let Err(error @ StoreError::Unavailable(source)) = &result {
            if let Some(sqlx::Error::PoolTimedOut) = source.downcast_ref() {
                counts.timeouts.fetch_add(1, Ordering::Relaxed);
            }
            self.on_unavailable(error, began);
        }
        result
    }
}
