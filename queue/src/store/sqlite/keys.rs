//! API keys.

use async_trait::async_trait;
use sqlx::{Row as _, SqliteConnection, sqlite::SqliteRow};
use uuid::Uuid;

use super::{SqliteStore, rows, unavailable};
use crate::{
    job::{Tenant, Timestamp},
    store::{
        StoreError,
        keys::{ApiKey, KeyHash, Keys},
    },
};

async fn insert(
    connection: &mut SqliteConnection,
    key: &ApiKey,
    hash: &KeyHash,
    now: Timestamp,
) -> Result<(), StoreError> {
    sqlx::query(
        "INSERT INTO api_keys (id, hash, tenant, role, name, created_at)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6)",
    )
    .bind(key.id)
    .bind(hash.as_slice())
    .bind(&key.tenant.0)
    .bind(key.role.as_str())
    .bind(&key.name)
    .bind(now.0)
    .execute(connection)
    .await
    .map_err(unavailable)?;
    Ok(())
}

pub(super) fn key(row: &SqliteRow) -> Result<ApiKey, StoreError> {
    let revoked_at: Option<i64> = row.try_get("revoked_at").map_err(unavailable)?;
    Ok(ApiKey {
        id: row.try_get("id").map_err(unavailable)?,
        tenant: Tenant(rows::text(row, "tenant")?),
        role: rows::text(row, "role")?.parse().map_err(|error| rows::damaged("role", error))?,
        name: rows::text(row, "name")?,
        created_at: Timestamp(rows::integer(row, "created_at")?),
        revoked_at: revoked_at.map(Timestamp),
    })
}

#[async_trait]
impl Keys for SqliteStore {
    async fn add_key(&self, key: &ApiKey, hash: &KeyHash) -> Result<(), StoreError> {
        let mut tx = self.begin().await?;
        insert(&mut tx, key, hash, self.now()).await?;
        tx.commit().await.map_err(unavailable)
    }

    async fn add_first_key(&self, key: &ApiKey, hash: &KeyHash) -> Result<bool, StoreError> {
        let mut tx = self.begin().await?;
        let row = sqlx::query("SELECT EXISTS (SELECT 1 FROM api_keys) AS there")
            .fetch_one(&mut *tx)
            .await
            .map_err(unavailable)?;
        if rows::integer(&row, "there")? != 0 {
            return Ok(false);
        }
        insert(&mut tx, key, hash, self.now()).await?;
        tx.commit().await.map_err(unavailable)?;
        Ok(true)
    }

    async fn key(&self, hash: &KeyHash) -> Result<Option<ApiKey>, StoreError> {
        let row = sqlx::query("SELECT * FROM api_keys WHERE hash = ?1 AND revoked_at IS NULL")
            .bind(hash.as_slice())
            .fetch_optional(&self.pool)
            .await
            .map_err(unavailable)?;
        row.as_ref().map(key).transpose()
    }

    async fn keys(&self) -> Result<Vec<ApiKey>, StoreError> {
        let found = sqlx::query("SELECT * FROM api_keys ORDER BY created_at, id")
            .fetch_all(&self.pool)
            .await
            .map_err(unavailable)?;
        found.iter().map(key).collect()
    }

    async fn revoke_key(&self, id: Uuid) -> Result<bool, StoreError> {
        let done =
            sqlx::query("UPDATE api_keys SET revoked_at = ?2 WHERE id = ?1 AND revoked_at IS NULL")
                .bind(id)
                .bind(self.now().0)
                .execute(&self.pool)
                .await
                .map_err(unavailable)?;
        Ok(done.rows_affected() == 1)
    }
}
