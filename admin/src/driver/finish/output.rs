//! [`Output`]: the two output files, continued from step to step.

use std::sync::Arc;

use tritmill_queue::{StoreError, Timestamp};

use crate::{
    file_contents::FileContents,
    store::{
        Batch, FileId, FrontStore,
        batch_ends::LineEnd,
        batch_steps::FileChunk,
        files::{ChunkContent, FILE_CHUNK_BYTES, FilePurpose, StoredFile},
        step_state::{AssemblyState, OutputPart},
    },
};

const CHUNK_BYTES: u64 = FILE_CHUNK_BYTES as u64;

/// The two output files with their counts, and the bytes that a step adds.
#[derive(Default)]
pub(super) struct Output {
    /// State after the lines that were added.
    pub state: AssemblyState,
    /// Bytes that were added.
    pub written_bytes: u64,
    /// Lines that were added and had no number.
    pub ends: Vec<LineEnd>,
    answers: Added,
    errors: Added,
}

/// The bytes of a file from the start of a chunk on.
#[derive(Default)]
struct Added {
    /// Number of the first chunk.
    chunk: u32,
    bytes: Vec<u8>,
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

impl Output {
    /// Continues the output of a batch, or begins it. If a file of it was swept, because no step was done for a
    /// long time, it begins again.
    pub async fn open(files: &FileContents, batch: &Batch) -> Result<Self, StoreError> {
        let Some(state) = batch.steps.assembly.clone() else { return Ok(Self::default()) };
        let opened =
            (Added::open(files, state.answers).await?, Added::open(files, state.errors).await?);
        let (Some(answers), Some(errors)) = opened else {
            tracing::warn!(batch = %batch.id, "unfinished output was swept, writing it again");
            return Ok(Self::default());
        };
        Ok(Self { state, written_bytes: 0, ends: Vec::new(), answers, errors })
    }

    /// Appends a line to one of the files.
    pub async fn write_line(
        &mut self,
        store: &Arc<dyn FrontStore>,
        batch: &Batch,
        is_answer: bool,
        mut line: String,
    ) -> Result<(), StoreError> {
        let state = &mut self.state;
        let (part, added, count, kind) = match is_answer {
            true => (&mut state.answers, &mut self.answers, &mut state.completed, "output"),
            false => (&mut state.errors, &mut self.errors, &mut state.failed, "error"),
        };
        let part = match part {
            Some(part) => part,
            None => {
                let file = StoredFile {
                    id: FileId::generate(),
                    tenant: batch.tenant.clone(),
                    purpose: FilePurpose::BatchOutput,
                    filename: format!("{}_{kind}.jsonl", batch.id),
                    size_bytes: 0,
                    created_at: Timestamp::default(),
                    expires_at: None,
                };
                let file = store.create_file(&file).await?.id;
                part.insert(OutputPart { file, size_bytes: 0 })
            }
        };
        line.push('\n');
        added.bytes.extend_from_slice(line.as_bytes());
        part.size_bytes += line.len() as u64;
        self.written_bytes += line.len() as u64;
        *count += 1;
        Ok(())
    }

    /// Returns the chunks with what was added, after their objects are written, if they have any.
    pub async fn place(&self, files: &FileContents) -> Result<Vec<Placed<'_>>, StoreError> {
        let parts = [(self.state.answers, &self.answers), (self.state.errors, &self.errors)];
        let mut placed = Vec::new();
        for (part, added) in parts {
            let Some(OutputPart { file, .. }) = part else { continue };
            for (number, bytes) in (added.chunk..).zip(added.bytes.chunks(FILE_CHUNK_BYTES)) {
                let object = files.place(file, number, bytes).await?;
                placed.push(Placed { file, number, bytes, object });
            }
        }
        Ok(placed)
    }
}

impl Added {
    /// Reads the last chunk of a file, which may be incomplete. Returns `None` if the file is gone.
    async fn open(
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
}
