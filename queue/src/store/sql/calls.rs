//! Statements on a store's pool.
//!
//! The modules in `store/sql` are written once for both databases. Each is compiled twice, as a child
//! of `postgres` and as a child of `sqlite`; `super::dialect` supplies what differs: types, some
//! fragments of SQL (macros) and the encoding of values.

use sqlx::{Database, SqlSafeStr};

use super::{SqlStore, dialect::Db};
use crate::store::StoreError;

pub(super) type Row = <Db as Database>::Row;
pub(super) type Connection = <Db as Database>::Connection;
pub(super) type Query<'q> = sqlx::query::Query<'q, Db, <Db as Database>::Arguments>;

/// Returns a statement without its parameters.
pub(super) fn query<'q>(sql: impl SqlSafeStr) -> Query<'q> {
    sqlx::query(sql)
}

impl SqlStore {
    /// Runs a statement; returns how many rows it changed.
    pub(super) async fn execute(&self, query: Query<'_>) -> Result<u64, StoreError> {
        self.within(async { Ok(query.execute(&self.pool).await?.rows_affected()) }).await
    }

    pub(super) async fn fetch_one(&self, query: Query<'_>) -> Result<Row, StoreError> {
        self.within(async { Ok(query.fetch_one(&self.pool).await?) }).await
    }

    pub(super) async fn fetch_optional(&self, query: Query<'_>) -> Result<Option<Row>, StoreError> {
        self.within(async { Ok(query.fetch_optional(&self.pool).await?) }).await
    }

    pub(super) async fn fetch_all(&self, query: Query<'_>) -> Result<Vec<Row>, StoreError> {
        self.within(async { Ok(query.fetch_all(&self.pool).await?) }).await
    }
}
