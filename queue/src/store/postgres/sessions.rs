//! Sessions of browsers.

use std::time::Duration;

use async_trait::async_trait;
use uuid::Uuid;

use super::{PostgresStore, keys, milliseconds, unavailable};
use crate::store::{
    StoreError,
    keys::{ApiKey, KeyHash},
    sessions::{SESSIONS_PER_KEY_MAX, Sessions},
};

#[async_trait]
impl Sessions for PostgresStore {
    async fn add_session(
        &self,
        hash: &KeyHash,
        key: Uuid,
        lifetime: Duration,
    ) -> Result<(), StoreError> {
        self.within(async {
            sqlx::query(
                "WITH gone AS (
                     DELETE FROM sessions WHERE expires_at <= store_now_ms($1)
                         OR hash IN (SELECT hash FROM sessions WHERE key_id = $3
                                     ORDER BY expires_at DESC OFFSET $5))
                 INSERT INTO sessions (hash, key_id, expires_at)
                 VALUES ($2, $3, store_now_ms($1) + $4)",
            )
            .bind(self.given_now())
            .bind(hash.as_slice())
            .bind(key)
            .bind(milliseconds(lifetime))
            .bind(i64::from(SESSIONS_PER_KEY_MAX) - 1)
            .execute(&self.pool)
            .await
            .map_err(unavailable)?;
            Ok(())
        })
        .await
    }

    async fn session(&self, hash: &KeyHash) -> Result<Option<ApiKey>, StoreError> {
        self.within(async {
            let row = sqlx::query(
                "SELECT api_keys.* FROM sessions JOIN api_keys ON api_keys.id = key_id
                 WHERE sessions.hash = $2 AND expires_at > store_now_ms($1) AND revoked_at IS NULL",
            )
            .bind(self.given_now())
            .bind(hash.as_slice())
            .fetch_optional(&self.pool)
            .await
            .map_err(unavailable)?;
            row.as_ref().map(keys::key).transpose()
        })
        .await
    }

    async fn end_session(&self, hash: &KeyHash) -> Result<(), StoreError> {
        self.within(async {
            sqlx::query("DELETE FROM sessions WHERE hash = $1")
                .bind(hash.as_slice())
                .execute(&self.pool)
                .await
                .map_err(unavailable)?;
            Ok(())
        })
        .await
    }
}
