//! [`BlockTiers`]: host memory, a folder and other workers behind a thread, for the engines of one process.

#[cfg(test)]
mod tests;
mod thread;

use std::{
    collections::VecDeque,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
        mpsc::{self, Sender, SyncSender, TrySendError},
    },
    time::Duration,
};

use self::thread::Thread;
use super::{BlockFolder, FolderError, FolderLimits, TierStats, host::HostBlocks, stats::Counters};
use crate::kv::BlockHash;

/// Bytes of blocks and states that wait to be written; while there are so many, no more are.
const WRITES_MAX: u64 = 64 << 20;
/// Requests that wait for the thread.
const REQUESTS_MAX: usize = 4096;
/// Bytes of blocks that were read and not taken yet; further reads wait.
const STAGED_MAX: u64 = 64 << 20;
/// Contents that the engines have taken and that later ones are read into: new memory takes longer than reading.
const SPARE_MAX: usize = 16;

/// Most names that other workers are asked for at once.
pub const NAMES_MAX: usize = 8192;

/// Blocks to read: the leading ones of a chain.
#[derive(Debug)]
pub(crate) struct Fetch {
    /// The blocks, in order of the chain.
    pub hashes: Vec<BlockHash>,
    /// Blocks before them in the chain.
    pub depth: usize,
    /// Receives the answer.
    pub answer: Sender<Answer>,
}

/// Names to look for in the tiers.
#[derive(Debug)]
pub(crate) struct Find {
    /// The names, in order of preference.
    pub hashes: Vec<BlockHash>,
    /// The most places in the answer.
    pub most: usize,
    /// Receives the answer.
    pub answer: Sender<Answer>,
}

/// What a search found.
#[derive(Debug)]
pub(crate) struct Found {
    /// The first name of the search.
    pub first: BlockHash,
    /// The places of what was found among the names, in ascending order.
    pub places: Vec<usize>,
}

/// The answer to a fetch or a search.
#[derive(Debug)]
pub(crate) enum Answer {
    Fetched(Fetched),
    Found(Found),
}

/// The tiers to use, the fastest first.
#[derive(Default)]
pub struct TierOptions {
    /// Most bytes of blocks in the memory of the host; 0 for none.
    pub host_bytes: u64,
    /// A folder and its limits.
    pub folder: Option<(PathBuf, FolderLimits)>,
    /// The folders of other workers.
    pub remote: Option<Box<dyn RemoteBlocks>>,
}

impl TierOptions {
    /// Only a folder.
    pub fn folder(path: &Path, limits: FolderLimits) -> Self {
        Self { folder: Some((path.to_owned(), limits)), ..Self::default() }
    }
}

/// Reads blocks, and states of recurrent layers, from elsewhere.
pub trait RemoteBlocks: Send {
    /// Returns the file of a block, as a [`BlockFolder`] has it. `hash` has the 64 hexadecimal digits of its name. A
    /// file that differs from what was written is found out by the caller.
    fn fetch(&mut self, hash: &str) -> Option<Vec<u8>>;

    /// Returns which of these blocks and states can be fetched, by their places among the names.
    fn find(&mut self, hashes: &[String]) -> Vec<usize>;
}

/// The leading blocks of a fetch that a tier has.
#[derive(Debug)]
pub(crate) struct Fetched {
    /// The first block of the fetch.
    pub first: BlockHash,
    /// Blocks with their contents, in order.
    pub blocks: Vec<(BlockHash, Vec<u8>)>,
    /// The block after them, if no tier has it.
    pub missing: Option<BlockHash>,
    /// Time that reading took.
    pub time: Duration,
    /// Their place among what was read and not taken yet.
    staged: Staged,
}

/// Bytes that count until this is dropped.
#[derive(Debug)]
struct Staged {
    bytes: u64,
    total: Arc<AtomicU64>,
}

impl Staged {
    fn new(bytes: u64, total: &Arc<AtomicU64>) -> Self {
        total.fetch_add(bytes, Ordering::Relaxed);
        Self { bytes, total: Arc::clone(total) }
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        self.total.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

impl Fetched {
    /// Returns the blocks; the next ones may be read.
    pub fn take(self) -> (Vec<(BlockHash, Vec<u8>)>, Option<BlockHash>) {
        drop(self.staged);
        (self.blocks, self.missing)
    }
}

#[derive(Debug)]
enum Request {
    Fetch(Fetch),
    Find(Find),
    /// A block, the number of blocks before it in its chain, and its content.
    Store(BlockHash, usize, Vec<u8>),
    /// Changes how many waiting requests will use these blocks.
    Expect(Vec<BlockHash>, i64),
}

/// Blocks, and by how much the number of waiting requests that will use them changes.
type Expectation = (Vec<BlockHash>, i64);

/// Blocks outside of the backends. Clones share the thread, which ends with the last one.
#[derive(Debug, Clone)]
pub struct BlockTiers {
    requests: SyncSender<Request>,
    /// Changes of what is expected, for which there was no room.
    unsent: Arc<Mutex<VecDeque<Expectation>>>,
    shared: Shared,
}

/// What the thread and the clones share.
#[derive(Debug, Clone, Default)]
struct Shared {
    counters: Arc<Counters>,
    /// Bytes that wait to be written.
    waiting_writes: Arc<AtomicU64>,
    spare: Arc<ContentBuffers>,
}

/// Memory of contents that were taken.
#[derive(Debug, Default)]
struct ContentBuffers(Mutex<Vec<Vec<u8>>>);

impl ContentBuffers {
    fn take(&self) -> Vec<u8> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).pop().unwrap_or_default()
    }

    fn give(&self, content: Vec<u8>) {
        let mut spare = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if spare.len() < SPARE_MAX {
            spare.push(content);
        }
    }
}

impl BlockTiers {
    /// Opens the tiers and starts their thread.
    ///
    /// # Errors
    /// If the folder cannot be created, read or written, or no thread can be started.
    pub fn open(options: TierOptions) -> Result<Self, FolderError> {
        Self::open_with(options, STAGED_MAX)
    }

    fn open_with(options: TierOptions, staged_max: u64) -> Result<Self, FolderError> {
        let TierOptions { host_bytes, folder, remote } = options;
        let path = folder.as_ref().map(|(path, _)| path.clone()).unwrap_or_default();
        let folder = folder.map(|(path, limits)| BlockFolder::open(&path, limits)).transpose()?;
        let (requests, inbox) = mpsc::sync_channel(REQUESTS_MAX);
        let (host, shared) = (HostBlocks::new(host_bytes), Shared::default());
        let worker = Thread::new(host, folder, remote, shared.clone(), staged_max);
        worker.start(inbox).map_err(|source| FolderError { path, source })?;
        Ok(Self { requests, unsent: Arc::default(), shared })
    }

    /// Returns what the cache has and did.
    pub fn stats(&self) -> TierStats {
        self.shared.counters.stats()
    }

    /// Starts to read blocks. Returns false if too many requests wait: then there is no answer.
    pub(crate) fn fetch(&self, fetch: Fetch) -> bool {
        self.requests.try_send(Request::Fetch(fetch)).is_ok()
    }

    /// Starts to look for names. Returns false, and gives no answer, if too many requests wait.
    pub(crate) fn find(&self, find: Find) -> bool {
        self.requests.try_send(Request::Find(find)).is_ok()
    }

    /// Takes back the memory of a content that was read.
    pub(crate) fn reuse(&self, content: Vec<u8>) {
        self.shared.spare.give(content);
    }

    /// Returns whether a block or a state may be written now.
    pub(crate) fn has_room(&self) -> bool {
        self.shared.waiting_writes.load(Ordering::Relaxed) < WRITES_MAX
    }

    /// Starts to write a block, or a state with the number of blocks before its last one.
    pub(crate) fn store(&self, hash: BlockHash, depth: usize, content: Vec<u8>) {
        let bytes = content.len() as u64;
        self.shared.waiting_writes.fetch_add(bytes, Ordering::Relaxed);
        if self.requests.try_send(Request::Store(hash, depth, content)).is_err() {
            self.shared.waiting_writes.fetch_sub(bytes, Ordering::Relaxed);
            self.shared.counters.refused.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Changes how many waiting requests will use these blocks: they are evicted last.
    pub(crate) fn expect(&self, hashes: Vec<BlockHash>, change: i64) {
        let mut unsent = self.unsent.lock().unwrap_or_else(PoisonError::into_inner);
        unsent.push_back((hashes, change));
        while let Some((hashes, change)) = unsent.pop_front() {
            if let Err(error) = self.requests.try_send(Request::Expect(hashes, change)) {
                if let TrySendError::Full(Request::Expect(hashes, change)) = error {
                    unsent.push_front((hashes, change));
                }
                return;
            }
        }
    }
}
