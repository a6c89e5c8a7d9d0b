//! Statements on a store's connections. An error is as [`StoreError`] says of its cause.

use sqlx::{Database, SqlSafeStr};

use super::{
    SqlStore, claims,
    dialect::{Db, id_list},
};
use crate::{
    job::{Job, JobId},
    store::StoreError,
};

/// A row of a result.
pub type Row = <Db as Database>::Row;
/// A connection, or a transaction.
pub type Connection = <Db as Database>::Connection;
/// A statement with its parameters.
pub type Query<'q> = sqlx::query::Query<'q, Db, <Db as Database>::Arguments>;

/// Returns a statement without its parameters.
pub fn query<'q>(sql: impl SqlSafeStr) -> Query<'q> {
    sqlx::query(sql)
}

impl SqlStore {
    /// Records jobs in a transaction. A job with a known id stays as it is.
    ///
    /// # Errors
    /// As [`Store::submit`](crate::Store::submit).
    pub async fn insert_jobs(
        &self,
        transaction: &mut Connection,
        jobs: &[Job],
    ) -> Result<(), StoreError> {
        claims::insert_jobs(self, transaction, jobs, None).await
    }

    /// Deletes ended jobs in a transaction, with their results and errors, so that [`insert_jobs`](Self::insert_jobs)
    /// records them anew. Jobs that have not ended stay as they are.
    ///
    /// # Errors
    /// If the store fails; the caller gives the transaction up.
    pub async fn delete_ended(
        &self,
        transaction: &mut Connection,
        ids: &[JobId],
    ) -> Result<(), StoreError> {
        let delete = query(claims::DELETE_ENDED).bind(id_list(ids.iter().copied()));
        delete.execute(transaction).await?;
        Ok(())
    }

    /// Runs a statement; returns how many rows it changed.
    pub async fn execute(&self, query: Query<'_>) -> Result<u64, StoreError> {
        self.within(async {
            let mut connection = self.acquire().await?;
            let done = query.execute(&mut *connection).await;
            self.release(connection, done.map(|done| done.rows_affected()))
        })
        .await
    }

    /// Runs a statement; returns its row.
    pub async fn fetch_one(&self, query: Query<'_>) -> Result<Row, StoreError> {
        self.within(async {
            let mut connection = self.acquire().await?;
            let row = query.fetch_one(&mut *connection).await;
            self.release(connection, row)
        })
        .await
    }

    /// Runs a statement; returns its row, if there is one.
    pub async fn fetch_optional(&self, query: Query<'_>) -> Result<Option<Row>, StoreError> {
        self.within(async {
            let mut connection = self.acquire().await?;
            let row = query.fetch_optional(&mut *connection).await;
            self.release(connection, row)
        })
        .await
    }

    /// Runs a statement; returns its rows.
    pub async fn fetch_all(&self, query: Query<'_>) -> Result<Vec<Row>, StoreError> {
        self.within(async {
            let mut connection = self.acquire().await?;
            let rows = query.fetch_all(&mut *connection).await;
            self.release(connection, rows)
        })
        .await
    }
}
