//! Files: a row, and chunks.

use async_trait::async_trait;
use sqlx::{PgConnection, postgres::PgRow};

use super::{PostgresStore, milliseconds, rows, unavailable};
use crate::{
    job::{Tenant, Timestamp},
    store::{
        StoreError,
        files::{FileDeletion, FileId, FilePurpose, Files, INCOMPLETE_MAX, Page, StoredFile},
    },
};

fn file(row: &PgRow) -> Result<StoredFile, StoreError> {
    let expires_at: Option<i64> = rows::get(row, "expires_at")?;
    let size_bytes: Option<i64> = rows::get(row, "size_bytes")?;
    Ok(StoredFile {
        id: FileId(rows::get(row, "id")?),
        tenant: Tenant(rows::get(row, "tenant")?),
        purpose: rows::get::<&str>(row, "purpose")?
            .parse()
            .map_err(|error| rows::damaged("purpose", error))?,
        filename: rows::get(row, "filename")?,
        size_bytes: size_bytes.unwrap_or_default().unsigned_abs(),
        created_at: rows::time(row, "created_at")?,
        expires_at: expires_at.map(Timestamp),
    })
}

/// A number of bytes as the schema has it.
fn size(bytes: u64) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}

/// Completes a file.
pub(super) async fn complete(
    connection: &mut PgConnection,
    id: FileId,
    size_bytes: u64,
    expires_at: Option<Timestamp>,
) -> Result<(), StoreError> {
    sqlx::query(
        "UPDATE files SET size_bytes = $2, expires_at = $3 WHERE id = $1 AND size_bytes IS NULL",
    )
    .bind(id.0)
    .bind(size(size_bytes))
    .bind(expires_at.map(|at| at.0))
    .execute(connection)
    .await
    .map_err(unavailable)?;
    Ok(())
}

#[async_trait]
impl Files for PostgresStore {
    async fn create_file(&self, new: &StoredFile) -> Result<StoredFile, StoreError> {
        rows::storable("tenant", &new.tenant.0)?;
        rows::storable("filename", &new.filename)?;
        self.within(async {
            let row = sqlx::query(
                "INSERT INTO files (id, tenant, purpose, filename, created_at, expires_at)
                 VALUES ($2, $3, $4, $5, store_now_ms($1), $6) RETURNING *",
            )
            .bind(self.given_now())
            .bind(new.id.0)
            .bind(&new.tenant.0)
            .bind(new.purpose.as_str())
            .bind(&new.filename)
            .bind(new.expires_at.map(|at| at.0))
            .fetch_one(&self.pool)
            .await
            .map_err(unavailable)?;
            file(&row)
        })
        .await
    }

    async fn put_chunk(&self, id: FileId, number: u32, bytes: &[u8]) -> Result<(), StoreError> {
        self.within(async {
            sqlx::query(
                "INSERT INTO file_chunks (file_id, number, content)
                 SELECT id, $2, $3 FROM files WHERE id = $1 AND size_bytes IS NULL
                 ON CONFLICT (file_id, number) DO UPDATE SET content = excluded.content",
            )
            .bind(id.0)
            .bind(i64::from(number))
            .bind(bytes)
            .execute(&self.pool)
            .await
            .map_err(unavailable)?;
            Ok(())
        })
        .await
    }

    async fn complete_file(
        &self,
        id: FileId,
        size_bytes: u64,
        expires_at: Option<Timestamp>,
    ) -> Result<(), StoreError> {
        self.within(async {
            let mut connection = self.pool.acquire().await.map_err(unavailable)?;
            complete(&mut connection, id, size_bytes, expires_at).await
        })
        .await
    }

    async fn file(&self, tenant: &Tenant, id: FileId) -> Result<Option<StoredFile>, StoreError> {
        self.within(async {
            let row = sqlx::query(
                "SELECT * FROM files WHERE id = $2 AND tenant = $3 AND size_bytes IS NOT NULL
                 AND (expires_at IS NULL OR expires_at > store_now_ms($1))",
            )
            .bind(self.given_now())
            .bind(id.0)
            .bind(&tenant.0)
            .fetch_optional(&self.pool)
            .await
            .map_err(unavailable)?;
            row.as_ref().map(file).transpose()
        })
        .await
    }

    async fn files(
        &self,
        tenant: &Tenant,
        purpose: Option<FilePurpose>,
        page: Page<FileId>,
    ) -> Result<Vec<StoredFile>, StoreError> {
        let query = match page.ascending {
            true => sqlx::query(
                "SELECT * FROM files WHERE tenant = $2 AND size_bytes IS NOT NULL
                 AND (expires_at IS NULL OR expires_at > store_now_ms($1))
                 AND ($3::text IS NULL OR purpose = $3) AND ($4::uuid IS NULL OR id > $4)
                 ORDER BY id LIMIT $5",
            ),
            false => sqlx::query(
                "SELECT * FROM files WHERE tenant = $2 AND size_bytes IS NOT NULL
                 AND (expires_at IS NULL OR expires_at > store_now_ms($1))
                 AND ($3::text IS NULL OR purpose = $3) AND ($4::uuid IS NULL OR id < $4)
                 ORDER BY id DESC LIMIT $5",
            ),
        };
        self.within(async {
            let found = query
                .bind(self.given_now())
                .bind(&tenant.0)
                .bind(purpose.map(FilePurpose::as_str))
                .bind(page.after.map(|id| id.0))
                .bind(i64::from(page.limit))
                .fetch_all(&self.pool)
                .await
                .map_err(unavailable)?;
            found.iter().map(file).collect()
        })
        .await
    }

    async fn chunk(&self, id: FileId, number: u32) -> Result<Option<Vec<u8>>, StoreError> {
        self.within(async {
            let row =
                sqlx::query("SELECT content FROM file_chunks WHERE file_id = $1 AND number = $2")
                    .bind(id.0)
                    .bind(i64::from(number))
                    .fetch_optional(&self.pool)
                    .await
                    .map_err(unavailable)?;
            row.map(|row| rows::get(&row, "content")).transpose()
        })
        .await
    }

    async fn delete_file(&self, tenant: &Tenant, id: FileId) -> Result<FileDeletion, StoreError> {
        self.within(async {
            let row = sqlx::query(
                "WITH target AS (
                     SELECT id FROM files
                     WHERE id = $2 AND tenant = $3 AND size_bytes IS NOT NULL
                       AND (expires_at IS NULL OR expires_at > store_now_ms($1))
                 ), gone AS (
                     DELETE FROM files WHERE id IN (SELECT id FROM target) AND NOT EXISTS (
                         SELECT FROM batches WHERE input_file_id = $2 AND state IN
                             ('validating', 'in_progress', 'finalizing', 'cancelling'))
                     RETURNING id
                 )
                 SELECT (SELECT count(*) FROM target) AS known, (SELECT count(*) FROM gone) AS gone",
            )
            .bind(self.given_now())
            .bind(id.0)
            .bind(&tenant.0)
            .fetch_one(&self.pool)
            .await
            .map_err(unavailable)?;
            Ok(match (rows::count(&row, "known")?, rows::count(&row, "gone")?) {
                (0, _) => FileDeletion::NotFound,
                (_, 0) => FileDeletion::InUse,
                _ => FileDeletion::Deleted,
            })
        })
        .await
    }

    async fn abandon_file(&self, id: FileId) -> Result<(), StoreError> {
        self.within(async {
            sqlx::query("DELETE FROM files WHERE id = $1 AND size_bytes IS NULL")
                .bind(id.0)
                .execute(&self.pool)
                .await
                .map_err(unavailable)?;
            Ok(())
        })
        .await
    }

    async fn sweep_files(&self) -> Result<u64, StoreError> {
        self.within(async {
            let done = sqlx::query(
                "DELETE FROM files
                 WHERE (size_bytes IS NULL AND created_at < store_now_ms($1) - $2)
                    OR (expires_at <= store_now_ms($1) AND NOT EXISTS (
                            SELECT FROM batches WHERE input_file_id = files.id AND state IN
                                ('validating', 'in_progress', 'finalizing', 'cancelling')))",
            )
            .bind(self.given_now())
            .bind(milliseconds(INCOMPLETE_MAX))
            .execute(&self.pool)
            .await
            .map_err(unavailable)?;
            Ok(done.rows_affected())
        })
        .await
    }
}
