//! What is set for the whole database.

use std::time::Duration;

use sqlx::PgConnection;

use super::{PostgresStore, milliseconds, rows, unavailable};
use crate::store::StoreError;

/// How long jobs are kept after they are over, unless the database says otherwise.
pub const RETENTION_DEFAULT: Duration = Duration::from_secs(365 * 24 * 60 * 60);

impl PostgresStore {
    /// How long this database keeps jobs after they are over.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn retention(&self) -> Result<Duration, StoreError> {
        let mut connection = self.pool.acquire().await.map_err(unavailable)?;
        retention(&mut connection).await
    }

    /// Sets how long this database keeps jobs after they are over, for all who maintain it.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn set_retention(&self, retention: Duration) -> Result<(), StoreError> {
        sqlx::query(
            "INSERT INTO settings (name, value) VALUES ('retention_ms', $1)
             ON CONFLICT (name) DO UPDATE SET value = excluded.value",
        )
        .bind(milliseconds(retention))
        .execute(&self.pool)
        .await
        .map_err(unavailable)?;
        Ok(())
    }
}

/// See [`PostgresStore::retention`].
pub(super) async fn retention(connection: &mut PgConnection) -> Result<Duration, StoreError> {
    let row = sqlx::query("SELECT value FROM settings WHERE name = 'retention_ms'")
        .fetch_optional(connection)
        .await
        .map_err(unavailable)?;
    row.map_or(Ok(RETENTION_DEFAULT), |row| Ok(rows::duration(rows::integer(&row, "value")?)))
}
