//! The log of acts, and the erasure of a tenant.

use async_trait::async_trait;
use sqlx::{Row as _, sqlite::SqliteRow};
use uuid::Uuid;

use super::{
    SqliteStore,
    job_queries::time,
    rows::{from_json, text},
    unavailable,
};
use crate::{
    job::Tenant,
    store::{
        Page, StoreError,
        audit::{AUDIT_MAX, Audit, AuditEntry},
        operations::{ERASED_MAX, Erased},
    },
};

/// Jobs deleted by one statement, between which others get their turn.
const CHUNK: i64 = 1000;

fn line(row: &SqliteRow) -> Result<AuditEntry, StoreError> {
    Ok(AuditEntry {
        id: row.try_get("id").map_err(unavailable)?,
        at: time(row, "at")?,
        key: row.try_get("key_id").map_err(unavailable)?,
        key_name: text(row, "key_name")?,
        action: text(row, "action")?,
        target: text(row, "target")?,
        detail: from_json("detail", &text(row, "detail")?)?,
    })
}

#[async_trait]
impl Audit for SqliteStore {
    async fn record_audit(&self, line: &AuditEntry) -> Result<(), StoreError> {
        let mut tx = self.begin().await?;
        sqlx::query(
            "INSERT INTO audit (id, at, key_id, key_name, action, target, detail)
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)",
        )
        .bind(line.id)
        .bind(self.now().0)
        .bind(line.key)
        .bind(&line.key_name)
        .bind(&line.action)
        .bind(&line.target)
        .bind(line.detail.to_string())
        .execute(&mut *tx)
        .await
        .map_err(unavailable)?;
        sqlx::query(
            "DELETE FROM audit
             WHERE id <= (SELECT id FROM audit ORDER BY id DESC LIMIT 1 OFFSET ?1)",
        )
        .bind(AUDIT_MAX)
        .execute(&mut *tx)
        .await
        .map_err(unavailable)?;
        tx.commit().await.map_err(unavailable)
    }

    async fn audit_log(&self, page: Page<Uuid>) -> Result<Vec<AuditEntry>, StoreError> {
        let found = sqlx::query("SELECT * FROM audit WHERE id < ?1 ORDER BY id DESC LIMIT ?2")
            .bind(page.after.unwrap_or(Uuid::max()))
            .bind(page.limit)
            .fetch_all(&self.pool)
            .await
            .map_err(unavailable)?;
        found.iter().map(line).collect()
    }
}

/// Keys first, so that nothing new comes; then batches, which make jobs.
const OWNED: [&str; 3] = [
    "DELETE FROM api_keys WHERE tenant = ?1",
    "DELETE FROM batches WHERE tenant = ?1",
    "DELETE FROM files WHERE tenant = ?1",
];

/// See [`Operations::erase_tenant`](crate::Operations::erase_tenant).
pub(super) async fn erase(store: &SqliteStore, tenant: &Tenant) -> Result<Erased, StoreError> {
    let mut counts = [0; 3];
    for (statement, count) in OWNED.into_iter().zip(&mut counts) {
        let done = sqlx::query(statement).bind(&tenant.0).execute(&store.pool).await;
        *count = done.map_err(unavailable)?.rows_affected();
    }
    sqlx::query("DELETE FROM tenant_quotas WHERE tenant = ?1")
        .bind(&tenant.0)
        .execute(&store.pool)
        .await
        .map_err(unavailable)?;
    let [keys, batches, files] = counts;
    let mut erased = Erased { keys, batches, files, jobs: 0, done: false };
    while erased.jobs < ERASED_MAX {
        // Results and errors go with their jobs.
        let done = sqlx::query(
            "DELETE FROM jobs WHERE id IN (SELECT id FROM jobs WHERE tenant = ?1 LIMIT ?2)",
        )
        .bind(&tenant.0)
        .bind(CHUNK)
        .execute(&store.pool)
        .await;
        let jobs = done.map_err(unavailable)?.rows_affected();
        erased.jobs += jobs;
        if jobs == 0 {
            erased.done = true;
            break;
        }
    }
    Ok(erased)
}
