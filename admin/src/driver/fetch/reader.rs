//! [`SourceReader`]: reads a source on a thread of its own, some pages ahead.

use tokio::{
    runtime::Handle,
    sync::{OwnedSemaphorePermit, mpsc},
    task::spawn_blocking,
};
use tritmill_data::{Ended, Page, RemoteSource};

use crate::file_contents::hash;

/// Pages read ahead.
const AHEAD: usize = 1;

/// What a reader gives.
pub(super) enum Piece {
    /// The next page.
    Page(Page),
    /// The source has ended, or cannot be read on.
    Ended(Ended),
}

/// A source that is being read. The reading ends when this is dropped.
pub(crate) struct SourceReader {
    pieces: mpsc::Receiver<Piece>,
    /// Bytes that it gave.
    pub(super) bytes: u64,
    /// Their [chained hash](chained).
    pub(super) hash: String,
}

impl SourceReader {
    /// Begins to read a source. The slot is held until the reading has ended.
    pub(super) fn open(source: RemoteSource, slot: OwnedSemaphorePermit) -> Self {
        let (sender, pieces) = mpsc::channel(AHEAD);
        let runtime = Handle::current();
        spawn_blocking(move || {
            let _slot = slot;
            let mut give = |page| sender.blocking_send(Piece::Page(page)).is_ok();
            let ended = source.read(&runtime, &mut give);
            // Without a receiver the end is not wanted either.
            let _ = sender.blocking_send(Piece::Ended(ended));
        });
        Self { pieces, bytes: 0, hash: String::new() }
    }

    /// Waits for the next piece; `None` if the thread has panicked.
    pub(super) async fn next(&mut self) -> Option<Piece> {
        let piece = self.pieces.recv().await;
        if let Some(Piece::Page(page)) = &piece {
            self.bytes += page.bytes.len() as u64;
            self.hash = chained(&self.hash, &page.bytes);
        }
        piece
    }
}

/// Returns the hash of pages from the hash of those before the last one.
pub(super) fn chained(before: &str, page: &[u8]) -> String {
    hash(&[before.as_bytes(), page].concat())
}
