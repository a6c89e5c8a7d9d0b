//! Calls on the two pools of connections, within their time, and how busy the pools are.

use std::{future::Future, time::Instant};

use sqlx::postgres::PgRow;

use super::{
    NoAnswer, PostgresStore,
    calls::Query,
    pool::{Pool, PooledConnection, Transaction},
};
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

fn state(name: &'static str, pool: &Pool) -> PoolState {
    let ((idle, open), (waits, timeouts)) = (pool.sizes(), pool.counts());
    PoolState {
        name,
        idle: idle as u64,
        // Both numbers change meanwhile.
        in_use: open.saturating_sub(idle) as u64,
        max: pool.max() as u64,
        waits,
        timeouts,
    }
}

impl PostgresStore {
    /// Returns the state of the two pools of connections.
    pub fn pools(&self) -> [PoolState; 2] {
        [state("calls", &self.pool), state("hot", &self.hot)]
    }

    /// Returns a connection of the pool `calls`.
    ///
    /// # Errors
    /// [`StoreError::Unavailable`] and [`StoreError::Refused`].
    pub async fn acquire(&self) -> Result<PooledConnection, StoreError> {
        let connection = self.pool.get().await?;
        connection.ok_or_else(|| StoreError::Unavailable("no connection to the database".into()))
    }

    /// Gives a connection back after a call with this result, which it returns.
    pub(super) fn release<T, E>(
        &self,
        connection: PooledConnection,
        result: Result<T, E>,
    ) -> Result<T, StoreError>
    where
        StoreError: From<E>,
    {
        connection.release(result.map_err(StoreError::from))
    }

    /// Begins a transaction.
    ///
    /// # Errors
    /// [`StoreError::Unavailable`] and [`StoreError::Refused`].
    pub async fn begin(&self) -> Result<Transaction, StoreError> {
        Transaction::begin(self.acquire().await?).await
    }

    /// Runs a statement on the pool `hot`, or on the other one while the server has too few connections for both.
    pub(super) async fn fetch_hot(&self, query: Query<'_>) -> Result<Vec<PgRow>, StoreError> {
        self.within(async {
            let mut connection = match self.hot.get().await? {
                Some(connection) => connection,
                None => self.acquire().await?,
            };
            let rows = query.fetch_all(&mut *connection).await;
            self.release(connection, rows)
        })
        .await
    }

    /// Returns the result of a call, or an error when it takes too long.
    ///
    /// # Errors
    /// Those of the call, and [`StoreError::Unavailable`].
    pub async fn within<T>(
        &self,
        call: impl Future<Output = Result<T, StoreError>> + Send,
    ) -> Result<T, StoreError> {
        let limit = self.call_timeout;
        let limited = async {
            let result = tokio::time::timeout(limit, call).await;
            result.unwrap_or_else(|_| Err(StoreError::Unavailable(Box::new(NoAnswer(limit)))))
        };
        self.without_limit(limited).await
    }

    /// Returns the result of a call that may take any time. After an error, later calls may go to another server.
    pub(super) async fn without_limit<T>(
        &self,
        call: impl Future<Output = Result<T, StoreError>> + Send,
    ) -> Result<T, StoreError> {
        let began = Instant::now();
        let result = call.await;
        if let Err(error @ StoreError::Unavailable(_)) = &result {
            self.on_unavailable(error, began);
        }
        result
    }
}
