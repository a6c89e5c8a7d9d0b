//! Files of batches: uploaded input and output to download.
//!
//! A file is a row and chunks of [`FILE_CHUNK_BYTES`], so that no process holds a whole file in memory.
//! One writer writes it once; its tenant sees it when it is complete. If the writer dies, the incomplete
//! file is deleted a day later.

use std::{fmt, str::FromStr, time::Duration};

use async_trait::async_trait;
use serde::{Deserialize, Serialize};
use tritmill_queue::{StoreError, Tenant, Timestamp, job::UnknownWord, store::Page};
use uuid::Uuid;

/// Size of every chunk except a file's last.
pub const FILE_CHUNK_BYTES: usize = 1 << 20;
/// Age at which an incomplete file is deleted.
pub const INCOMPLETE_MAX: Duration = Duration::from_secs(86_400);

/// Identifier of a file; ordered by time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct FileId(pub Uuid);

impl FileId {
    /// Generates a new id.
    pub fn generate() -> Self {
        Self(Uuid::now_v7())
    }
}

impl fmt::Display for FileId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "file-{}", self.0.as_simple())
    }
}

/// Parses a prefix followed by the 32 hexadecimal digits of a UUID; other forms of a UUID are refused.
pub(crate) fn prefixed(text: &str, prefix: &str) -> Option<Uuid> {
    let digits = text.strip_prefix(prefix).filter(|digits| digits.len() == 32)?;
    Uuid::try_parse(digits).ok()
}

impl FromStr for FileId {
    type Err = UnknownWord;

    fn from_str(text: &str) -> Result<Self, UnknownWord> {
        let found = prefixed(text, "file-").map(Self);
        found.ok_or_else(|| UnknownWord { what: "file", word: text.to_owned() })
    }
}

/// Purpose of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FilePurpose {
    /// Input lines of a batch.
    Batch,
    /// Answers or errors of a batch.
    BatchOutput,
}

impl FilePurpose {
    /// Returns the name in stores and on the wire.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Batch => "batch",
            Self::BatchOutput => "batch_output",
        }
    }
}

impl FromStr for FilePurpose {
    type Err = UnknownWord;

    fn from_str(word: &str) -> Result<Self, UnknownWord> {
        let found = [Self::Batch, Self::BatchOutput].into_iter().find(|p| p.as_str() == word);
        found.ok_or_else(|| UnknownWord { what: "purpose", word: word.to_owned() })
    }
}

/// A file, without its content.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredFile {
    /// Its identifier.
    pub id: FileId,
    /// Its tenant.
    pub tenant: Tenant,
    /// Its purpose.
    pub purpose: FilePurpose,
    /// Name given by its creator.
    pub filename: String,
    /// Size in bytes.
    pub size_bytes: u64,
    /// Creation time.
    pub created_at: Timestamp,
    /// Time at which it expires.
    pub expires_at: Option<Timestamp>,
}

/// The idempotency key of an upload, and what was uploaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UploadKey<'a> {
    /// The key: a tenant has one file per key.
    pub key: &'a str,
    /// SHA-256 of the upload: another one with the same key is refused.
    pub request_hash: &'a [u8; 32],
}

/// Result of [`complete_file_once`](Files::complete_file_once).
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Completion {
    /// The file was completed.
    New,
    /// The file that the tenant uploaded earlier under the same key. Nothing was changed.
    Known(Box<StoredFile>),
    /// The tenant used the key for another upload. Nothing was changed.
    Conflict,
}

/// The content of a chunk, for the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChunkContent<'a> {
    /// Its bytes.
    Bytes(&'a [u8]),
    /// The name of an object that has them.
    Object(&'a str),
}

/// The content of a chunk, from the store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StoredChunk {
    /// Its bytes.
    Bytes(Vec<u8>),
    /// The name of an object that has them.
    Object(String),
}

/// Result of deleting a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileDeletion {
    /// The file was deleted.
    Deleted,
    /// The tenant has no such file.
    NotFound,
    /// An unfinished batch reads the file.
    InUse,
}

/// Files in a store.
#[async_trait]
pub trait Files: Send + Sync {
    /// Creates an incomplete file. The size is ignored and `created_at` is set by the store. Returns the
    /// file as stored.
    async fn create_file(&self, file: &StoredFile) -> Result<StoredFile, StoreError>;

    /// Writes a chunk (numbered from 0) of an incomplete file. May be repeated after an error.
    async fn put_chunk(
        &self,
        id: FileId,
        number: u32,
        content: ChunkContent<'_>,
    ) -> Result<(), StoreError>;

    /// Completes a file: from now on it is visible and immutable. Also sets `expires_at`.
    async fn complete_file(
        &self,
        id: FileId,
        size_bytes: u64,
        expires_at: Option<Timestamp>,
    ) -> Result<(), StoreError>;

    /// Completes a file as [`complete_file`](Self::complete_file) does, with its size and expiry, unless the tenant has
    /// completed one under the same key. Of concurrent calls with one key, one completes its file. A key is free again
    /// when its file is deleted or has expired.
    async fn complete_file_once(
        &self,
        file: &StoredFile,
        key: UploadKey<'_>,
    ) -> Result<Completion, StoreError>;

    /// Returns a complete file of a tenant.
    async fn file(&self, tenant: &Tenant, id: FileId) -> Result<Option<StoredFile>, StoreError>;

    /// Returns complete files of a tenant.
    async fn files(
        &self,
        tenant: &Tenant,
        purpose: Option<FilePurpose>,
        page: Page<FileId>,
    ) -> Result<Vec<StoredFile>, StoreError>;

    /// Returns a chunk; `None` after the last.
    async fn chunk(&self, id: FileId, number: u32) -> Result<Option<StoredChunk>, StoreError>;

    /// Returns the names of the objects with chunks of a file; `None` if the file is gone.
    async fn chunk_objects(&self, id: FileId) -> Result<Option<Vec<String>>, StoreError>;

    /// Deletes a complete file of a tenant.
    async fn delete_file(&self, tenant: &Tenant, id: FileId) -> Result<FileDeletion, StoreError>;

    /// Deletes a file if it is incomplete.
    async fn abandon_file(&self, id: FileId) -> Result<(), StoreError>;

    /// Deletes expired files, and incomplete files older than [`INCOMPLETE_MAX`]; returns how many.
    async fn sweep_files(&self) -> Result<u64, StoreError>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_id_has_one_form() {
        let id = FileId::generate();
        assert_eq!(id.to_string().parse::<FileId>().expect("its own text"), id);
        let hyphens = format!("file-{}", id.0.as_hyphenated());
        for wrong in ["", "file-", "file-../../x", &id.0.to_string(), &hyphens, "batch_0"] {
            assert!(wrong.parse::<FileId>().is_err(), "{wrong}");
        }
    }
}
