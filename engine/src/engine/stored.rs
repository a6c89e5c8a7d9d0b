//! The engine's use of a [`BlockTiers`]: what a new prompt needs is read before its sequence is scheduled, and blocks
//! that a second prompt uses are written.
//!
//! Nothing here waits for the disk while the engine has work. Blocks are read some at a time and become cached
//! blocks without a holder, which the admission of the sequence then finds; if they are evicted before, they are
//! computed again. Prompts that begin in the same way wait for one read.
//!
//! Models with recurrent layers need a state besides blocks (`states.rs`), and layers with a window their last blocks alone
//! (`windows.rs`).
//!
//! A block is worth reading and writing only where that takes less time than computing it; both are measured.

mod states;
mod windows;

use std::{
    collections::{BTreeMap, HashMap, HashSet, VecDeque},
    sync::mpsc::{self, Receiver, Sender},
    time::Duration,
};

use crate::{
    backend::Backend,
    kv::{
        BLOCK_TOKENS, BlockHash, BlockId,
        disk::{Answer, BlockTiers, Fetch, Fetched, Find, Found},
    },
    scheduler::{Scheduler, SequenceId},
};
use windows::names_of_windows;

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

/// How far the search is for the blocks of a sequence after which it can go on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Search {
    /// Not begun.
    Ahead,
    /// The first name that was asked for.
    Asked(BlockHash),
    /// The blocks of the sequence end where it can go on, or all layers need all blocks and nothing else.
    Done,
}

/// A sequence whose blocks are being read.
#[derive(Clone)]
struct Waiting {
    id: SequenceId,
    tokens: Vec<u32>,
    root: BlockHash,
    /// The blocks of the prompt, as far as they are of use.
    hashes: Vec<BlockHash>,
    /// Reads that may still be started for it: blocks may be evicted before the sequence is scheduled.
    reads_left: usize,
    /// The block that was read first: a sequence that still waits for a later one has found blocks.
    first_read: Option<usize>,
    search: Search,
    /// Numbers of leading blocks that it can go on after, of layers with a window; in ascending order.
    ends: Vec<usize>,
}

/// What is written.
enum ToWrite {
    Block(BlockId),
    /// The state after the block.
    State,
}

/// Blocks to read and to write.
pub(super) struct Stored {
    disk: BlockTiers,
    answers: (Sender<Answer>, Receiver<Answer>),
    /// An answer that arrived while the engine had nothing else to do.
    arrived: Option<Answer>,
    /// In order of arrival.
    waiting: VecDeque<Waiting>,
    /// First blocks of the reads in progress.
    reading: HashSet<BlockHash>,
    /// The last block before each state that is being read, and their number, by the name of the state.
    reading_states: HashMap<BlockHash, (BlockHash, usize)>,
    /// Bytes of a state and of a block, of models with recurrent layers.
    state_bytes: Option<(usize, usize)>,
    /// What to write, with the number of blocks before it in its chain.
    to_write: VecDeque<(BlockHash, usize, ToWrite)>,
    /// Blocks and states that the folder has or is about to have.
    written: HashSet<BlockHash>,
    /// Blocks and states of unfinished requests.
    expected: BTreeMap<u64, Vec<BlockHash>>, // (request)
    read_seconds: Option<f64>,    // per block
    compute_seconds: Option<f64>, // per token
    prompts: u64,
    /// Blocks that became cached blocks.
    installed: u64,
}

impl Stored {
    /// `state_bytes` are those of a state and of a block, of models with recurrent layers.
    pub fn new(disk: BlockTiers, state_bytes: Option<(usize, usize)>) -> Self {
        Self {
            disk,
            answers: mpsc::channel(),
            arrived: None,
            waiting: VecDeque::new(),
            reading: HashSet::new(),
            reading_states: HashMap::new(),
            state_bytes,
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
        let mut fork = Self::new(self.disk.clone(), self.state_bytes);
        // Answers to its searches go to the original.
        let again = |waiting: &Waiting| match waiting.search {
            Search::Asked(_) => Waiting { search: Search::Ahead, ..waiting.clone() },
            Search::Ahead | Search::Done => waiting.clone(),
        };
        fork.waiting = self.waiting.iter().map(again).collect();
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

    /// Notes that a request uses another name, too. No effect if that was known.
    fn expect_more(&mut self, request: u64, name: BlockHash) {
        let hashes = self.expected.get_mut(&request);
        if let Some(hashes) = hashes.filter(|hashes| !hashes.contains(&name)) {
            hashes.push(name);
            self.disk.expect(vec![name], 1);
        }
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
        let groups = scheduler.groups();
        let of_windows = hashes.len() - groups.first_block(blocks * BLOCK_TOKENS).min(blocks);
        let reads = hashes.len().div_ceil(FETCH_BLOCKS)
            + groups.windows * of_windows.div_ceil(FETCH_BLOCKS);
        let reads_left = 2 * reads;
        let searches = self.state_bytes.is_some() || groups.windows > 0;
        let search = if searches { Search::Ahead } else { Search::Done };
        let (first_read, ends) = (None, Vec::new());
        let waiting = Waiting { id, tokens, root, hashes, reads_left, first_read, search, ends };
        self.waiting.push_back(waiting);
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
        let (mut missing, mut found) = (HashSet::new(), HashMap::new());
        while let Some(answer) = self.arrived.take().or_else(|| self.answers.1.try_recv().ok()) {
            let fetched = match answer {
                Answer::Fetched(fetched) => fetched,
                Answer::Found(Found { first, places }) => {
                    found.insert(first, places);
                    continue;
                }
            };
            self.reading.remove(&fetched.first);
            missing.extend(match self.reading_states.remove(&fetched.first) {
                Some(block) => self.install_state(block, fetched, scheduler, backend),
                None => self.install(fetched, scheduler, backend),
            });
        }
        let mut left = VecDeque::with_capacity(self.waiting.len());
        while let Some(mut waiting) = self.waiting.pop_front() {
            if !self.search(&mut waiting, scheduler, |first| found.get(first)) {
                left.push_back(waiting);
                continue;
            }
            let next = {
                let cache = scheduler.cache();
                waiting.hashes.iter().position(|hash| cache.peek(hash).is_none())
            };
            let is_missing = |name: &BlockHash| missing.contains(name);
            if let Some(next) = next
                && !is_missing(&waiting.hashes[next])
                && self.read_from(&mut waiting, next)
            {
                left.push_back(waiting);
                continue;
            }
            let is_ready = match next {
                None => self.has_state(&mut waiting, scheduler, is_missing),
                Some(_) => true,
            };
            waiting.hashes.truncate(next.unwrap_or(waiting.hashes.len()));
            if scheduler.groups().windows > 0 {
                waiting.cut_to_windows();
            }
            let is_ready = is_ready && self.has_windows(&mut waiting, scheduler, is_missing);
            match is_ready {
                true => scheduler.add(waiting.id, waiting.tokens, waiting.root),
                false => left.push_back(waiting),
            }
        }
        self.waiting = left;
    }

    /// Looks for the last blocks after which a sequence can go on, and leaves it the blocks up to there. Returns whether that is
    /// done. `found` returns what a search found that began with a name.
    fn search<'a>(
        &mut self,
        waiting: &mut Waiting,
        scheduler: &Scheduler,
        found: impl Fn(&BlockHash) -> Option<&'a Vec<usize>>,
    ) -> bool {
        let found = match waiting.search {
            Search::Done => return true,
            Search::Ahead => None,
            Search::Asked(first) => match found(&first) {
                None => return false,
                found => found,
            },
        };
        let has_states = self.state_bytes.is_some();
        if found.is_none() {
            let (hashes, most) = match has_states {
                true => (self.names_of_states(waiting, scheduler), 1),
                false => (names_of_windows(waiting, scheduler), usize::MAX),
            };
            let (first, answer) = (hashes.first().copied(), self.answers.0.clone());
            if let Some(first) = first.filter(|_| self.disk.find(Find { hashes, most, answer })) {
                waiting.search = Search::Asked(first);
                return false;
            }
        }
        let found = found.map_or(&[][..], Vec::as_slice);
        match has_states {
            true => self.cut_to_state(waiting, scheduler, found.first().copied()),
            false => waiting.find_ends(scheduler, found),
        }
        waiting.search = Search::Done;
        true
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
        let end = waiting.hashes.len().min(next + FETCH_BLOCKS);
        let hashes = waiting.hashes[next..end].to_vec();
        self.read_names(waiting, hashes, next)
    }

    /// Starts to read blocks with this many blocks before them, or a state, for a sequence, as `read`.
    fn read_names(&mut self, waiting: &mut Waiting, hashes: Vec<BlockHash>, depth: usize) -> bool {
        let (first, answer) = (hashes[0], self.answers.0.clone());
        if self.reading.contains(&first) {
            return true;
        }
        if waiting.reads_left == 0 {
            return false;
        }
        waiting.reads_left -= 1;
        let starts = self.disk.fetch(Fetch { hashes, depth, answer });
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

    /// Notes blocks that a second prompt uses, each with the number of blocks before it in its chain, and the state after them.
    pub fn note_shared(&mut self, blocks: impl Iterator<Item = (usize, BlockHash, BlockId)>) {
        if !self.is_worth_it() {
            return;
        }
        let mut last = None;
        for (depth, hash, block) in blocks {
            last = Some((depth, hash));
            if self.remember(hash) {
                self.to_write.push_back((hash, depth, ToWrite::Block(block)));
            }
        }
        if let Some((depth, hash)) = last.filter(|_| self.state_bytes.is_some())
            && self.remember(hash.of_state())
        {
            self.to_write.push_back((hash, depth, ToWrite::State));
        }
    }

    /// Copies some of what was noted for writing.
    pub fn write_some(&mut self, scheduler: &Scheduler, backend: &mut dyn Backend, is_idle: bool) {
        let most = if is_idle { usize::MAX } else { WRITES_PER_STEP };
        for _ in 0..most {
            if !self.disk.has_room() {
                return;
            }
            let Some((hash, depth, what)) = self.to_write.pop_front() else { return };
            let ToWrite::Block(block) = what else {
                if !self.write_state((hash, depth), scheduler, backend) {
                    // Another one has its place.
                    self.written.remove(&hash.of_state());
                }
                continue;
            };
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

    /// Remembers that the folder has a block or a state; returns false if that was known.
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
