//! Files of batches: what was uploaded, and what is there to fetch.
//!
//! A file is a row and chunks of [`FILE_CHUNK_BYTES`], so that neither side ever holds a whole one. It
//! is written once, by one writer, and seen by its tenant when it is complete. A writer that died
//! leaves an incomplete one, which is swept a day later.

use std::{fmt, str::FromStr, time::Duration};

use async_trait::async_trait;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::StoreError;
use crate::job::{Tenant, Timestamp, UnknownWord};

/// Bytes of every chunk but a file's last.
pub const FILE_CHUNK_BYTES: usize = 1 << 20;
/// How long an incomplete file is left alone.
pub const INCOMPLETE_MAX: Duration = Duration::from_secs(86_400);

/// Names a file; ordered by time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct FileId(pub Uuid);

impl FileId {
    /// A fresh one.
    pub fn generate() -> Self {
        Self(Uuid::now_v7())
    }
}

impl fmt::Display for FileId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "file-{}", self.0.as_simple())
    }
}

/// Reads a prefix and the 32 hexadecimal digits after it, and no other spelling of a UUID.
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

/// What a file is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FilePurpose {
    /// Lines to be answered.
    Batch,
    /// Answers, or errors.
    BatchOutput,
}

impl FilePurpose {
    /// The word used in stores and on the wire.
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
    /// Its name here.
    pub id: FileId,
    /// Whose it is.
    pub tenant: Tenant,
    /// What it is for.
    pub purpose: FilePurpose,
    /// What its maker calls it.
    pub filename: String,
    /// Its length.
    pub size_bytes: u64,
    /// When it was begun.
    pub created_at: Timestamp,
    /// When it is gone.
    pub expires_at: Option<Timestamp>,
}

/// A page of a list, the latest first unless `ascending`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Page<Id> {
    /// The item before the first, in the list's order.
    pub after: Option<Id>,
    /// Items at most.
    pub limit: u32,
    /// The oldest first.
    pub ascending: bool,
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
    /// Begins a file; its length is not known yet, its `created_at` is set here. Returns it as it is
    /// kept.
    ///
    /// # Errors
    /// [`StoreError`].
    async fn create_file(&self, file: &StoredFile) -> Result<StoredFile, StoreError>;

    /// Adds the chunk with this number, from 0 on, to a file that is not complete.
    ///
    /// # Errors
    /// [`StoreError`]; the same call may be repeated.
    async fn put_chunk(&self, id: FileId, number: u32, bytes: &[u8]) -> Result<(), StoreError>;

    /// Completes a file: from now on it is seen, and changed no more. `expires_at` is what it says
    /// then.
    ///
    /// # Errors
    /// [`StoreError`].
    async fn complete_file(
        &self,
        id: FileId,
        size_bytes: u64,
        expires_at: Option<Timestamp>,
    ) -> Result<(), StoreError>;

    /// A complete file of a tenant.
    ///
    /// # Errors
    /// [`StoreError`].
    async fn file(&self, tenant: &Tenant, id: FileId) -> Result<Option<StoredFile>, StoreError>;

    /// Complete files of a tenant.
    ///
    /// # Errors
    /// [`StoreError`].
    async fn files(
        &self,
        tenant: &Tenant,
        purpose: Option<FilePurpose>,
        page: Page<FileId>,
    ) -> Result<Vec<StoredFile>, StoreError>;

    /// A chunk; none after the last.
    ///
    /// # Errors
    /// [`StoreError`].
    async fn chunk(&self, id: FileId, number: u32) -> Result<Option<Vec<u8>>, StoreError>;

    /// Deletes a complete file of a tenant.
    ///
    /// # Errors
    /// [`StoreError`].
    async fn delete_file(&self, tenant: &Tenant, id: FileId) -> Result<FileDeletion, StoreError>;

    /// Deletes a file that its writer gave up, if it is not complete.
    ///
    /// # Errors
    /// [`StoreError`].
    async fn abandon_file(&self, id: FileId) -> Result<(), StoreError>;

    /// Deletes what has expired, and what was begun more than [`INCOMPLETE_MAX`] ago and never
    /// completed; returns how many files went.
    ///
    /// # Errors
    /// [`StoreError`].
    async fn sweep_files(&self) -> Result<u64, StoreError>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_id_has_one_spelling() {
        let id = FileId::generate();
        assert_eq!(id.to_string().parse::<FileId>().expect("its own text"), id);
        let hyphens = format!("file-{}", id.0.as_hyphenated());
        for wrong in ["", "file-", "file-../../x", &id.0.to_string(), &hyphens, "batch_0"] {
            assert!(wrong.parse::<FileId>().is_err(), "{wrong}");
        }
    }
}
