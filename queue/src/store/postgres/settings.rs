//! Settings of the whole database.

use std::time::Duration;

use sqlx::PgConnection;

use super::{
    PostgresStore,
    calls::query,
    rows::{self, milliseconds},
};
use crate::store::StoreError;

/// How long finished jobs are kept unless the database has another setting.
pub const RETENTION_DEFAULT: Duration = Duration::from_secs(365 * 24 * 60 * 60);

impl PostgresStore {
    /// Returns how long this database keeps finished jobs.
    pub async fn retention(&self) -> Result<Duration, StoreError> {
        self.within(async {
            let mut connection = self.acquire().await?;
            let retention = retention(&mut connection).await;
            self.release(connection, retention)
        })
        .await
    }

    /// Sets how long this database keeps finished jobs, for all processes that maintain it.
    pub async fn set_retention(&self, retention: Duration) -> Result<(), StoreError> {
        let set = query(
            "INSERT INTO settings (name, value) VALUES ('retention_ms', $1)
             ON CONFLICT (name) DO UPDATE SET value = excluded.value",
        );
        self.execute(set.bind(milliseconds(retention))).await.map(drop)
    }
}

/// See [`PostgresStore::retention`].
pub(super) async fn retention(connection: &mut PgConnection) -> Result<Duration, StoreError> {
    let row = query("SELECT value FROM settings WHERE name = 'retention_ms'")
        .fetch_optional(connection)
        .await?;
    row.map_or(Ok(RETENTION_DEFAULT), |row| Ok(rows::duration(rows::integer(&row, "value")?)))
}
