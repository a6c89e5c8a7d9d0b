//! Sessions of browsers.

use std::time::Duration;

use async_trait::async_trait;
use uuid::Uuid;

use super::{SqliteStore, keys, unavailable};
use crate::store::{
    StoreError,
    keys::{ApiKey, KeyHash},
    sessions::{SESSIONS_PER_KEY_MAX, Sessions},
};

#[async_trait]
impl Sessions for SqliteStore {
    async fn add_session(
        &self,
        hash: &KeyHash,
        key: Uuid,
        lifetime: Duration,
    ) -> Result<(), StoreError> {
        let now = self.now();
        let mut tx = self.begin().await?;
        sqlx::query(
            "DELETE FROM sessions WHERE expires_at <= ?1
                 OR hash IN (SELECT hash FROM sessions WHERE key_id = ?2
                             ORDER BY expires_at DESC LIMIT -1 OFFSET ?3)",
        )
        .bind(now.0)
        .bind(key)
        .bind(SESSIONS_PER_KEY_MAX - 1)
        .execute(&mut *tx)
        .await
        .map_err(unavailable)?;
        sqlx::query("INSERT INTO sessions (hash, key_id, expires_at) VALUES (?1, ?2, ?3)")
            .bind(hash.as_slice())
            .bind(key)
            .bind(now.after(lifetime).0)
            .execute(&mut *tx)
            .await
            .map_err(unavailable)?;
        tx.commit().await.map_err(unavailable)
    }

    async fn session(&self, hash: &KeyHash) -> Result<Option<ApiKey>, StoreError> {
        let row = sqlx::query(
            "SELECT api_keys.* FROM sessions JOIN api_keys ON api_keys.id = key_id
             WHERE sessions.hash = ?1 AND expires_at > ?2 AND revoked_at IS NULL",
        )
        .bind(hash.as_slice())
        .bind(self.now().0)
        .fetch_optional(&self.pool)
        .await
        .map_err(unavailable)?;
        row.as_ref().map(keys::key).transpose()
    }

    async fn end_session(&self, hash: &KeyHash) -> Result<(), StoreError> {
        sqlx::query("DELETE FROM sessions WHERE hash = ?1")
            .bind(hash.as_slice())
            .execute(&self.pool)
            .await
            .map_err(unavailable)?;
        Ok(())
    }
}
