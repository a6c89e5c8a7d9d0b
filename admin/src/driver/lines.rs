//! Reads and parses the lines of a stored file ahead of time, on a separate thread.

use std::{
    collections::BTreeMap,
    io::{self, BufRead, Read},
};

use serde::Deserialize;
use serde_json::Value;
use tokio::{runtime::Handle, sync::mpsc, task::spawn_blocking};
use tritmill_client::{LineReader, RawLine, RefusedLine, Request, parse_request, unserved_model};
use tritmill_queue::{QueueName, StoreError};

use crate::{
    file_contents::FileContents,
    store::{Batch, FileId, files::FILE_CHUNK_BYTES, step_state::FilePosition},
};

/// Most lines of a page, and their bytes, which may be exceeded by one line.
const PAGE_LINES: usize = 1000;
const PAGE_BYTES: u64 = 1 << 20;
/// Pages read ahead.
const AHEAD: usize = 1;

/// A non-blank line.
pub(crate) struct Line {
    /// Position of the next line.
    pub after: FilePosition,
    /// The request, or why the line is invalid.
    pub parsed: Result<Request, Box<RefusedLine>>,
    /// The body of the request as it was written, if that is wanted.
    pub body: Option<Value>,
}

/// A page of lines; never empty.
pub(crate) type Lines = Vec<Line>;

/// What is read of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wanted {
    /// The requests.
    Requests,
    /// The requests with their bodies as they were written.
    Bodies,
}

/// Reads the lines of a batch from a position on. A request for a model that is not among the batch's is refused. Reading ends
/// when the receiver is dropped.
pub(crate) fn read(
    files: &FileContents,
    batch: &Batch,
    from: FilePosition,
) -> mpsc::Receiver<Result<Lines, StoreError>> {
    read_with(files, batch, from, Wanted::Requests)
}

/// Reads the lines of a batch as [`read`] does, with more of each line if that is wanted.
pub(crate) fn read_with(
    files: &FileContents,
    batch: &Batch,
    from: FilePosition,
    wanted: Wanted,
) -> mpsc::Receiver<Result<Lines, StoreError>> {
    // Before its validation, the queues of a batch are not known.
    let is_checked = batch.steps.is_valid || batch.at.in_progress.is_some();
    let queues = (batch.has_models() && is_checked).then(|| batch.queues.clone());
    let (sender, receiver) = mpsc::channel(AHEAD);
    let chunks = Chunks::at(files.clone(), batch.input, from.offset_bytes);
    spawn_blocking(move || {
        let mut reader = LineReader::after(chunks, from.line, from.offset_bytes);
        loop {
            let page = page(&mut reader, queues.as_ref(), wanted).map_err(store_error);
            let is_error = page.is_err();
            if page.as_ref().is_ok_and(Vec::is_empty)
                || sender.blocking_send(page).is_err()
                || is_error
            {
                return;
            }
        }
    });
    receiver
}

fn page(
    reader: &mut LineReader<Chunks>,
    queues: Option<&BTreeMap<String, QueueName>>,
    wanted: Wanted,
) -> io::Result<Lines> {
    let mut lines = Vec::new();
    let end = reader.bytes_read() + PAGE_BYTES;
    while lines.len() < PAGE_LINES && reader.bytes_read() < end {
        let Some(line) = reader.next_line()? else { break };
        let after = FilePosition { line: line.number, offset_bytes: reader.bytes_read() };
        let is_served = |request: &Request| {
            queues.is_none_or(|queues| {
                request.body.model.as_ref().is_some_and(|model| queues.contains_key(model))
            })
        };
        let parsed = match parse_request(&line) {
            Ok(request) if !is_served(&request) => Err(Box::new(unserved_model(&request))),
            parsed => parsed,
        };
        let body = match wanted {
            Wanted::Bodies if parsed.is_ok() => body(&line),
            _ => None,
        };
        lines.push(Line { after, parsed, body });
    }
    Ok(lines)
}

/// Returns the body of a valid line.
fn body(line: &RawLine) -> Option<Value> {
    #[derive(Deserialize)]
    struct Written {
        body: Value,
    }
    let written: Written = serde_json::from_slice(line.content.as_deref().ok()?).ok()?;
    Some(written.body)
}

/// Extracts the store's error from the reader's.
fn store_error(error: io::Error) -> StoreError {
    error.downcast::<StoreError>().unwrap_or_else(|error| StoreError::Unavailable(Box::new(error)))
}

/// A reader of a stored file that holds one chunk in memory, on a thread without tasks.
pub(super) struct Chunks {
    files: FileContents,
    runtime: Handle,
    file: FileId,
    /// Number of the next chunk.
    number: u32,
    chunk: Vec<u8>,
    position: usize,
    /// Bytes of the first chunk to skip.
    skip: usize,
    /// Whether the last chunk was read. Lines that are added to the file meanwhile are for the next reader.
    is_last: bool,
}

impl Chunks {
    /// Reads from a position on.
    pub fn at(files: FileContents, file: FileId, offset_bytes: u64) -> Self {
        let chunk_bytes = FILE_CHUNK_BYTES as u64;
        let number = u32::try_from(offset_bytes / chunk_bytes).unwrap_or(u32::MAX);
        let skip = usize::try_from(offset_bytes % chunk_bytes).expect("less than a chunk");
        let (runtime, chunk) = (Handle::current(), Vec::new());
        Self { files, runtime, file, number, chunk, position: 0, skip, is_last: false }
    }
}

impl BufRead for Chunks {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        if self.position == self.chunk.len() && !self.is_last {
            let next = self.runtime.block_on(self.files.chunk(self.file, self.number));
            // A store that fails may answer later.
            let failed = |error| io::Error::new(io::ErrorKind::ConnectionAborted, error);
            self.chunk = next.map_err(failed)?.unwrap_or_default();
            self.number = self.number.saturating_add(1);
            self.is_last = self.chunk.len() < FILE_CHUNK_BYTES;
            self.position = std::mem::take(&mut self.skip).min(self.chunk.len());
        }
        Ok(&self.chunk[self.position..])
    }

    fn consume(&mut self, amount: usize) {
        self.position = (self.position + amount).min(self.chunk.len());
    }
}

impl Read for Chunks {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.fill_buf()?.read(buffer)?;
        self.consume(count);
        Ok(count)
    }
}
