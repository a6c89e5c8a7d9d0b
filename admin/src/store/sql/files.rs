//! Files: a row and its chunks.

use async_trait::async_trait;

use tritmill_queue::{StoreError, Tenant, Timestamp, store::Page};
use uuid::Uuid;

use super::{Connection, Query, Row, SqlStore, query, rows, storable};
use crate::store::files::{
    ChunkContent, Completion, FILE_CHUNK_BYTES, FileDeletion, FileId, FilePurpose, Files,
    INCOMPLETE_MAX, StoredChunk, StoredFile, UploadKey,
};

/// A complete file that has not expired.
macro_rules! visible {
    () => {
        concat!("size_bytes IS NOT NULL AND (expires_at IS NULL OR expires_at > ", now!(), ")")
    };
}

/// No unfinished batch reads the file, and no batch waits for one that has read it.
macro_rules! unused {
    () => {
        concat!(
            "NOT EXISTS (SELECT 1 FROM batches WHERE input_file_id = files.id AND ",
            unfinished!(),
            ") AND NOT EXISTS (SELECT 1 FROM batches AS earlier JOIN batches AS later
                 ON later.after_id = earlier.id WHERE earlier.input_file_id = files.id)"
        )
    };
}

/// The file has expired, and nothing needs it.
macro_rules! expired {
    () => {
        concat!("size_bytes IS NOT NULL AND expires_at <= ", now!(), " AND ", unused!())
    };
}

/// Chunks of expired files that one statement deletes: a tenth of a second, for which other calls of the embedded store wait.
const SWEPT_AT_ONCE: i64 = 16;
/// Files up to this size are deleted whole.
const SWEPT_WHOLE_BYTES: i64 = SWEPT_AT_ONCE * FILE_CHUNK_BYTES as i64;

/// A page of files, in one direction.
macro_rules! page_sql {
    ($beyond:literal, $order:literal) => {
        concat!(
            "SELECT * FROM files WHERE tenant = $2 AND ($3 IS NULL OR purpose = $3)
             AND ($4 IS NULL OR id ",
            $beyond,
            " $4) AND ",
            visible!(),
            " ORDER BY id ",
            $order,
            " LIMIT $5"
        )
    };
}

fn file(row: &Row) -> Result<StoredFile, StoreError> {
    Ok(StoredFile {
        id: FileId(rows::get(row, "id")?),
        tenant: Tenant(rows::get(row, "tenant")?),
        purpose: rows::word(row, "purpose")?,
        filename: rows::get(row, "filename")?,
        size_bytes: rows::tokens(row, "size_bytes")?.unwrap_or_default(),
        created_at: rows::time(row, "created_at")?,
        expires_at: rows::time_or_none(row, "expires_at")?,
    })
}

/// Returns the statement that creates an incomplete file.
pub(super) fn create<'q>(store: &SqlStore, new: &'q StoredFile) -> Query<'q> {
    query(concat!(
        "INSERT INTO files (id, tenant, purpose, filename, created_at, expires_at)
         VALUES ($2, $3, $4, $5, ",
        now!(),
        ", $6) RETURNING *"
    ))
    .bind(store.clock_parameter())
    .bind(new.id.0)
    .bind(&new.tenant.0)
    .bind(new.purpose.as_str())
    .bind(&new.filename)
    .bind(new.expires_at.map(|at| at.0))
}

/// Appends lines to a complete file. Returns false, and appends nothing, if it would be too large.
pub(super) async fn append_lines<'a>(
    connection: &mut Connection,
    id: FileId,
    lines: impl Iterator<Item = &'a [u8]>,
    bytes_max: u64,
) -> Result<bool, StoreError> {
    const CHUNK_BYTES: u64 = FILE_CHUNK_BYTES as u64;
    let found = query("SELECT size_bytes FROM files WHERE id = $1 AND size_bytes IS NOT NULL");
    let Some(row) = found.bind(id.0).fetch_optional(&mut *connection).await? else {
        let problem = "it no longer exists".to_owned();
        return Err(StoreError::InvalidValue { what: "input file", problem });
    };
    let size = rows::tokens(&row, "size_bytes")?.unwrap_or_default();
    // The last chunk that there is, which may be whole.
    let first = size.saturating_sub(1) / CHUNK_BYTES;
    let last = query("SELECT content FROM file_chunks WHERE file_id = $1 AND number = $2");
    let last = last.bind(id.0).bind(rows::stored(first)).fetch_optional(&mut *connection).await?;
    let mut bytes: Vec<u8> = match &last {
        Some(row) => rows::get(row, "content")?,
        None => Vec::new(),
    };
    if bytes.last().is_some_and(|last| *last != b'\n') {
        bytes.push(b'\n');
    }
    for line in lines {
        bytes.extend_from_slice(line);
        bytes.push(b'\n');
    }
    let size = first * CHUNK_BYTES + bytes.len() as u64;
    if size > bytes_max {
        return Ok(false);
    }
    let put = "INSERT INTO file_chunks (file_id, number, content) VALUES ($1, $2, $3)
        ON CONFLICT (file_id, number) DO UPDATE SET content = excluded.content";
    for (number, chunk) in (first..).zip(bytes.chunks(FILE_CHUNK_BYTES)) {
        let put = query(put).bind(id.0).bind(rows::stored(number)).bind(chunk);
        put.execute(&mut *connection).await?;
    }
    let grow = query("UPDATE files SET size_bytes = $2 WHERE id = $1");
    grow.bind(id.0).bind(rows::stored(size)).execute(connection).await?;
    Ok(true)
}

/// Returns the statement that completes a file.
pub(super) fn complete<'q>(
    id: FileId,
    size_bytes: u64,
    expires_at: Option<Timestamp>,
) -> Query<'q> {
    query("UPDATE files SET size_bytes = $2, expires_at = $3 WHERE id = $1 AND size_bytes IS NULL")
        .bind(id.0)
        .bind(rows::stored(size_bytes))
        .bind(expires_at.map(|at| at.0))
}

/// Writes a chunk of an incomplete file; returns false if there is no such file.
pub(super) async fn put(
    connection: &mut Connection,
    id: FileId,
    number: u32,
    content: ChunkContent<'_>,
) -> Result<bool, StoreError> {
    Ok(put_chunk(id, number, content).execute(connection).await?.rows_affected() == 1)
}

fn put_chunk<'q>(id: FileId, number: u32, content: ChunkContent<'q>) -> Query<'q> {
    let (bytes, object) = match content {
        ChunkContent::Bytes(bytes) => (bytes, None),
        ChunkContent::Object(name) => (&[][..], Some(name)),
    };
    query(PUT_CHUNK).bind(id.0).bind(i64::from(number)).bind(bytes).bind(object)
}

const PUT_CHUNK: &str = "INSERT INTO file_chunks (file_id, number, content, object)
    SELECT id, $2, $3, $4 FROM files WHERE id = $1 AND size_bytes IS NULL
    ON CONFLICT (file_id, number) DO UPDATE SET content = excluded.content, object = excluded.object";

/// Takes a key for a file, unless a file that is there has it.
const TAKE_KEY: &str = concat!(
    "INSERT INTO file_keys (tenant, key, request_hash, file_id) VALUES ($2, $3, $4, $5)
     ON CONFLICT (tenant, key)
     DO UPDATE SET request_hash = excluded.request_hash, file_id = excluded.file_id
     WHERE EXISTS (SELECT 1 FROM files WHERE id = file_keys.file_id AND expires_at <= ",
    now!(),
    ")"
);

/// Finds the file that has a key.
const WITH_KEY: &str = "SELECT files.*, file_keys.request_hash FROM file_keys
    JOIN files ON files.id = file_keys.file_id WHERE file_keys.tenant = $1 AND file_keys.key = $2";

#[async_trait]
impl Files for SqlStore {
    async fn create_file(&self, new: &StoredFile) -> Result<StoredFile, StoreError> {
        storable("tenant", &new.tenant.0)?;
        storable("filename", &new.filename)?;
        file(&self.fetch_one(create(self, new)).await?)
    }

    async fn put_chunk(
        &self,
        id: FileId,
        number: u32,
        content: ChunkContent<'_>,
    ) -> Result<(), StoreError> {
        self.execute(put_chunk(id, number, content)).await.map(drop)
    }

    async fn complete_file(
        &self,
        id: FileId,
        size_bytes: u64,
        expires_at: Option<Timestamp>,
    ) -> Result<(), StoreError> {
        self.execute(complete(id, size_bytes, expires_at)).await.map(drop)
    }

    async fn complete_file_once(
        &self,
        new: &StoredFile,
        UploadKey { key, request_hash }: UploadKey<'_>,
    ) -> Result<Completion, StoreError> {
        storable("Idempotency-Key", key)?;
        self.within(async {
            let mut tx = self.begin().await?;
            // If two calls are concurrent, the second waits and then sees the key of the first.
            let taken = query(TAKE_KEY)
                .bind(self.clock_parameter())
                .bind(&new.tenant.0)
                .bind(key)
                .bind(request_hash.as_slice())
                .bind(new.id.0)
                .execute(&mut *tx)
                .await?;
            if taken.rows_affected() == 1 {
                complete(new.id, new.size_bytes, new.expires_at).execute(&mut *tx).await?;
                tx.commit().await?;
                return Ok(Completion::New);
            }
            let known = query(WITH_KEY).bind(&new.tenant.0).bind(key).fetch_one(&mut *tx).await?;
            let is_same = rows::get::<Vec<u8>>(&known, "request_hash")? == request_hash;
            Ok(match is_same {
                true => Completion::Known(Box::new(file(&known)?)),
                false => Completion::Conflict,
            })
        })
        .await
    }

    async fn file(&self, tenant: &Tenant, id: FileId) -> Result<Option<StoredFile>, StoreError> {
        let found = concat!("SELECT * FROM files WHERE id = $2 AND tenant = $3 AND ", visible!());
        let found = query(found).bind(self.clock_parameter()).bind(id.0).bind(&tenant.0);
        self.fetch_optional(found).await?.as_ref().map(file).transpose()
    }

    async fn files(
        &self,
        tenant: &Tenant,
        purpose: Option<FilePurpose>,
        page: Page<FileId>,
    ) -> Result<Vec<StoredFile>, StoreError> {
        let found = if page.ascending { page_sql!(">", "ASC") } else { page_sql!("<", "DESC") };
        let found = query(found)
            .bind(self.clock_parameter())
            .bind(&tenant.0)
            .bind(purpose.map(FilePurpose::as_str))
            .bind(page.after.map(|id| id.0))
            .bind(i64::from(page.limit));
        self.fetch_all(found).await?.iter().map(file).collect()
    }

    async fn chunk(&self, id: FileId, number: u32) -> Result<Option<StoredChunk>, StoreError> {
        let found =
            query("SELECT content, object FROM file_chunks WHERE file_id = $1 AND number = $2");
        let row = self.fetch_optional(found.bind(id.0).bind(i64::from(number))).await?;
        row.map(|row| match rows::get::<Option<String>>(&row, "object")? {
            Some(name) => Ok(StoredChunk::Object(name)),
            None => Ok(StoredChunk::Bytes(rows::get(&row, "content")?)),
        })
        .transpose()
    }

    async fn chunk_objects(&self, id: FileId) -> Result<Option<Vec<String>>, StoreError> {
        let found = query(
            "SELECT object FROM files LEFT JOIN file_chunks ON file_id = id AND object IS NOT NULL
             WHERE id = $1",
        );
        let found = self.fetch_all(found.bind(id.0)).await?;
        if found.is_empty() {
            return Ok(None);
        }
        let names = found.iter().filter_map(|row| rows::get(row, "object").transpose());
        names.collect::<Result<_, _>>().map(Some)
    }

    async fn delete_file(&self, tenant: &Tenant, id: FileId) -> Result<FileDeletion, StoreError> {
        let delete = concat!(
            "DELETE FROM files WHERE id = $2 AND tenant = $3 AND ",
            visible!(),
            " AND ",
            unused!()
        );
        let delete = query(delete).bind(self.clock_parameter()).bind(id.0).bind(&tenant.0);
        if self.execute(delete).await? > 0 {
            return Ok(FileDeletion::Deleted);
        }
        let is_known = self.file(tenant, id).await?.is_some();
        Ok(if is_known { FileDeletion::InUse } else { FileDeletion::NotFound })
    }

    async fn abandon_file(&self, id: FileId) -> Result<(), StoreError> {
        let delete = query("DELETE FROM files WHERE id = $1 AND size_bytes IS NULL");
        self.execute(delete.bind(id.0)).await.map(drop)
    }

    async fn sweep_files(&self) -> Result<u64, StoreError> {
        let large = concat!("SELECT id FROM files WHERE size_bytes > $2 AND ", expired!());
        let large = query(large).bind(self.clock_parameter()).bind(SWEPT_WHOLE_BYTES);
        for row in &self.fetch_all(large).await? {
            let id: Uuid = rows::get(row, "id")?;
            let part = "DELETE FROM file_chunks WHERE file_id = $1 AND number IN
                 (SELECT number FROM file_chunks WHERE file_id = $1 LIMIT $2)";
            while self.execute(query(part).bind(id).bind(SWEPT_AT_ONCE)).await? > 0 {}
        }
        let sweep = concat!(
            "DELETE FROM files WHERE (size_bytes IS NULL AND created_at < ",
            now!(),
            " - $2) OR (",
            expired!(),
            ")"
        );
        let incomplete = rows::milliseconds(INCOMPLETE_MAX);
        self.execute(query(sweep).bind(self.clock_parameter()).bind(incomplete)).await
    }
}
