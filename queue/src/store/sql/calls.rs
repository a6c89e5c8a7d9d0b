//! Statements on a store's pool.

use sqlx::{Database, SqlSafeStr};

use super::{SqlStore, dialect::Db};
use crate::store::StoreError;

pub(crate) type Row = <Db as Database>::Row;
pub(crate) type Connection = <Db as Database>::Connection;
pub(crate) type Query<'q> = sqlx::query::Query<'q, Db, <Db as Database>::Arguments>;

/// Returns a statement without its parameters.
pub(crate) fn query<'q>(sql: impl SqlSafeStr) -> Query<'q> {
    sqlx::query(sql)
}

impl SqlStore {
    /// Runs a statement; returns how many rows it changed.
    pub(crate) async fn execute(&self, query: Query<'_>) -> Result<u64, StoreError> {
        self.within(async { Ok(query.execute(&self.pool).await?.rows_affected()) }).await
    }

    pub(crate) async fn fetch_one(&self, query: Query<'_>) -> Result<Row, StoreError> {
        self.within(async { Ok(query.fetch_one(&self.pool).await?) }).await
    }

    pub(crate) async fn fetch_optional(&self, query: Query<'_>) -> Result<Option<Row>, StoreError> {
        self.within(async { Ok(query.fetch_optional(&self.pool).await?) }).await
    }

    pub(crate) async fn fetch_all(&self, query: Query<'_>) -> Result<Vec<Row>, StoreError> {
        self.within(async { Ok(query.fetch_all(&self.pool).await?) }).await
    }
}
