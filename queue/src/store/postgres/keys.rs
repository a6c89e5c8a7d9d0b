//! API keys.

use async_trait::async_trait;
use sqlx::{PgConnection, postgres::PgRow};
use uuid::Uuid;

use super::{PostgresStore, rows, unavailable};
use crate::{
    job::{Tenant, Timestamp},
    store::{
        StoreError,
        keys::{ApiKey, KeyHash, Keys},
    },
};

async fn insert(
    connection: &mut PgConnection,
    key: &ApiKey,
    hash: &KeyHash,
    now: Option<i64>,
) -> Result<(), StoreError> {
    rows::storable("tenant", &key.tenant.0)?;
    rows::storable("name", &key.name)?;
    sqlx::query(
        "INSERT INTO api_keys (id, hash, tenant, role, name, created_at)
         VALUES ($2, $3, $4, $5, $6, store_now_ms($1))",
    )
    .bind(now)
    .bind(key.id)
    .bind(hash.as_slice())
    .bind(&key.tenant.0)
    .bind(key.role.as_str())
    .bind(&key.name)
    .execute(connection)
    .await
    .map_err(unavailable)?;
    Ok(())
}

pub(super) fn key(row: &PgRow) -> Result<ApiKey, StoreError> {
    let revoked_at: Option<i64> = rows::get(row, "revoked_at")?;
    Ok(ApiKey {
        id: rows::get(row, "id")?,
        tenant: Tenant(rows::get(row, "tenant")?),
        role: rows::get::<&str>(row, "role")?
            .parse()
            .map_err(|error| rows::damaged("role", error))?,
        name: rows::get(row, "name")?,
        created_at: rows::time(row, "created_at")?,
        revoked_at: revoked_at.map(Timestamp),
    })
}

#[async_trait]
impl Keys for PostgresStore {
    async fn add_key(&self, key: &ApiKey, hash: &KeyHash) -> Result<(), StoreError> {
        self.within(async {
            let mut connection = self.pool.acquire().await.map_err(unavailable)?;
            insert(&mut connection, key, hash, self.given_now()).await
        })
        .await
    }

    async fn add_first_key(&self, key: &ApiKey, hash: &KeyHash) -> Result<bool, StoreError> {
        self.within(async {
            let mut tx = self.pool.begin().await.map_err(unavailable)?;
            // Of two that look at once, the second sees what the first wrote.
            sqlx::query("LOCK TABLE api_keys IN EXCLUSIVE MODE")
                .execute(&mut *tx)
                .await
                .map_err(unavailable)?;
            let row = sqlx::query("SELECT EXISTS (SELECT FROM api_keys) AS there")
                .fetch_one(&mut *tx)
                .await
                .map_err(unavailable)?;
            if rows::get(&row, "there")? {
                return Ok(false);
            }
            insert(&mut tx, key, hash, self.given_now()).await?;
            tx.commit().await.map_err(unavailable)?;
            Ok(true)
        })
        .await
    }

    async fn key(&self, hash: &KeyHash) -> Result<Option<ApiKey>, StoreError> {
        self.within(async {
            let row = sqlx::query("SELECT * FROM api_keys WHERE hash = $1 AND revoked_at IS NULL")
                .bind(hash.as_slice())
                .fetch_optional(&self.pool)
                .await
                .map_err(unavailable)?;
            row.as_ref().map(key).transpose()
        })
        .await
    }

    async fn keys(&self) -> Result<Vec<ApiKey>, StoreError> {
        self.within(async {
            let found = sqlx::query("SELECT * FROM api_keys ORDER BY created_at, id")
                .fetch_all(&self.pool)
                .await
                .map_err(unavailable)?;
            found.iter().map(key).collect()
        })
        .await
    }

    async fn revoke_key(&self, id: Uuid) -> Result<bool, StoreError> {
        self.within(async {
            let done = sqlx::query(
                "UPDATE api_keys SET revoked_at = store_now_ms($1)
                 WHERE id = $2 AND revoked_at IS NULL",
            )
            .bind(self.given_now())
            .bind(id)
            .execute(&self.pool)
            .await
            .map_err(unavailable)?;
            Ok(done.rows_affected() == 1)
        })
        .await
    }
}
