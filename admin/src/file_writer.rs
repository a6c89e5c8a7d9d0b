//! [`FileWriter`]: writes a file to the store in chunks.

use std::sync::Arc;

use sha2::{Digest as _, Sha256};
use tritmill_queue::StoreError;

use crate::{
    App,
    file_contents::FileContents,
    store::{
        FrontStore,
        files::{FILE_CHUNK_BYTES, StoredFile},
    },
};

/// A file that is being written. Dropping it before [`finish`](Self::finish) deletes what was written.
pub(crate) struct FileWriter {
    store: Arc<dyn FrontStore>,
    contents: FileContents,
    file: StoredFile,
    chunk: Vec<u8>,
    hasher: Sha256,
    number: u32,
    size_bytes: u64,
    finished: bool,
}

impl FileWriter {
    /// Creates a file.
    pub async fn begin(app: &App, file: &StoredFile) -> Result<Self, StoreError> {
        let (store, contents) = (Arc::clone(&app.store), app.files.clone());
        let file = store.create_file(file).await?;
        let (chunk, hasher) = (Vec::new(), Sha256::new());
        let (number, size_bytes, finished) = (0, 0, false);
        Ok(Self { store, contents, file, chunk, hasher, number, size_bytes, finished })
    }

    /// The file, as it was created.
    pub fn file(&self) -> &StoredFile {
        &self.file
    }

    /// Bytes written so far.
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// Hash of the bytes written so far.
    pub fn sha256(&self) -> [u8; 32] {
        self.hasher.clone().finalize().into()
    }

    /// Appends bytes.
    pub async fn write(&mut self, mut bytes: &[u8]) -> Result<(), StoreError> {
        self.size_bytes += bytes.len() as u64;
        self.hasher.update(bytes);
        while !bytes.is_empty() {
            let room = FILE_CHUNK_BYTES - self.chunk.len();
            let (head, tail) = bytes.split_at(bytes.len().min(room));
            self.chunk.extend_from_slice(head);
            bytes = tail;
            if self.chunk.len() == FILE_CHUNK_BYTES {
                self.flush().await?;
            }
        }
        Ok(())
    }

    async fn flush(&mut self) -> Result<(), StoreError> {
        self.contents.put_chunk(self.file.id, self.number, &self.chunk).await?;
        self.number += 1;
        self.chunk.clear();
        Ok(())
    }

    /// Writes the remaining bytes. The caller then marks the file as complete in the store.
    pub async fn finish(mut self) -> Result<StoredFile, StoreError> {
        if !self.chunk.is_empty() {
            self.flush().await?;
        }
        self.finished = true;
        Ok(StoredFile { size_bytes: self.size_bytes, ..self.file.clone() })
    }
}

impl Drop for FileWriter {
    fn drop(&mut self) {
        if self.finished {
            return;
        }
        let (store, id) = (Arc::clone(&self.store), self.file.id);
        // Without a runtime, at shutdown, the file is left to the daily sweep.
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(async move {
                if let Err(error) = store.abandon_file(id).await {
                    tracing::debug!(%error, "an unfinished file is left to the sweep");
                }
            });
        }
    }
}
