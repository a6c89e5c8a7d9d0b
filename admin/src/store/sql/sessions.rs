//! Browser sessions.

use std::time::Duration;

use async_trait::async_trait;
use uuid::Uuid;

use tritmill_queue::StoreError;

use super::{SqlStore, keys, query, rows::milliseconds, storable};
use crate::store::{
    keys::{ApiKey, KeyHash},
    sessions::{SESSIONS_PER_KEY_MAX, Sessions},
};

#[async_trait]
impl Sessions for SqlStore {
    async fn admit_login(
        &self,
        key: &ApiKey,
        hash: &KeyHash,
    ) -> Result<Option<ApiKey>, StoreError> {
        storable("tenant", &key.tenant.0)?;
        storable("name", &key.name)?;
        let admit = concat!(
            "INSERT INTO api_keys (id, hash, tenant, role, name, created_at)
             VALUES ($2, $3, $4, $5, $6, ",
            now!(),
            ") ON CONFLICT (id) DO UPDATE
             SET tenant = excluded.tenant, role = excluded.role, name = excluded.name
             WHERE api_keys.revoked_at IS NULL RETURNING *"
        );
        let admit = query(admit)
            .bind(self.clock_parameter())
            .bind(key.id)
            .bind(hash.as_slice())
            .bind(&key.tenant.0)
            .bind(key.role.as_str())
            .bind(&key.name);
        self.fetch_optional(admit).await?.as_ref().map(keys::key).transpose()
    }

    async fn add_session(
        &self,
        hash: &KeyHash,
        key: Uuid,
        lifetime: Duration,
    ) -> Result<(), StoreError> {
        let sweep = concat!(
            "DELETE FROM sessions WHERE expires_at <= ",
            now!(),
            " OR hash IN (SELECT hash FROM sessions WHERE key_id = $2
                          ORDER BY expires_at DESC LIMIT 1000000 OFFSET $3)"
        );
        let insert = concat!(
            "INSERT INTO sessions (hash, key_id, expires_at) VALUES ($2, $3, ",
            now!(),
            " + $4)"
        );
        self.within(async {
            let mut tx = self.begin().await?;
            query(sweep)
                .bind(self.clock_parameter())
                .bind(key)
                .bind(i64::from(SESSIONS_PER_KEY_MAX) - 1)
                .execute(&mut *tx)
                .await?;
            query(insert)
                .bind(self.clock_parameter())
                .bind(hash.as_slice())
                .bind(key)
                .bind(milliseconds(lifetime))
                .execute(&mut *tx)
                .await?;
            tx.commit().await?;
            Ok(())
        })
        .await
    }

    async fn session(&self, hash: &KeyHash) -> Result<Option<ApiKey>, StoreError> {
        let found = keys::select_keys!(
            "JOIN sessions ON api_keys.id = key_id WHERE sessions.hash = $2 AND sessions.expires_at > ",
            now!(),
            " AND ",
            keys::valid_key!()
        );
        let found = query(found).bind(self.clock_parameter()).bind(hash.as_slice());
        self.fetch_optional(found).await?.as_ref().map(keys::key).transpose()
    }

    async fn end_session(&self, hash: &KeyHash) -> Result<(), StoreError> {
        let end = query("DELETE FROM sessions WHERE hash = $1").bind(hash.as_slice());
        self.execute(end).await.map(drop)
    }
}
