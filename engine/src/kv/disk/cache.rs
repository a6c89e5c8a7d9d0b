//! [`DiskCache`]: a folder of blocks behind a thread, for the engines of one process.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
        mpsc::{self, Receiver, Sender, SyncSender},
    },
    thread,
    time::{Duration, Instant},
};

use super::{BlockFolder, FolderError, FolderLimits, FolderUse};
use crate::kv::BlockHash;

/// Blocks that wait to be written; more are not written.
const WRITES_MAX: usize = 64;
/// Requests that wait for the thread.
const REQUESTS_MAX: usize = 4096;
/// Bytes of blocks that were read and not taken yet; further reads wait.
const STAGED_MAX: u64 = 64 << 20;
/// Time between two looks whether they were taken.
const STAGED_LOOK: Duration = Duration::from_millis(1);
/// Time without writes after one failed.
const WRITES_PAUSED: Duration = Duration::from_secs(60);
/// Time between two scans for what other processes wrote or deleted.
const SCAN_EVERY: Duration = Duration::from_secs(60);

/// Blocks to read: the leading ones of a chain.
#[derive(Debug)]
pub(crate) struct Fetch {
    /// The blocks, in order of the chain.
    pub hashes: Vec<BlockHash>,
    /// Blocks before them in the chain.
    pub depth: usize,
    /// Receives the answer.
    pub answer: Sender<Fetched>,
}

/// The leading blocks of a fetch that the folder has.
#[derive(Debug)]
pub(crate) struct Fetched {
    /// The first block of the fetch.
    pub first: BlockHash,
    /// Blocks with their contents, in order.
    pub blocks: Vec<(BlockHash, Vec<u8>)>,
    /// The block after them, if the folder does not have it.
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
    /// A block, the number of blocks before it in its chain, and its content.
    Store(BlockHash, usize, Vec<u8>),
    /// Changes how many waiting requests will use these blocks.
    Expect(Vec<BlockHash>, i64),
}

/// Counters of a cache.
#[derive(Debug, Default)]
struct Counters {
    hits: AtomicU64,
    misses: AtomicU64,
    written: AtomicU64,
    refused: AtomicU64,
    failed: AtomicU64,
    damaged: AtomicU64,
    blocks: AtomicU64,
    bytes: AtomicU64,
}

/// What a cache has and did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DiskStats {
    /// Blocks read.
    pub hits: u64,
    /// Looked up blocks that the folder did not have, one for each chain.
    pub misses: u64,
    /// Blocks written.
    pub written: u64,
    /// Blocks not written: too many waited, or there was no room.
    pub refused: u64,
    /// Writes that failed.
    pub failed: u64,
    /// Files that were damaged, and deleted.
    pub damaged: u64,
    /// Files of the folder.
    pub usage: FolderUse,
}

/// Blocks on disk. Clones share the thread, which ends with the last one.
#[derive(Debug, Clone)]
pub struct DiskCache {
    requests: SyncSender<Request>,
    waiting_writes: Arc<AtomicU64>,
    counters: Arc<Counters>,
}

impl DiskCache {
    /// Opens a folder and starts its thread.
    ///
    /// # Errors
    /// If the folder cannot be created, read or written, or no thread can be started.
    pub fn open(path: &std::path::Path, limits: FolderLimits) -> Result<Self, FolderError> {
        Self::open_with(path, limits, STAGED_MAX)
    }

    fn open_with(
        path: &std::path::Path,
        limits: FolderLimits,
        staged_max: u64,
    ) -> Result<Self, FolderError> {
        let folder = BlockFolder::open(path, limits)?;
        let (requests, inbox) = mpsc::sync_channel(REQUESTS_MAX);
        let counters = Arc::new(Counters::default());
        let waiting_writes = Arc::new(AtomicU64::new(0));
        let mut worker = Thread {
            folder,
            expected: HashMap::new(),
            counters: Arc::clone(&counters),
            waiting_writes: Arc::clone(&waiting_writes),
            staged: Arc::default(),
            staged_max,
            writes_from: None,
            scan_at: Instant::now() + SCAN_EVERY,
        };
        worker.publish();
        let started = thread::Builder::new().name("kv-disk".to_owned()).spawn(move || {
            worker.run(&inbox);
        });
        started.map_err(|source| FolderError { path: path.to_owned(), source })?;
        Ok(Self { requests, waiting_writes, counters })
    }

    /// Returns what the cache has and did.
    pub fn stats(&self) -> DiskStats {
        let Counters { hits, misses, written, refused, failed, damaged, blocks, bytes } =
            &*self.counters;
        let [hits, misses, written, refused, failed, damaged, blocks, bytes] =
            [hits, misses, written, refused, failed, damaged, blocks, bytes]
                .map(|counter| counter.load(Ordering::Relaxed));
        let usage = FolderUse { blocks, bytes };
        DiskStats { hits, misses, written, refused, failed, damaged, usage }
    }

    /// Starts to read blocks. Returns false if too many requests wait: then there is no answer.
    pub(crate) fn fetch(&self, fetch: Fetch) -> bool {
        self.requests.try_send(Request::Fetch(fetch)).is_ok()
    }

    /// Returns whether a block may be written now.
    pub(crate) fn has_room(&self) -> bool {
        self.waiting_writes.load(Ordering::Relaxed) < WRITES_MAX as u64
    }

    /// Starts to write a block.
    pub(crate) fn store(&self, hash: BlockHash, depth: usize, content: Vec<u8>) {
        self.waiting_writes.fetch_add(1, Ordering::Relaxed);
        if self.requests.try_send(Request::Store(hash, depth, content)).is_err() {
            self.waiting_writes.fetch_sub(1, Ordering::Relaxed);
            self.counters.refused.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Changes how many waiting requests will use these blocks: they are evicted last.
    pub(crate) fn expect(&self, hashes: Vec<BlockHash>, change: i64) {
        // Without it blocks are evicted in the order of their last use.
        let _ = self.requests.try_send(Request::Expect(hashes, change));
    }
}

struct Thread {
    folder: BlockFolder,
    /// Waiting requests that will use each block.
    expected: HashMap<BlockHash, i64>,
    counters: Arc<Counters>,
    waiting_writes: Arc<AtomicU64>,
    /// Bytes of blocks that were read and not taken yet.
    staged: Arc<AtomicU64>,
    staged_max: u64,
    /// End of a pause after a failed write.
    writes_from: Option<Instant>,
    scan_at: Instant,
}

impl Thread {
    fn run(&mut self, inbox: &Receiver<Request>) {
        while let Ok(request) = inbox.recv() {
            match request {
                Request::Fetch(fetch) => self.fetch(fetch),
                Request::Store(hash, depth, content) => {
                    self.waiting_writes.fetch_sub(1, Ordering::Relaxed);
                    self.store(hash, depth, &content);
                }
                Request::Expect(hashes, change) => self.expect(hashes, change),
            }
            if Instant::now() >= self.scan_at {
                if let Err(error) = self.folder.scan() {
                    tracing::warn!(%error, "the KV cache folder was not listed");
                }
                self.scan_at = Instant::now() + SCAN_EVERY;
            }
            self.publish();
        }
    }

    fn publish(&self) {
        let FolderUse { blocks, bytes } = self.folder.usage();
        self.counters.blocks.store(blocks, Ordering::Relaxed);
        self.counters.bytes.store(bytes, Ordering::Relaxed);
    }

    fn fetch(&mut self, Fetch { hashes, depth, answer }: Fetch) {
        let Some(first) = hashes.first().copied() else { return };
        while self.staged.load(Ordering::Relaxed) >= self.staged_max {
            thread::sleep(STAGED_LOOK);
        }
        let (began, mut blocks) = (Instant::now(), Vec::with_capacity(hashes.len()));
        let (mut missing, damaged) = (None, self.folder.damaged());
        let mut chain = hashes.into_iter().zip(depth..);
        for (hash, depth) in chain.by_ref() {
            let Some(content) = self.folder.load(&hash, depth) else {
                self.counters.misses.fetch_add(1, Ordering::Relaxed);
                missing = Some(hash);
                break;
            };
            self.counters.hits.fetch_add(1, Ordering::Relaxed);
            blocks.push((hash, content));
        }
        if self.folder.damaged() > damaged {
            // What damaged one may have damaged others: they are deleted now, and written again together.
            for (hash, depth) in chain {
                self.folder.load(&hash, depth);
            }
        }
        self.counters.damaged.store(self.folder.damaged(), Ordering::Relaxed);
        // The engine may be gone.
        let bytes = blocks.iter().map(|(_, content)| content.len() as u64).sum();
        let staged = Staged::new(bytes, &self.staged);
        let _ = answer.send(Fetched { first, blocks, missing, time: began.elapsed(), staged });
    }

    fn store(&mut self, hash: BlockHash, depth: usize, content: &[u8]) {
        if self.writes_from.is_some_and(|from| Instant::now() < from) {
            self.counters.refused.fetch_add(1, Ordering::Relaxed);
            return;
        }
        let expected = &self.expected;
        match self.folder.store(&hash, depth, content, |hash| expected.contains_key(hash)) {
            Ok(true) => self.counters.written.fetch_add(1, Ordering::Relaxed),
            Ok(false) => self.counters.refused.fetch_add(1, Ordering::Relaxed),
            Err(error) => {
                tracing::warn!(%error, "KV blocks are not written for a minute");
                self.writes_from = Some(Instant::now() + WRITES_PAUSED);
                self.counters.failed.fetch_add(1, Ordering::Relaxed)
            }
        };
    }

    fn expect(&mut self, hashes: Vec<BlockHash>, change: i64) {
        for hash in hashes {
            let count = self.expected.entry(hash).or_default();
            *count += change;
            if *count <= 0 {
                self.expected.remove(&hash);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kv::BLOCK_TOKENS;

    #[test]
    fn reads_wait_until_earlier_ones_are_taken() {
        let place = tempfile::tempdir().expect("a folder");
        let limits = FolderLimits { bytes_max: 1 << 20, free_min: 0 };
        let hash = |number: u32| BlockHash::root("class", b"").child(&[number; BLOCK_TOKENS]);
        let mut folder = BlockFolder::open(place.path(), limits).expect("it is empty");
        for number in 0..3 {
            folder.store(&hash(number), 0, &[7; 100], |_| false).expect("it is written");
        }
        let cache = DiskCache::open_with(place.path(), limits, 150).expect("it can be used");
        let (answer, answers) = mpsc::channel();
        for number in 0..3 {
            let (hashes, answer) = (vec![hash(number)], answer.clone());
            assert!(cache.fetch(Fetch { hashes, depth: 0, answer }));
        }
        let next = |within| answers.recv_timeout(Duration::from_millis(within)).ok();
        let (first, second) = (next(5000).expect("room"), next(5000).expect("still room"));
        assert!(next(50).is_none(), "200 bytes were not taken");
        assert_eq!(first.take().0, [(hash(0), vec![7; 100])]);
        let third = next(5000).expect("one was taken");
        drop((second, third));
        assert_eq!(cache.stats().hits, 3);
    }
}
