//! The engine's use of a [`BlockTiers`]: what a new prompt needs is read before its sequence is scheduled, and blocks
//! that a second prompt uses are written.
//!
//! Nothing here waits for the disk while the engine has work. Blocks are read some at a time and become cached
//! blocks without a holder, which the admission of the sequence then finds; if they are evicted before, they are
//! computed again. Prompts that begin in the same way wait for one read.
//!
//! A block is worth reading and writing only where that takes less time than computing it; both are measured.

use std::{
    collections::{BTreeMap, HashSet, VecDeque},
    sync::mpsc::{self, Receiver, Sender},
    time::Duration,
};

use crate::{
    backend::Backend,
    kv::{
        BLOCK_TOKENS, BlockHash, BlockId,
        disk::{BlockTiers, Fetch, Fetched},
    },
    scheduler::{Scheduler, SequenceId},
};

/// Blocks of one read: few, so that they are made cached blocks while the next ones are read.
const FETCH_BLOCKS: usize = 8;
/// Reads of a sequence that are started before the first of them has ended, once one has found blocks.
const READS_AHEAD: usize = 3;
/// Tokens of a step whose time is measured: smaller steps mostly read weights.
const TIMED_TOKENS: usize = 32;
/// Blocks copied for writing after one step, while the engine has work.
const WRITES_PER_STEP: usize = 4;
/// Blocks that are remembered as written.
const WRITTEN_MAX: usize = 1 << 20;
/// Reading must take at most this share of the time of computing.
const READ_SHARE_MAX: f64 = 0.8;
/// While reading is slower than computing, one prompt in this many is looked up all the same, to measure again.
const LOOK_EVERY: u64 = 64;
/// Weight of a new measurement.
const WEIGHT: f64 = 0.2;
/// Longest wait for a read when the engine has nothing else to do.
const IDLE_WAIT: Duration = Duration::from_millis(5);

/// A sequence whose blocks are being read.
#[derive(Clone)]
struct Waiting {
    id: SequenceId,
    tokens: Vec<u32>,
    root: BlockHash,
    /// The blocks of the prompt.
    hashes: Vec<BlockHash>,
    /// Reads that may still be started for it: blocks may be evicted before the sequence is scheduled.
    reads_left: usize,
    /// The block that was read first: a sequence that still waits for a later one has found blocks.
    first_read: Option<usize>,
}

/// Blocks to read and to write.
pub(super) struct Stored {
    disk: BlockTiers,
    answers: (Sender<Fetched>, Receiver<Fetched>),
    /// An answer that arrived while the engine had nothing else to do.
    arrived: Option<Fetched>,
    /// In order of arrival.
    waiting: VecDeque<Waiting>,
    /// First blocks of the reads in progress.
    reading: HashSet<BlockHash>,
    /// Blocks to write, with the number of blocks before them in their chain.
    to_write: VecDeque<(BlockHash, usize, BlockId)>,
    /// Blocks that the folder has or is about to have.
    written: HashSet<BlockHash>,
    /// Blocks of unfinished requests.
    expected: BTreeMap<u64, Vec<BlockHash>>, // (request)
    read_seconds: Option<f64>,    // per block
    compute_seconds: Option<f64>, // per token
    prompts: u64,
    /// Blocks that became cached blocks.
    installed: u64,
}

impl Stored {
    pub fn new(disk: BlockTiers) -> Self {
        Self {
            disk,
            answers: mpsc::channel(),
            arrived: None,
            waiting: VecDeque::new(),
            reading: HashSet::new(),
            to_write: VecDeque::new(),
            written: HashSet::new(),
            expected: BTreeMap::new(),
            read_seconds: None,
            compute_seconds: None,
            prompts: 0,
            installed: 0,
        }
    }

    /// Returns the same for a fork of the engine: it waits for the same blocks and knows the same times.
    pub fn fork(&self) -> Self {
        let mut fork = Self::new(self.disk.clone());
        fork.waiting.clone_from(&self.waiting);
        for (request, hashes) in &self.expected {
            fork.expect(*request, hashes.clone());
        }
        (fork.read_seconds, fork.compute_seconds) = (self.read_seconds, self.compute_seconds);
        fork.prompts = self.prompts;
        fork
    }

    /// Lets a request, by its first sequence, wait for the same blocks as another one, if that waits.
    pub fn fork_request(&mut self, id: SequenceId, child: SequenceId) {
        if let Some(hashes) = self.expected.get(&id.request) {
            self.expect(child.request, hashes.clone());
        }
        let waiting = self.waiting.iter().find(|waiting| waiting.id == id);
        if let Some(waiting) = waiting.cloned() {
            self.waiting.push_back(Waiting { id: child, ..waiting });
        }
    }

    /// Notes that a request uses these blocks.
    fn expect(&mut self, request: u64, hashes: Vec<BlockHash>) {
        self.disk.expect(hashes.clone(), 1);
        self.expected.insert(request, hashes);
    }

    pub fn disk(&self) -> &BlockTiers {
        &self.disk
    }

    /// Returns the number of tokens with keys and values that were read.
    pub fn read_tokens(&self) -> u64 {
        self.installed * BLOCK_TOKENS as u64
    }

    /// Returns whether no sequence waits.
    pub fn is_idle(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Adds a sequence to the scheduler, or keeps it until its blocks are read.
    pub fn add(
        &mut self,
        scheduler: &mut Scheduler,
        id: SequenceId,
        tokens: Vec<u32>,
        root: BlockHash,
    ) {
        // The last token is always computed.
        let blocks = (tokens.len() - 1) / BLOCK_TOKENS;
        self.prompts += 1;
        let looks = self.is_worth_it() || self.prompts.is_multiple_of(LOOK_EVERY);
        if blocks == 0 || !looks {
            return scheduler.add(id, tokens, root);
        }
        let hashes = BlockHash::chain(root, &tokens[..blocks * BLOCK_TOKENS]);
        self.expect(id.request, hashes.clone());
        let reads_left = 2 * hashes.len().div_ceil(FETCH_BLOCKS);
        self.waiting.push_back(Waiting { id, tokens, root, hashes, reads_left, first_read: None });
    }

    /// Forgets a request: it has ended.
    pub fn remove(&mut self, request: u64) {
        self.waiting.retain(|waiting| waiting.id.request != request);
        if let Some(hashes) = self.expected.remove(&request) {
            self.disk.expect(hashes, -1);
        }
    }

    /// Waits for a read, for a moment.
    pub fn wait(&mut self) {
        if self.arrived.is_none() {
            self.arrived = self.answers.1.recv_timeout(IDLE_WAIT).ok();
        }
    }

    /// Makes cached blocks of what was read, starts further reads, and gives the scheduler the sequences that have
    /// all there is.
    pub fn settle(&mut self, scheduler: &mut Scheduler, backend: &mut dyn Backend) {
        let mut missing = HashSet::new();
        while let Some(fetched) = self.arrived.take().or_else(|| self.answers.1.try_recv().ok()) {
            self.reading.remove(&fetched.first);
            missing.extend(self.install(fetched, scheduler, backend));
        }
        let mut left = VecDeque::with_capacity(self.waiting.len());
        while let Some(mut waiting) = self.waiting.pop_front() {
            let next = {
                let cache = scheduler.cache();
                waiting.hashes.iter().position(|hash| cache.peek(hash).is_none())
            };
            let is_ready = match next {
                None => true,
                Some(next) => {
                    let first = waiting.hashes[next];
                    missing.contains(&first) || !self.read_from(&mut waiting, next)
                }
            };
            match is_ready {
                true => scheduler.add(waiting.id, waiting.tokens, waiting.root),
                false => left.push_back(waiting),
            }
        }
        self.waiting = left;
    }

    /// Starts to read a sequence's next blocks, and blocks after them, as far as they are not being read; returns false if
    /// that is not possible.
    fn read_from(&mut self, waiting: &mut Waiting, next: usize) -> bool {
        if !self.read(waiting, next) {
            return false;
        }
        let has_found = *waiting.first_read.get_or_insert(next) < next;
        let ahead = if has_found { READS_AHEAD } else { 0 };
        let starts = (next..waiting.hashes.len()).step_by(FETCH_BLOCKS).skip(1).take(ahead);
        for start in starts {
            if !self.read(waiting, start) {
                break;
            }
        }
        true
    }

    /// Starts to read some of a sequence's blocks, unless they are being read; returns false if that is not possible.
    fn read(&mut self, waiting: &mut Waiting, next: usize) -> bool {
        if self.reading.contains(&waiting.hashes[next]) {
            return true;
        }
        if waiting.reads_left == 0 {
            return false;
        }
        waiting.reads_left -= 1;
        let end = waiting.hashes.len().min(next + FETCH_BLOCKS);
        let hashes = waiting.hashes[next..end].to_vec();
        let (first, answer) = (hashes[0], self.answers.0.clone());
        let starts = self.disk.fetch(Fetch { hashes, depth: next, answer });
        if starts {
            self.reading.insert(first);
        }
        starts
    }

    /// Writes what was read to blocks of the backend. Returns the block at which the read ended without one.
    fn install(
        &mut self,
        fetched: Fetched,
        scheduler: &Scheduler,
        backend: &mut dyn Backend,
    ) -> Option<BlockHash> {
        let time = fetched.time.as_secs_f64();
        let (blocks, missing) = fetched.take();
        // A miss that took longer than a block usually does counts, too.
        let is_slow = self.read_seconds.is_some_and(|mean| time > mean);
        if !blocks.is_empty() || is_slow {
            update(&mut self.read_seconds, time / blocks.len().max(1) as f64);
        }
        let (mut cache, mut table) = (scheduler.cache(), Vec::with_capacity(blocks.len()));
        let mut ended = missing;
        for (hash, content) in blocks {
            if cache.peek(&hash).is_some() {
                continue;
            }
            // No room, or not of this backend: this block and the following ones are computed.
            let block =
                (content.len() == backend.block_bytes()).then(|| cache.allocate()).flatten();
            let Some(block) = block else {
                ended = Some(hash);
                break;
            };
            table.push(block);
            if backend.write_block(block, &content).is_err() {
                ended = Some(hash);
                break;
            }
            cache.register(hash, block);
            self.disk.reuse(content);
            self.remember(hash);
            self.installed += 1;
        }
        cache.release_all(&mut table);
        ended
    }

    /// Notes blocks that a second prompt uses, the first ones of their chain.
    pub fn note_shared(&mut self, blocks: impl Iterator<Item = (BlockHash, BlockId)>) {
        if !self.is_worth_it() {
            return;
        }
        for (depth, (hash, block)) in blocks.enumerate() {
            if self.remember(hash) {
                self.to_write.push_back((hash, depth, block));
            }
        }
    }

    /// Copies some of the noted blocks for writing.
    pub fn write_some(&mut self, scheduler: &Scheduler, backend: &mut dyn Backend, is_idle: bool) {
        let most = if is_idle { usize::MAX } else { WRITES_PER_STEP };
        for _ in 0..most {
            if !self.disk.has_room() {
                return;
            }
            let Some((hash, depth, block)) = self.to_write.pop_front() else { return };
            let mut content = Vec::with_capacity(backend.block_bytes());
            // Locked until it is read, so that it is not evicted before.
            let cache = scheduler.cache();
            let is_there = cache.peek(&hash) == Some(block);
            if is_there && backend.read_block(block, &mut content).is_ok() {
                self.disk.store(hash, depth, content);
            } else {
                // It was evicted meanwhile.
                self.written.remove(&hash);
            }
        }
    }

    /// Records how long a step with this many tokens took.
    pub fn record_time(&mut self, tokens: usize, time: Duration) {
        if tokens >= TIMED_TOKENS {
            update(&mut self.compute_seconds, time.as_secs_f64() / tokens as f64);
        }
    }

    /// Returns whether reading a block takes less time than computing it, as far as that is known.
    fn is_worth_it(&self) -> bool {
        match (self.read_seconds, self.compute_seconds) {
            (Some(read), Some(compute)) => read <= READ_SHARE_MAX * compute * BLOCK_TOKENS as f64,
            _ => true,
        }
    }

    /// Remembers that the folder has a block; returns false if that was known.
    fn remember(&mut self, hash: BlockHash) -> bool {
        if self.written.len() >= WRITTEN_MAX {
            self.written.clear();
        }
        self.written.insert(hash)
    }
}

impl Drop for Stored {
    fn drop(&mut self) {
        for hashes in std::mem::take(&mut self.expected).into_values() {
            self.disk.expect(hashes, -1);
        }
    }
}

/// Adds a measurement to a mean.
fn update(mean: &mut Option<f64>, value: f64) {
    *mean = Some(mean.map_or(value, |mean| mean + WEIGHT * (value - mean)));
}
