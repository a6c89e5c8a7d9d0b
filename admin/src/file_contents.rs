//! [`FileContents`]: the content of files, in the database or in an object store.
//!
//! A file is a row and its chunks in either case. With an object store, a chunk is an object below the configured
//! address, and its row has the object's name instead of the bytes. So what makes a file visible, immutable or deleted
//! stays one transaction of the database. An object has a name of its own, which no other write uses, and the name has
//! the hash of its content, which every read checks:
//!
//! ```text
//! file-ID/NUMBER-SHA256-RANDOM
//! ```
//!
//! A row of a file is there before its first object. So an object of a file without a row was deleted with a batch or a
//! tenant, or has expired: the sweep deletes it. A crash between an object and the row of its chunk, and a chunk that is
//! written again, leave an object of a file that is there: the sweep deletes it when it is a day old, because until then
//! the row of the chunk may be on its way.

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, SystemTime},
};

use bytes::Bytes;
use futures_util::TryStreamExt as _;
use sha2::{Digest as _, Sha256};
use tritmill_data::{DataError, objects::Objects};
use tritmill_queue::{StoreError, Tenant};
use uuid::Uuid;

use crate::store::{
    FileId, FrontStore,
    files::{ChunkContent, FileDeletion, INCOMPLETE_MAX, StoredChunk},
};

/// Objects that the sweep looks up at a time.
const SWEEP_PAGE: usize = 1000;

/// The content of files.
#[derive(Clone)]
pub struct FileContents {
    store: Arc<dyn FrontStore>,
    /// `None`: the database has it.
    objects: Option<Objects>,
}

/// A failure of the object store is one of the store.
fn unavailable(error: DataError) -> StoreError {
    StoreError::Unavailable(Box::new(error))
}

/// Returns the hexadecimal digits of the hash of some content.
pub(crate) fn hash(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Returns the file and the hash of the name of a chunk's object; `None` for another object.
fn parsed(name: &str) -> Option<(FileId, &str)> {
    let (file, chunk) = name.split_once('/')?;
    let mut parts = chunk.split('-');
    let (_number, hash, _random) =
        (parts.next()?.parse::<u32>().ok()?, parts.next()?, parts.next()?);
    let is_whole = parts.next().is_none() && hash.len() == 64;
    Some((file.parse().ok()?, hash)).filter(|_| is_whole)
}

impl FileContents {
    /// The content of the files of `store`; of new ones in `objects`, if they are given.
    pub fn new(store: Arc<dyn FrontStore>, objects: Option<Objects>) -> Self {
        Self { store, objects }
    }

    /// The store with the rows of the files.
    pub fn store(&self) -> &Arc<dyn FrontStore> {
        &self.store
    }

    /// Writes the object of a chunk and returns its name; `None` if the database takes the bytes.
    pub async fn place(
        &self,
        file: FileId,
        number: u32,
        bytes: &[u8],
    ) -> Result<Option<String>, StoreError> {
        let Some(objects) = &self.objects else { return Ok(None) };
        // The second half of the id is random.
        let random = Uuid::now_v7().as_simple().to_string();
        let name = format!("{file}/{number:06}-{}-{}", hash(bytes), &random[16..]);
        let key = objects.below(&name).map_err(unavailable)?;
        objects.put(&key, Bytes::copy_from_slice(bytes)).await.map_err(unavailable)?;
        Ok(Some(name))
    }

    /// Writes a chunk of an incomplete file.
    pub async fn put_chunk(
        &self,
        file: FileId,
        number: u32,
        bytes: &[u8],
    ) -> Result<(), StoreError> {
        let placed = self.place(file, number, bytes).await?;
        let content = placed.as_deref().map_or(ChunkContent::Bytes(bytes), ChunkContent::Object);
        self.store.put_chunk(file, number, content).await
    }

    /// Returns a chunk; `None` after the last.
    pub async fn chunk(&self, file: FileId, number: u32) -> Result<Option<Vec<u8>>, StoreError> {
        let name = match self.store.chunk(file, number).await? {
            None => return Ok(None),
            Some(StoredChunk::Bytes(bytes)) => return Ok(Some(bytes)),
            Some(StoredChunk::Object(name)) => name,
        };
        let damaged = |detail: &str| StoreError::Damaged {
            what: "file",
            detail: format!("{detail} (chunk {number} of {file}, object {name})"),
        };
        let objects = self.objects.as_ref();
        let objects = objects
            .ok_or_else(|| damaged("its content is in an object store, and --files is not set"))?;
        let key = objects.below(&name).map_err(unavailable)?;
        let read = async { objects.read(&key, None).await?.try_collect::<Vec<Bytes>>().await };
        let bytes = match read.await {
            // Deleted after its row was read, or lost.
            Err(DataError::NotFound { .. }) => {
                return match self.store.chunk(file, number).await? {
                    None => Ok(None),
                    Some(_) => Err(damaged("its object is gone")),
                };
            }
            read => read.map_err(unavailable)?.concat(),
        };
        match parsed(&name) {
            Some((_, expected)) if expected == hash(&bytes) => Ok(Some(bytes)),
            _ => Err(damaged("its object has another content")),
        }
    }

    /// Deletes a complete file of a tenant.
    pub async fn delete_file(
        &self,
        tenant: &Tenant,
        file: FileId,
    ) -> Result<FileDeletion, StoreError> {
        let names = match &self.objects {
            Some(_) => self.store.chunk_objects(file).await?.unwrap_or_default(),
            None => Vec::new(),
        };
        let deletion = self.store.delete_file(tenant, file).await?;
        if deletion == FileDeletion::Deleted {
            self.delete_objects(&names).await;
        }
        Ok(deletion)
    }

    /// Deletes the objects of rows that are gone. What cannot be deleted is left to the sweep.
    async fn delete_objects(&self, names: &[String]) {
        let Some(objects) = &self.objects else { return };
        for name in names {
            let deleted = async { objects.delete(&objects.below(name)?).await };
            if let Err(error) = deleted.await {
                tracing::warn!(%error, "an object of a deleted file is left to the sweep");
                return;
            }
        }
    }

    /// Deletes objects without a row.
    pub async fn sweep_objects(&self) -> Result<(), StoreError> {
        let Some(objects) = &self.objects else { return Ok(()) };
        let above = objects.place().as_ref().len();
        let mut listed = objects.list();
        let (mut page, mut held) = (BTreeMap::<FileId, Vec<Listed>>::new(), 0);
        while let Some(object) = listed.try_next().await.map_err(unavailable)? {
            let name = object.key.as_ref()[above..].trim_start_matches('/');
            let Some((file, _)) = parsed(name) else { continue };
            let listed = Listed { name: name.to_owned(), written_ms: object.written_ms };
            page.entry(file).or_default().push(listed);
            held += 1;
            if held == SWEEP_PAGE {
                self.sweep_page(std::mem::take(&mut page)).await?;
                held = 0;
            }
        }
        self.sweep_page(page).await
    }

    /// Deletes those objects that no row has.
    async fn sweep_page(&self, page: BTreeMap<FileId, Vec<Listed>>) -> Result<(), StoreError> {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let before = now.saturating_sub(INCOMPLETE_MAX);
        for (file, mut listed) in page {
            if let Some(known) = self.store.chunk_objects(file).await? {
                listed.retain(|object| {
                    let written = Duration::from_millis(object.written_ms.max(0).unsigned_abs());
                    written < before && !known.contains(&object.name)
                });
            }
            let names: Vec<String> = listed.into_iter().map(|object| object.name).collect();
            self.delete_objects(&names).await;
        }
        Ok(())
    }
}

/// An object of a chunk.
struct Listed {
    name: String,
    written_ms: i64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_of_an_object_tells_file_and_hash() {
        let (file, hash) = (FileId::generate(), hash(b"x"));
        let name = format!("{file}/000007-{hash}-0123456789abcdef");
        assert_eq!(parsed(&name), Some((file, hash.as_str())));
        for other in
            ["", "x", "file-0/000000-x-y", &format!("{file}/report.csv"), &format!("{name}-x")]
        {
            assert_eq!(parsed(other), None, "{other}");
        }
    }
}
