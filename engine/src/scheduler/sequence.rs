//! One sequence as the scheduler sees it: tokens, block table, state.

use crate::kv::{BLOCK_TOKENS, BlockHash, BlockId};

/// Who goes first. Within one priority, earlier requests do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub enum Priority {
    /// Before the others.
    High,
    /// The default.
    #[default]
    Normal,
    /// After the others, but still served (see [`Scheduler`](super::Scheduler)).
    Low,
}

impl Priority {
    /// Every priority, first served first.
    pub const ALL: [Self; 3] = [Self::High, Self::Normal, Self::Low];
}

/// Name of a sequence, and its place in line: the smaller is served first and preempted last.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SequenceId {
    /// Priority of the request.
    pub priority: Priority,
    /// Number of the request; grows with arrival.
    pub request: u64,
    /// Which of the request's `n` choices this is.
    pub choice: u32,
}

/// Where a live sequence stands. Ended ones are no longer in the scheduler.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// Holds no blocks; admission moves it out.
    Pending,
    /// Has tokens whose keys and values are missing; the step that computes the last moves it out.
    Prefilling,
    /// Lacks only its newest token; one token a step.
    Decoding,
}

/// A sequence inside the scheduler.
#[derive(Debug, Clone)]
pub(super) struct Sequence {
    /// Prompt, then what was generated.
    pub tokens: Vec<u32>,
    /// Positions whose keys and values are in the blocks.
    pub computed: usize,
    /// Block table: block `i` holds positions `16 i .. 16 i + 16`.
    pub blocks: Vec<BlockId>,
    /// Start of the hash chain.
    pub root: BlockHash,
    /// Names of the leading full blocks of `tokens`, as far as they were needed.
    pub hashes: Vec<BlockHash>,
    pub state: State,
    /// Steps without work while admitted, and preemptions, since the newest token.
    pub stalls: u32,
}

impl Sequence {
    pub fn new(tokens: Vec<u32>, root: BlockHash) -> Self {
        Self {
            tokens,
            computed: 0,
            blocks: Vec::new(),
            root,
            hashes: Vec::new(),
            state: State::Pending,
            stalls: 0,
        }
    }

    /// Extends `hashes` to the first `count` blocks, all of which must be full.
    pub fn name_blocks(&mut self, count: usize) -> &[BlockHash] {
        while self.hashes.len() < count {
            let start = self.hashes.len() * BLOCK_TOKENS;
            let parent = self.hashes.last().unwrap_or(&self.root);
            self.hashes.push(parent.child(&self.tokens[start..start + BLOCK_TOKENS]));
        }
        &self.hashes[..count]
    }
}
