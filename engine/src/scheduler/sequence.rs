//! One sequence in the scheduler: tokens, block table, state.

use super::Fork;
use crate::kv::{
    BLOCK_TOKENS, BlockCache, BlockHash, BlockId, BlockTable, LayerGroups, StateCache,
};

/// Order of service between requests. Within a priority, earlier requests are served first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub enum Priority {
    /// Served before the others.
    High,
    /// The default.
    #[default]
    Normal,
    /// Served after the others, but never starved (see [the module](super)).
    Low,
}

impl Priority {
    /// Every priority, in order of service.
    pub const ALL: [Self; 3] = [Self::High, Self::Normal, Self::Low];
}

/// Identifier of a sequence. A smaller one is served first and preempted last.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SequenceId {
    /// Priority of the request.
    pub priority: Priority,
    /// Number of the request, in order of arrival.
    pub request: u64,
    /// Index of the choice among the request's `n`.
    pub choice: u32,
}

/// State of a sequence. Finished sequences are no longer in the scheduler.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// Holds no blocks; ends at admission.
    Pending,
    /// Some tokens have no keys and values yet; ends with the step that computes the last of these.
    Prefilling,
    /// Only the newest token has no keys and values; one token per step.
    Decoding,
}

/// A state to keep: that after a position at the end of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct KeptState {
    pub position: usize,
    /// Whether other sequences have the same tokens up to it. Otherwise it is for a text that continues this one.
    pub is_shared: bool,
}

/// A step of a sequence with drafts and a state: the state after the drafts is written to another slot, and that before them is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Trial {
    /// The slot of the state after the drafts.
    pub slot: u32,
    /// Position of the first draft, and after the last.
    pub first: usize,
    pub end: usize,
}

/// A sequence inside the scheduler.
#[derive(Debug, Clone)]
pub(super) struct Sequence {
    /// The prompt, then the generated tokens; while a step runs, also its drafts.
    pub tokens: Vec<u32>,
    /// Tokens that may follow, to be computed by the next step.
    pub proposed: Vec<u32>,
    /// Number of drafts at the end of `tokens`.
    pub drafts: usize,
    /// Number of leading positions with keys and values in the blocks.
    pub computed: usize,
    /// Its blocks; without any while it is pending.
    pub blocks: BlockTable,
    /// The groups of layers that have blocks.
    pub groups: LayerGroups,
    /// Start of the hash chain.
    pub root: BlockHash,
    /// Hashes of the leading full blocks of `tokens`, as far as they were needed.
    pub hashes: Vec<BlockHash>,
    /// Number of leading blocks that the cache counts as those of a waiting sequence.
    pub expected: usize,
    /// Leading full blocks that are in the prefix cache, or that were there already.
    pub named: usize,
    pub state: State,
    /// Its place among the running sequences, while it is one.
    pub slot: Option<u32>,
    /// The slot of the kept state that it begins with, until it has one of its own.
    pub begins_with: Option<u32>,
    /// Positions after which a state is to be kept, in ascending order.
    pub keep_after: Vec<KeptState>,
    /// States that the planned chunk keeps: tokens of the chunk before each, and its reserved slot.
    pub saves: Vec<(usize, u32)>,
    /// The drafts of the last step, until it is known which were accepted.
    pub trial: Option<Trial>,
    /// Steps without work while admitted, and preemptions, since the newest token.
    pub stalls: u32,
}

impl Sequence {
    pub fn new(tokens: Vec<u32>, root: BlockHash, groups: LayerGroups) -> Self {
        Self {
            tokens,
            proposed: Vec::new(),
            drafts: 0,
            computed: 0,
            blocks: BlockTable::new(groups),
            groups,
            root,
            hashes: Vec::new(),
            expected: 0,
            named: 0,
            state: State::Pending,
            slot: None,
            begins_with: None,
            keep_after: Vec::new(),
            saves: Vec::new(),
            trial: None,
            stalls: 0,
        }
    }

    /// Returns a sequence that continues from the same position and holds blocks, too: the same ones, or others with
    /// their contents, for which it adds copies to make. `None` if there are too few blocks for copies.
    pub fn fork(
        &self,
        kind: Fork,
        cache: &mut BlockCache,
        copies: &mut Vec<(BlockId, BlockId)>,
    ) -> Option<Self> {
        let blocks = match kind {
            Fork::Shared => {
                self.blocks.held().for_each(|block| cache.retain(block));
                self.blocks.clone()
            }
            Fork::Deep => self.blocks.copied(cache, copies)?,
        };
        let Self { computed, state, .. } = *self;
        Some(Self { blocks, computed, state, ..self.unplaced() })
    }

    /// Returns a pending sequence with the same tokens, which holds no blocks.
    pub fn unplaced(&self) -> Self {
        let hashes = self.hashes.clone();
        Self { hashes, ..Self::new(self.tokens.clone(), self.root, self.groups) }
    }

    /// Appends up to `most` of the proposed drafts to the tokens.
    pub fn add_drafts(&mut self, most: usize) {
        self.drafts = self.proposed.len().min(most);
        self.tokens.extend_from_slice(&self.proposed[..self.drafts]);
    }

    /// Removes the drafts from the tokens.
    pub fn drop_drafts(&mut self) {
        self.tokens.truncate(self.tokens.len() - self.drafts);
        self.drafts = 0;
    }

    /// Sets the positions after which a state is to be kept: behind the blocks that others share, and behind the last whole block
    /// before the last token. A state of the first `found` blocks is there.
    pub fn keep_states(&mut self, found: usize, shared: usize) {
        let last = (self.tokens.len() - 1) / BLOCK_TOKENS;
        let shared = shared.min(last);
        let of =
            |blocks: usize, is_shared| KeptState { position: blocks * BLOCK_TOKENS, is_shared };
        self.keep_after.clear();
        self.keep_after.extend((shared > found).then(|| of(shared, true)));
        self.keep_after.extend((last > found.max(shared)).then(|| of(last, false)));
    }

    /// Returns the last blocks before the states that it is to keep.
    pub fn hashes_to_keep(&self) -> impl Iterator<Item = BlockHash> {
        let positions = self.keep_after.iter().map(|kept| kept.position);
        positions.map(|position| self.hashes[position / BLOCK_TOKENS - 1])
    }

    /// Forgets the states of recurrent layers that it has or is to keep, and returns the reserved slots.
    pub fn drop_states(&mut self, states: &mut StateCache, spare: &mut Vec<u32>) {
        self.begins_with = None;
        self.keep_after.clear();
        match self.trial.take() {
            // The state before the drafts goes into its own slot.
            Some(trial) => {
                spare.push(trial.slot);
                self.saves.clear();
            }
            None => self.saves.drain(..).for_each(|(_, slot)| states.release(slot)),
        }
    }

    /// Writes the state after the drafts of a chunk, from the first one to `end`, to a spare slot, and keeps the one before them.
    pub fn try_drafts(&mut self, slot: u32, (start, end): (usize, usize)) {
        let first = end - self.drafts;
        self.trial = Some(Trial { slot, first, end });
        self.saves.clear();
        self.saves.extend(self.slot.map(|own| (first - start, own)));
    }

    /// Decides on the state after the last step: that after all drafts, if all were accepted, or else that before them. Returns the
    /// slot of the other one.
    pub fn settle_trial(&mut self) -> Option<u32> {
        let Trial { slot, first, end } = self.trial.take()?;
        if self.computed == end {
            return self.slot.replace(slot);
        }
        self.computed = first;
        Some(slot)
    }

    /// Returns the number of tokens without keys and values.
    pub fn left(&self) -> usize {
        self.tokens.len() - self.computed
    }

    /// Returns the hashes of all full blocks.
    pub fn full_blocks(&mut self) -> &[BlockHash] {
        self.hash_blocks(self.tokens.len() / BLOCK_TOKENS)
    }

    /// Records in the cache that the sequence waits for its full blocks.
    pub fn expect(&mut self, cache: &mut BlockCache) {
        let (blocks, groups) = (self.full_blocks().len(), self.groups);
        cache.expect(&self.hashes[..blocks], groups);
        self.expected = blocks;
    }

    /// Records in the cache that the sequence waits no more, if it did.
    pub fn unexpect(&mut self, cache: &mut BlockCache) {
        // It may have become longer since: a choice that starts while others wait.
        let blocks = std::mem::take(&mut self.expected);
        cache.unexpect(&self.hashes[..blocks], self.groups);
    }

    /// Extends `hashes` to the first `count` blocks, all of which must be full.
    pub fn hash_blocks(&mut self, count: usize) -> &[BlockHash] {
        while self.hashes.len() < count {
            let start = self.hashes.len() * BLOCK_TOKENS;
            let parent = self.hashes.last().unwrap_or(&self.root);
            self.hashes.push(parent.child(&self.tokens[start..start + BLOCK_TOKENS]));
        }
        &self.hashes[..count]
    }
}
