//! [`Appended`]: a file that the steps of a batch append to.
//!
//! A step holds the file from the start of its last, incomplete chunk on, and writes the chunks in the transaction that saves the
//! batch, so that what an interrupted step wrote does not exist.

use std::sync::Arc;

use tritmill_queue::{StoreError, Timestamp};

use crate::{
    file_contents::FileContents,
    store::{
        Batch, FileId, FrontStore,
        batch_steps::FileChunk,
        files::{ChunkContent, FILE_CHUNK_BYTES, FilePurpose, StoredFile},
        step_state::OutputPart,
    },
};

const CHUNK_BYTES: u64 = FILE_CHUNK_BYTES as u64;

/// The bytes of a file from the start of a chunk on.
#[derive(Default)]
pub(super) struct Appended {
    /// Number of the first chunk.
    chunk: u32,
    bytes: Vec<u8>,
}

/// A new file of a batch.
pub(super) struct NewFile<'a> {
    pub batch: &'a Batch,
    pub purpose: FilePurpose,
    /// What it has, as the end of its name.
    pub kind: &'a str,
}

impl NewFile<'_> {
    async fn create(&self, store: &Arc<dyn FrontStore>) -> Result<OutputPart, StoreError> {
        let file = StoredFile {
            id: FileId::generate(),
            tenant: self.batch.tenant.clone(),
            purpose: self.purpose,
            filename: format!("{}_{}.jsonl", self.batch.id, self.kind),
            size_bytes: 0,
            created_at: Timestamp::default(),
            expires_at: None,
        };
        let file = store.create_file(&file).await?.id;
        Ok(OutputPart { file, size_bytes: 0 })
    }
}

/// A chunk with its object, if it has one.
pub(super) struct Placed<'a> {
    file: FileId,
    number: u32,
    bytes: &'a [u8],
    object: Option<String>,
}

impl Placed<'_> {
    /// Returns the chunk for the store.
    pub fn chunk(&self) -> FileChunk<'_> {
        let bytes = ChunkContent::Bytes(self.bytes);
        let content = self.object.as_deref().map_or(bytes, ChunkContent::Object);
        FileChunk { file: self.file, number: self.number, content }
    }
}

impl Appended {
    /// Reads the last chunk of a file, which may be incomplete. Returns `None` if the file is gone.
    pub async fn open(
        files: &FileContents,
        part: Option<OutputPart>,
    ) -> Result<Option<Self>, StoreError> {
        let Some(OutputPart { file, size_bytes }) = part else { return Ok(Some(Self::default())) };
        let rest = usize::try_from(size_bytes % CHUNK_BYTES).expect("less than a chunk");
        let chunk = u32::try_from(size_bytes / CHUNK_BYTES).unwrap_or(u32::MAX);
        // After a whole chunk the one before tells whether the file still exists.
        let last = if rest == 0 { chunk.saturating_sub(1) } else { chunk };
        let Some(mut bytes) = files.chunk(file, last).await? else { return Ok(None) };
        if bytes.len() < rest {
            return Ok(None);
        }
        bytes.truncate(rest);
        Ok(Some(Self { chunk, bytes }))
    }

    /// Appends a line; creates the file with the first one. Returns the bytes that were added.
    pub async fn write_line(
        &mut self,
        store: &Arc<dyn FrontStore>,
        part: &mut Option<OutputPart>,
        new: NewFile<'_>,
        line: &str,
    ) -> Result<u64, StoreError> {
        self.write(store, part, new, line.as_bytes()).await?;
        if let Some(part) = part {
            self.bytes.push(b'\n');
            part.size_bytes += 1;
        }
        Ok(line.len() as u64 + 1)
    }

    /// Appends bytes; creates the file with the first ones.
    pub async fn write(
        &mut self,
        store: &Arc<dyn FrontStore>,
        part: &mut Option<OutputPart>,
        new: NewFile<'_>,
        bytes: &[u8],
    ) -> Result<(), StoreError> {
        let part = match part {
            Some(part) => part,
            None => part.insert(new.create(store).await?),
        };
        self.bytes.extend_from_slice(bytes);
        part.size_bytes += bytes.len() as u64;
        Ok(())
    }

    /// Adds the chunks with what was appended, after their objects are written, if they have any.
    pub async fn place<'a>(
        &'a self,
        files: &FileContents,
        part: Option<OutputPart>,
        placed: &mut Vec<Placed<'a>>,
    ) -> Result<(), StoreError> {
        let Some(OutputPart { file, .. }) = part else { return Ok(()) };
        for (number, bytes) in (self.chunk..).zip(self.bytes.chunks(FILE_CHUNK_BYTES)) {
            let object = files.place(file, number, bytes).await?;
            placed.push(Placed { file, number, bytes, object });
        }
        Ok(())
    }
}
