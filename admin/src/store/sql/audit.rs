//! The audit log.

use async_trait::async_trait;
use uuid::Uuid;

use tritmill_queue::{StoreError, store::Page};

use super::{Row, SqlStore, query, rows};
use crate::store::audit::{AUDIT_MAX, Audit, AuditEntry};

fn entry(row: &Row) -> Result<AuditEntry, StoreError> {
    Ok(AuditEntry {
        id: rows::get(row, "id")?,
        at: rows::time(row, "at")?,
        key: rows::get(row, "key_id")?,
        key_name: rows::get(row, "key_name")?,
        address: rows::get(row, "address")?,
        action: rows::get(row, "action")?,
        target: rows::get(row, "target")?,
        detail: rows::document(row, "detail")?,
    })
}

#[async_trait]
impl Audit for SqlStore {
    async fn record_audit(&self, entry: &AuditEntry) -> Result<(), StoreError> {
        let insert = query(concat!(
            "INSERT INTO audit (id, at, key_id, key_name, action, target, detail, address)
             VALUES ($2, ",
            now!(),
            ", $3, $4, $5, $6, ",
            as_json!("$7"),
            ", $8)"
        ))
        .bind(self.clock_parameter())
        .bind(entry.id)
        .bind(entry.key)
        .bind(&entry.key_name)
        .bind(&entry.action)
        .bind(&entry.target)
        .bind(entry.detail.to_string())
        .bind(&entry.address);
        self.execute(insert).await?;
        let sweep = query(
            "DELETE FROM audit
             WHERE id <= (SELECT id FROM audit ORDER BY id DESC LIMIT 1 OFFSET $1)",
        );
        self.execute(sweep.bind(i64::from(AUDIT_MAX))).await.map(drop)
    }

    async fn audit_log(&self, page: Page<Uuid>) -> Result<Vec<AuditEntry>, StoreError> {
        let found = query(
            "SELECT id, at, key_id, key_name, address, action, target, CAST(detail AS text) AS detail
             FROM audit WHERE id < $1 ORDER BY id DESC LIMIT $2",
        );
        let found = found.bind(page.after.unwrap_or(Uuid::max())).bind(i64::from(page.limit));
        self.fetch_all(found).await?.iter().map(entry).collect()
    }
}
