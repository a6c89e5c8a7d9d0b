//! The log of acts, and the erasure of a tenant.

use async_trait::async_trait;
use sqlx::{PgConnection, postgres::PgRow};
use uuid::Uuid;

use super::{PostgresStore, rows, unavailable};
use crate::{
    job::Tenant,
    store::{
        Page, StoreError,
        audit::{AUDIT_MAX, Audit, AuditEntry},
        operations::{ERASED_MAX, Erased},
    },
};

/// Jobs deleted by one statement.
const CHUNK: i64 = 1000;

fn line(row: &PgRow) -> Result<AuditEntry, StoreError> {
    Ok(AuditEntry {
        id: rows::get(row, "id")?,
        at: rows::time(row, "at")?,
        key: rows::get(row, "key_id")?,
        key_name: rows::get(row, "key_name")?,
        action: rows::get(row, "action")?,
        target: rows::get(row, "target")?,
        detail: serde_json::from_str(rows::get(row, "detail")?)
            .map_err(|error| rows::damaged("detail", error))?,
    })
}

#[async_trait]
impl Audit for PostgresStore {
    async fn record_audit(&self, line: &AuditEntry) -> Result<(), StoreError> {
        self.within(async {
            sqlx::query(
                "INSERT INTO audit (id, at, key_id, key_name, action, target, detail)
                 VALUES ($2, store_now_ms($1), $3, $4, $5, $6, $7::text::jsonb)",
            )
            .bind(self.given_now())
            .bind(line.id)
            .bind(line.key)
            .bind(&line.key_name)
            .bind(&line.action)
            .bind(&line.target)
            .bind(line.detail.to_string())
            .execute(&self.pool)
            .await
            .map_err(unavailable)?;
            sqlx::query(
                "DELETE FROM audit WHERE id <= (SELECT id FROM audit ORDER BY id DESC OFFSET $1
                                                LIMIT 1)",
            )
            .bind(i64::from(AUDIT_MAX))
            .execute(&self.pool)
            .await
            .map_err(unavailable)?;
            Ok(())
        })
        .await
    }

    async fn audit_log(&self, page: Page<Uuid>) -> Result<Vec<AuditEntry>, StoreError> {
        self.within(async {
            let found = sqlx::query(
                "SELECT id, at, key_id, key_name, action, target, detail::text FROM audit
                 WHERE id < $1 ORDER BY id DESC LIMIT $2",
            )
            .bind(page.after.unwrap_or(Uuid::max()))
            .bind(i64::from(page.limit))
            .fetch_all(&self.pool)
            .await
            .map_err(unavailable)?;
            found.iter().map(line).collect()
        })
        .await
    }
}

/// Keys first, so that nothing new comes; then batches, which make jobs.
const OWNED: [&str; 3] = [
    "DELETE FROM api_keys WHERE tenant = $1",
    "DELETE FROM batches WHERE tenant = $1",
    "DELETE FROM files WHERE tenant = $1",
];

/// See [`Operations::erase_tenant`](crate::Operations::erase_tenant).
pub(super) async fn erase(
    connection: &mut PgConnection,
    tenant: &Tenant,
) -> Result<Erased, StoreError> {
    let mut counts = [0; 3];
    for (statement, count) in OWNED.into_iter().zip(&mut counts) {
        let done = sqlx::query(statement).bind(&tenant.0).execute(&mut *connection).await;
        *count = done.map_err(unavailable)?.rows_affected();
    }
    for statement in
        ["DELETE FROM tenant_quotas WHERE tenant = $1", "DELETE FROM idempotency WHERE tenant = $1"]
    {
        sqlx::query(statement)
            .bind(&tenant.0)
            .execute(&mut *connection)
            .await
            .map_err(unavailable)?;
    }
    let [keys, batches, files] = counts;
    let mut erased = Erased { keys, batches, files, jobs: 0, done: false };
    while erased.jobs < ERASED_MAX {
        let found = sqlx::query("SELECT id FROM jobs WHERE tenant = $1 ORDER BY id LIMIT $2")
            .bind(&tenant.0)
            .bind(CHUNK)
            .fetch_all(&mut *connection)
            .await
            .map_err(unavailable)?;
        let ids = rows::ids(&found)?;
        if ids.is_empty() {
            erased.done = true;
            break;
        }
        erased.jobs += super::claims::delete(&mut *connection, &ids).await?;
    }
    Ok(erased)
}
