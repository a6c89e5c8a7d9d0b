//! [`BlockTiers`]: host memory, a folder and other workers behind a thread, for the engines of one process.

#[cfg(test)]
mod tests;

use std::{
    collections::{HashMap, VecDeque},
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
        mpsc::{self, Receiver, Sender, SyncSender, TrySendError},
    },
    thread,
    time::{Duration, Instant},
};

use super::{
    BlockFolder, FolderError, FolderLimits, TierStats, file, host::HostBlocks, stats::Counters,
};
use crate::kv::BlockHash;

/// Blocks that wait to be written; more are not written.
const WRITES_MAX: usize = 64;
/// Requests that wait for the thread.
const REQUESTS_MAX: usize = 4096;
/// Bytes of blocks that were read and not taken yet; further reads wait.
const STAGED_MAX: u64 = 64 << 20;
/// Longest wait for that; what is read for an engine that has stopped is not taken.
const STAGED_WAIT: Duration = Duration::from_secs(1);
/// Contents that the engines have taken and that later ones are read into: new memory takes longer than reading.
const SPARE_MAX: usize = 16;
/// Time of reads from other workers in one fetch.
const REMOTE_WITHIN: Duration = Duration::from_millis(500);
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

/// Reads blocks from elsewhere.
pub trait RemoteBlocks: Send {
    /// Returns the file of a block, as a [`BlockFolder`] has it. `hash` has the 64 hexadecimal digits of its name. A
    /// file that differs from what was written is found out by the caller.
    fn fetch(&mut self, hash: &str) -> Option<Vec<u8>>;
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
    waiting_writes: Arc<AtomicU64>,
    /// Changes of what is expected, for which there was no room.
    unsent: Arc<Mutex<VecDeque<Expectation>>>,
    spare: Arc<Spare>,
    counters: Arc<Counters>,
}

/// Memory of contents that were taken.
#[derive(Debug, Default)]
struct Spare(Mutex<Vec<Vec<u8>>>);

impl Spare {
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
        let counters = Arc::new(Counters::default());
        let waiting_writes = Arc::new(AtomicU64::new(0));
        let spare = Arc::<Spare>::default();
        let mut worker = Thread {
            host: HostBlocks::new(host_bytes),
            folder,
            remote,
            remote_until: Instant::now(),
            expected: HashMap::new(),
            counters: Arc::clone(&counters),
            waiting_writes: Arc::clone(&waiting_writes),
            staged: Arc::default(),
            staged_max,
            spare: Arc::clone(&spare),
            writes_from: None,
            scan_at: Instant::now() + SCAN_EVERY,
        };
        worker.publish();
        let started = thread::Builder::new().name("kv-disk".to_owned()).spawn(move || {
            worker.run(&inbox);
        });
        started.map_err(|source| FolderError { path, source })?;
        Ok(Self { requests, waiting_writes, unsent: Arc::default(), spare, counters })
    }

    /// Returns what the cache has and did.
    pub fn stats(&self) -> TierStats {
        self.counters.stats()
    }

    /// Starts to read blocks. Returns false if too many requests wait: then there is no answer.
    pub(crate) fn fetch(&self, fetch: Fetch) -> bool {
        self.requests.try_send(Request::Fetch(fetch)).is_ok()
    }

    /// Takes back the memory of a content that was read.
    pub(crate) fn reuse(&self, content: Vec<u8>) {
        self.spare.give(content);
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

struct Thread {
    host: HostBlocks,
    folder: Option<BlockFolder>,
    remote: Option<Box<dyn RemoteBlocks>>,
    /// End of the reads from other workers in this fetch.
    remote_until: Instant,
    /// Waiting requests that will use each block.
    expected: HashMap<BlockHash, i64>,
    counters: Arc<Counters>,
    waiting_writes: Arc<AtomicU64>,
    /// Bytes of blocks that were read and not taken yet.
    staged: Arc<AtomicU64>,
    staged_max: u64,
    spare: Arc<Spare>,
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
                if let Some(Err(error)) = self.folder.as_mut().map(BlockFolder::scan) {
                    tracing::warn!(%error, "the KV cache folder was not listed");
                }
                self.scan_at = Instant::now() + SCAN_EVERY;
            }
            self.publish();
        }
    }

    fn publish(&self) {
        let usage = self.folder.as_ref().map(BlockFolder::usage).unwrap_or_default();
        self.counters.blocks.store(usage.blocks, Ordering::Relaxed);
        self.counters.bytes.store(usage.bytes, Ordering::Relaxed);
        self.counters.host_bytes.store(self.host.bytes(), Ordering::Relaxed);
        self.counters.damaged.store(self.damaged(), Ordering::Relaxed);
    }

    /// Returns how many files were damaged.
    fn damaged(&self) -> u64 {
        self.folder.as_ref().map_or(0, BlockFolder::damaged)
    }

    /// Returns a block from the first tier that has it. The faster tiers have it from then on.
    fn load(&mut self, hash: &BlockHash, depth: usize) -> Option<Vec<u8>> {
        if let Some(content) = self.host.get(hash) {
            self.counters.host_hits.fetch_add(1, Ordering::Relaxed);
            return Some(content);
        }
        let of_folder = self.folder.as_mut();
        let content = of_folder.and_then(|folder| folder.load_into(hash, depth, self.spare.take()));
        let content = content.or_else(|| self.load_remote(hash, depth))?;
        self.host.insert(*hash, &content, self.expected.contains_key(hash));
        Some(content)
    }

    fn load_remote(&mut self, hash: &BlockHash, depth: usize) -> Option<Vec<u8>> {
        if Instant::now() >= self.remote_until {
            return None;
        }
        let file = self.remote.as_mut()?.fetch(&hash.to_string())?;
        let Some(content) = file::content(hash, &file) else {
            tracing::warn!(%hash, "another worker's KV block is damaged");
            return None;
        };
        self.counters.remote_hits.fetch_add(1, Ordering::Relaxed);
        self.write(hash, depth, content);
        Some(content.to_vec())
    }

    fn fetch(&mut self, Fetch { hashes, depth, answer }: Fetch) {
        let Some(first) = hashes.first().copied() else { return };
        let has_room = self.wait_for_room();
        let (began, mut blocks) = (Instant::now(), Vec::with_capacity(hashes.len()));
        let (mut missing, damaged) = ((!has_room).then_some(first), self.damaged());
        self.remote_until = began + REMOTE_WITHIN;
        let mut chain = hashes.into_iter().zip(depth..);
        for (hash, depth) in chain.by_ref().take_while(|_| has_room) {
            let Some(content) = self.load(&hash, depth) else {
                self.counters.misses.fetch_add(1, Ordering::Relaxed);
                missing = Some(hash);
                break;
            };
            self.counters.hits.fetch_add(1, Ordering::Relaxed);
            blocks.push((hash, content));
        }
        if self.damaged() > damaged {
            // What damaged one may have damaged others: they are deleted now, and written again together.
            for (hash, depth) in chain {
                self.folder.as_mut().and_then(|folder| folder.load(&hash, depth));
            }
        }
        // The receiver of the answer may read the counts.
        self.publish();
        // The engine may be gone.
        let bytes = blocks.iter().map(|(_, content)| content.len() as u64).sum();
        let staged = Staged::new(bytes, &self.staged);
        let _ = answer.send(Fetched { first, blocks, missing, time: began.elapsed(), staged });
    }

    /// Waits until what was read before is taken; false if that takes too long.
    fn wait_for_room(&self) -> bool {
        let began = Instant::now();
        while self.staged.load(Ordering::Relaxed) >= self.staged_max {
            if began.elapsed() >= STAGED_WAIT {
                return false;
            }
            thread::sleep(STAGED_LOOK);
        }
        true
    }

    fn store(&mut self, hash: BlockHash, depth: usize, content: &[u8]) {
        self.host.insert(hash, content, self.expected.contains_key(&hash));
        self.write(&hash, depth, content);
    }

    /// Writes a block to the folder, if there is one.
    fn write(&mut self, hash: &BlockHash, depth: usize, content: &[u8]) {
        let Some(folder) = &mut self.folder else { return };
        if self.writes_from.is_some_and(|from| Instant::now() < from) {
            self.counters.refused.fetch_add(1, Ordering::Relaxed);
            return;
        }
        let expected = &self.expected;
        match folder.store(hash, depth, content, |hash| expected.contains_key(hash)) {
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
            let is_expected = *count > 0;
            if !is_expected {
                self.expected.remove(&hash);
            }
            self.host.set_expected(&hash, is_expected);
        }
    }
}
