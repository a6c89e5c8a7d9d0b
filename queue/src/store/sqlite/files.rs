//! Files: a row, and chunks.

use async_trait::async_trait;
use sqlx::{Row as _, SqliteConnection, sqlite::SqliteRow};

use super::{SqliteStore, rows, unavailable};
use crate::{
    job::{Tenant, Timestamp},
    store::{
        StoreError,
        files::{FileDeletion, FileId, FilePurpose, Files, INCOMPLETE_MAX, Page, StoredFile},
    },
};

fn file(row: &SqliteRow) -> Result<StoredFile, StoreError> {
    let number = |column| row.try_get::<Option<i64>, _>(column).map_err(unavailable);
    Ok(StoredFile {
        id: FileId(row.try_get("id").map_err(unavailable)?),
        tenant: Tenant(rows::text(row, "tenant")?),
        purpose: rows::text(row, "purpose")?
            .parse()
            .map_err(|error| rows::damaged("purpose", error))?,
        filename: rows::text(row, "filename")?,
        size_bytes: number("size_bytes")?.unwrap_or_default().unsigned_abs(),
        created_at: Timestamp(rows::integer(row, "created_at")?),
        expires_at: number("expires_at")?.map(Timestamp),
    })
}

/// Completes a file.
pub(super) async fn complete(
    connection: &mut SqliteConnection,
    id: FileId,
    size_bytes: u64,
    expires_at: Option<Timestamp>,
) -> Result<(), StoreError> {
    sqlx::query(
        "UPDATE files SET size_bytes = ?2, expires_at = ?3 WHERE id = ?1 AND size_bytes IS NULL",
    )
    .bind(id.0)
    .bind(i64::try_from(size_bytes).unwrap_or(i64::MAX))
    .bind(expires_at.map(|at| at.0))
    .execute(connection)
    .await
    .map_err(unavailable)?;
    Ok(())
}

#[async_trait]
impl Files for SqliteStore {
    async fn create_file(&self, new: &StoredFile) -> Result<StoredFile, StoreError> {
        let row = sqlx::query(
            "INSERT INTO files (id, tenant, purpose, filename, created_at, expires_at)
             VALUES (?1, ?2, ?3, ?4, ?5, ?6) RETURNING *",
        )
        .bind(new.id.0)
        .bind(&new.tenant.0)
        .bind(new.purpose.as_str())
        .bind(&new.filename)
        .bind(self.now().0)
        .bind(new.expires_at.map(|at| at.0))
        .fetch_one(&self.pool)
        .await
        .map_err(unavailable)?;
        file(&row)
    }

    async fn put_chunk(&self, id: FileId, number: u32, bytes: &[u8]) -> Result<(), StoreError> {
        sqlx::query(
            "INSERT INTO file_chunks (file_id, number, content)
             SELECT id, ?2, ?3 FROM files WHERE id = ?1 AND size_bytes IS NULL
             ON CONFLICT (file_id, number) DO UPDATE SET content = excluded.content",
        )
        .bind(id.0)
        .bind(number)
        .bind(bytes)
        .execute(&self.pool)
        .await
        .map_err(unavailable)?;
        Ok(())
    }

    async fn complete_file(
        &self,
        id: FileId,
        size_bytes: u64,
        expires_at: Option<Timestamp>,
    ) -> Result<(), StoreError> {
        let mut tx = self.begin().await?;
        complete(&mut tx, id, size_bytes, expires_at).await?;
        tx.commit().await.map_err(unavailable)
    }

    async fn file(&self, tenant: &Tenant, id: FileId) -> Result<Option<StoredFile>, StoreError> {
        let row = sqlx::query(
            "SELECT * FROM files WHERE id = ?1 AND tenant = ?2 AND size_bytes IS NOT NULL
             AND (expires_at IS NULL OR expires_at > ?3)",
        )
        .bind(id.0)
        .bind(&tenant.0)
        .bind(self.now().0)
        .fetch_optional(&self.pool)
        .await
        .map_err(unavailable)?;
        row.as_ref().map(file).transpose()
    }

    async fn files(
        &self,
        tenant: &Tenant,
        purpose: Option<FilePurpose>,
        page: Page<FileId>,
    ) -> Result<Vec<StoredFile>, StoreError> {
        let query = match page.ascending {
            true => sqlx::query(
                "SELECT * FROM files WHERE tenant = ?1 AND size_bytes IS NOT NULL
                 AND (expires_at IS NULL OR expires_at > ?2) AND (?3 IS NULL OR purpose = ?3)
                 AND (?4 IS NULL OR id > ?4) ORDER BY id LIMIT ?5",
            ),
            false => sqlx::query(
                "SELECT * FROM files WHERE tenant = ?1 AND size_bytes IS NOT NULL
                 AND (expires_at IS NULL OR expires_at > ?2) AND (?3 IS NULL OR purpose = ?3)
                 AND (?4 IS NULL OR id < ?4) ORDER BY id DESC LIMIT ?5",
            ),
        };
        let found = query
            .bind(&tenant.0)
            .bind(self.now().0)
            .bind(purpose.map(FilePurpose::as_str))
            .bind(page.after.map(|id| id.0))
            .bind(page.limit)
            .fetch_all(&self.pool)
            .await
            .map_err(unavailable)?;
        found.iter().map(file).collect()
    }

    async fn chunk(&self, id: FileId, number: u32) -> Result<Option<Vec<u8>>, StoreError> {
        let row = sqlx::query("SELECT content FROM file_chunks WHERE file_id = ?1 AND number = ?2")
            .bind(id.0)
            .bind(number)
            .fetch_optional(&self.pool)
            .await
            .map_err(unavailable)?;
        row.map(|row| row.try_get("content").map_err(unavailable)).transpose()
    }

    async fn delete_file(&self, tenant: &Tenant, id: FileId) -> Result<FileDeletion, StoreError> {
        if self.file(tenant, id).await?.is_none() {
            return Ok(FileDeletion::NotFound);
        }
        let done = sqlx::query(
            "DELETE FROM files WHERE id = ?1 AND NOT EXISTS (
                 SELECT 1 FROM batches WHERE input_file_id = ?1 AND state IN
                     ('validating', 'in_progress', 'finalizing', 'cancelling'))",
        )
        .bind(id.0)
        .execute(&self.pool)
        .await
        .map_err(unavailable)?;
        Ok(if done.rows_affected() == 0 { FileDeletion::InUse } else { FileDeletion::Deleted })
    }

    async fn abandon_file(&self, id: FileId) -> Result<(), StoreError> {
        sqlx::query("DELETE FROM files WHERE id = ?1 AND size_bytes IS NULL")
            .bind(id.0)
            .execute(&self.pool)
            .await
            .map_err(unavailable)?;
        Ok(())
    }

    async fn sweep_files(&self) -> Result<u64, StoreError> {
        let now = self.now().0;
        let incomplete = i64::try_from(INCOMPLETE_MAX.as_millis()).unwrap_or(i64::MAX);
        let done = sqlx::query(
            "DELETE FROM files
             WHERE (size_bytes IS NULL AND created_at < ?1)
                OR (expires_at <= ?2 AND NOT EXISTS (
                        SELECT 1 FROM batches WHERE input_file_id = files.id AND state IN
                            ('validating', 'in_progress', 'finalizing', 'cancelling')))",
        )
        .bind(now.saturating_sub(incomplete))
        .bind(now)
        .execute(&self.pool)
        .await
        .map_err(unavailable)?;
        Ok(done.rows_affected())
    }
}
