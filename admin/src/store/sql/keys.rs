//! API keys.

use async_trait::async_trait;
use uuid::Uuid;

use tritmill_queue::{StoreError, Tenant};

use super::{LOCK_KEYS, Query, Row, SqlStore, query, rows, storable};
use crate::store::keys::{ApiKey, KeyHash, Keys};

fn insert<'q>(
    store: &SqlStore,
    key: &'q ApiKey,
    hash: &'q KeyHash,
) -> Result<Query<'q>, StoreError> {
    storable("tenant", &key.tenant.0)?;
    storable("name", &key.name)?;
    Ok(query(concat!(
        "INSERT INTO api_keys (id, hash, tenant, role, name, expires_at, created_at)
         VALUES ($2, $3, $4, $5, $6, $7, ",
        now!(),
        ")"
    ))
    .bind(store.clock_parameter())
    .bind(key.id)
    .bind(hash.as_slice())
    .bind(&key.tenant.0)
    .bind(key.role.as_str())
    .bind(&key.name)
    .bind(key.expires_at.map(|at| at.0)))
}

/// Begins a query for [`key`]. It names the columns: Postgres refuses a prepared `SELECT *` once a migration has added
/// one.
macro_rules! select_keys {
    ($($rest:expr),+) => {
        concat!(
            "SELECT api_keys.id, api_keys.tenant, role, name, created_at, revoked_at, api_keys.expires_at,
                    last_used_at FROM api_keys ",
            $($rest),+
        )
    };
}
pub(super) use select_keys;

/// Matches keys that are valid.
macro_rules! valid_key {
    () => {
        concat!(
            "revoked_at IS NULL AND (api_keys.expires_at IS NULL OR api_keys.expires_at > ",
            now!(),
            ")"
        )
    };
}
pub(super) use valid_key;

pub(super) fn key(row: &Row) -> Result<ApiKey, StoreError> {
    Ok(ApiKey {
        id: rows::get(row, "id")?,
        tenant: Tenant(rows::get(row, "tenant")?),
        role: rows::word(row, "role")?,
        name: rows::get(row, "name")?,
        created_at: rows::time(row, "created_at")?,
        revoked_at: rows::time_or_none(row, "revoked_at")?,
        expires_at: rows::time_or_none(row, "expires_at")?,
        last_used_at: rows::time_or_none(row, "last_used_at")?,
    })
}

#[async_trait]
impl Keys for SqlStore {
    async fn add_key(&self, key: &ApiKey, hash: &KeyHash) -> Result<(), StoreError> {
        self.execute(insert(self, key, hash)?).await.map(drop)
    }

    async fn add_first_key(&self, key: &ApiKey, hash: &KeyHash) -> Result<bool, StoreError> {
        let insert = insert(self, key, hash)?;
        self.within(async {
            let mut tx = self.begin().await?;
            // If two calls are concurrent, the second waits and then sees the key of the first.
            query(LOCK_KEYS).execute(&mut *tx).await?;
            let first = query("SELECT 1 AS found FROM api_keys LIMIT 1");
            if first.fetch_optional(&mut *tx).await?.is_some() {
                return Ok(false);
            }
            insert.execute(&mut *tx).await?;
            tx.commit().await?;
            Ok(true)
        })
        .await
    }

    async fn key(&self, hash: &KeyHash) -> Result<Option<ApiKey>, StoreError> {
        let found = query(select_keys!("WHERE hash = $2 AND ", valid_key!()));
        let found = found.bind(self.clock_parameter()).bind(hash.as_slice());
        self.fetch_optional(found).await?.as_ref().map(key).transpose()
    }

    async fn keys(&self) -> Result<Vec<ApiKey>, StoreError> {
        let all = query(select_keys!("ORDER BY created_at, id"));
        self.fetch_all(all).await?.iter().map(key).collect()
    }

    async fn keys_of(&self, tenant: &Tenant) -> Result<Vec<ApiKey>, StoreError> {
        let found = query(select_keys!("WHERE tenant = $1 ORDER BY created_at, id"));
        self.fetch_all(found.bind(&tenant.0)).await?.iter().map(key).collect()
    }

    async fn note_key_use(&self, id: Uuid) -> Result<(), StoreError> {
        let note = concat!("UPDATE api_keys SET last_used_at = ", now!(), " WHERE id = $2");
        self.execute(query(note).bind(self.clock_parameter()).bind(id)).await.map(drop)
    }

    async fn revoke_key(&self, id: Uuid) -> Result<bool, StoreError> {
        let revoke = concat!(
            "UPDATE api_keys SET revoked_at = ",
            now!(),
            " WHERE id = $2 AND revoked_at IS NULL"
        );
        Ok(self.execute(query(revoke).bind(self.clock_parameter()).bind(id)).await? == 1)
    }
}
