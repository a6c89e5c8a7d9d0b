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
        let folder = BlockFolder::open(path, limits)?;
        let (requests, inbox) = mpsc::sync_channel(REQUESTS_MAX);
        let counters = Arc::new(Counters::default());
        let waiting_writes = Arc::new(AtomicU64::new(0));
        let mut worker = Thread {
            folder,
            expected: HashMap::new(),
            counters: Arc::clone(&counters),
            waiting_writes: Arc::clone(&waiting_writes),
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
        let _ = answer.send(Fetched { first, blocks, missing, time: began.elapsed() });
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
