//! Calls on the two pools of connections, within their time, and how busy the pools are.

use std::{
    future::Future,
    sync::atomic::{AtomicU64, Ordering},
};

use sqlx::{PgPool, postgres::PgRow};

use super::{NoAnswer, PostgresStore, calls::Query};
use crate::store::StoreError;

/// Connections of a pool now, and what calls met so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolState {
    /// `calls` or `hot`; see the module's documentation.
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

/// What calls on both pools met.
#[derive(Debug, Default)]
pub(super) struct PoolCounts {
    calls: Counts,
    hot: Counts,
}

/// What calls on one pool met.
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

    fn failed(&self, error: &StoreError) {
        let StoreError::Unavailable(source) = error else { return };
        if let Some(sqlx::Error::PoolTimedOut) = source.downcast_ref() {
            self.timeouts.fetch_add(1, Ordering::Relaxed);
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

    /// Runs a statement of the pool `hot` that returns one row.
    pub(super) async fn fetch_hot_one(&self, query: Query<'_>) -> Result<PgRow, StoreError> {
        let call = async { Ok(query.fetch_one(&self.hot).await?) };
        self.within_pool(&self.hot, &self.counts.hot, call).await
    }

    /// Runs a statement that changes open jobs by their ids.
    pub(super) async fn fetch_hot(&self, query: Query<'_>) -> Result<Vec<PgRow>, StoreError> {
        let call = async { Ok(query.fetch_all(&self.hot).await?) };
        self.within_pool(&self.hot, &self.counts.hot, call).await
    }

    /// Returns the result of a call on the other pool, or an error when it takes too long.
    pub(super) async fn within<T>(
        &self,
        call: impl Future<Output = Result<T, StoreError>> + Send,
    ) -> Result<T, StoreError> {
        self.within_pool(&self.pool, &self.counts.calls, call).await
    }

    /// After an error, later calls may go to another server.
    async fn within_pool<T>(
        &self,
        pool: &PgPool,
        counts: &Counts,
        call: impl Future<Output = Result<T, StoreError>> + Send,
    ) -> Result<T, StoreError> {
        counts.begin(pool);
        let limit = self.call_timeout;
        let result = tokio::time::timeout(limit, call)
            .await
            .unwrap_or_else(|_| Err(StoreError::Unavailable(Box::new(NoAnswer(limit)))));
        if let Err(error) = &result {
            counts.failed(error);
        }
        if let Err(error @ StoreError::Unavailable(_)) = &result {
            self.on_unavailable(error);
        }
        result
    }
}
