//! Chooses the sequences of the next step and their KV blocks. Pure: no threads, no clock, no device.
//! The engine takes a [`Plan`], runs it, and reports the result.
//!
//! ```text
//!   add ──► Pending ──admit──► Prefilling ──last chunk──► Decoding ──► remove
//!              ▲                   │                         │  (finished, failed, cancelled:
//!              └───── preempt ─────┴─────────────────────────┘   the engine has the reason)
//! ```
//!
//! A step is filled in this order, until its token budget, or the caller's limit of prefill, is used:
//!
//! 1. one token for every decoding sequence, or for as many as the caller's limit of decodes says, with its drafts; with recurrent
//!    layers also the accepted drafts of a step in which others were not;
//! 2. chunks of prefilling and then of newly admitted sequences of the highest priority; other prefilling sequences
//!    have one block's tokens in such a step, which is therefore short;
//! 3. chunks of other sequences that are already prefilling;
//! 4. chunks of newly admitted sequences: by priority 16 : 4 : 1, in order of arrival within a priority.
//!
//! A sequence whose next block this step computes for another one is admitted when that is done, and then has it.
//!
//! With recurrent layers a sequence goes on from the last kept state of its cached blocks, and waits for one that a running sequence is
//! about to keep. States are kept behind the longest run of blocks that another sequence had or waits for, and behind the last whole
//! block of a prompt, which a text that continues it begins with.
//! A step with drafts keeps the state before them: if one is not accepted, the accepted ones are computed again with the next step.
//!
//! A sequence is admitted only if the blocks for all its tokens are available. For one of the highest priority
//! sequences of other priorities are preempted, the newest of the lowest priority first and all but one.
//!
//! If a running sequence needs a block and none is available (cached prefixes are evicted first), the
//! newest sequence of the lowest priority is preempted: its blocks are released, and it is pending
//! again with its tokens. The oldest sequence of the highest priority is never preempted for another,
//! so it always finishes, then the next one does: no starvation.
//!
//! Several schedulers may use the blocks of one storage (`fork.rs`). A sequence that lacks blocks that another
//! scheduler's sequences hold waits for them; one that runs alone in its engine becomes pending for that, and starts
//! again when all the blocks that it needs are available.

mod fork;
mod plan;
mod planned;
mod sequence;
#[cfg(test)]
mod tests;

#[cfg(test)]
use std::collections::HashMap;
use std::{
    collections::{BTreeMap, BTreeSet, HashSet},
    sync::MutexGuard,
};

use crate::{
    backend::{Chunk, LogitsFor, StateSlots},
    kv::{
        BLOCK_TOKENS, BlockCache, BlockHash, BlockId, LayerGroups, SharedCache, StateCache,
        blocks_for,
    },
};

pub use fork::{Fork, ForkCopy};
pub use planned::{Plan, PlannedChunk, Refusal, StepLimits};
use sequence::Sequence;
pub use sequence::{Priority, SequenceId, State};

/// Bounds of a scheduler.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Sequences that may hold blocks at once.
    pub max_sequences: usize,
    /// Tokens of one step; at least `max_sequences`, so that every decoding sequence gets a token.
    pub token_budget: usize,
    /// Whether blocks are reused by content.
    pub prefix_cache: bool,
    /// Whether a sequence that decodes takes the block of its next position a step early, if there are enough.
    pub block_ahead: bool,
    /// Whether the model has recurrent layers: a sequence has a state besides its blocks.
    pub recurrent: bool,
    /// Slots for states that are kept where prefixes end. Without any, models with recurrent layers do not reuse blocks.
    pub kept_states: usize,
    /// The groups of layers that have blocks. Models with recurrent layers have one.
    pub groups: LayerGroups,
    /// Slots for states after drafts: so many sequences with recurrent layers may have drafts in a step.
    pub spare_states: usize,
    /// Steps without work, or preemptions, after which a sequence without a new token fails.
    pub stall_limit: u32,
}

/// Counters since the scheduler was made.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counters {
    /// Tokens with keys and values in the prefix cache at admission.
    pub prefix_hit_tokens: u64,
    /// Tokens that were not found there and had to be computed.
    pub prefix_miss_tokens: u64,
    /// Sequences that became pending again.
    pub preemptions: u64,
}

/// The sequences of an engine and the blocks they hold.
#[derive(Debug)]
pub struct Scheduler {
    limits: Limits,
    cache: SharedCache,
    sequences: BTreeMap<SequenceId, Sequence>,
    /// Places of running sequences, as many as may run, that none has.
    free_slots: Vec<u32>,
    /// Kept states of recurrent layers.
    states: StateCache,
    /// Slots for states after drafts, after those of kept states.
    spare_slots: Vec<u32>,
    /// Pending sequences, in order of service.
    pending: BTreeSet<SequenceId>,
    /// Prefilling and decoding sequences, in order of service.
    running: BTreeSet<SequenceId>,
    /// Full blocks that the prefill chunks of the plan compute.
    computing: HashSet<BlockHash>,
    /// The last blocks before states that running sequences are about to keep.
    keeping: HashSet<BlockHash>,
    /// The last sequence that decoded in a step with a limit of decodes.
    decoded_last: Option<SequenceId>,
    /// Admissions left to each priority in this round.
    credits: [u32; 3], // (priority)
    counters: Counters,
    /// Running sequences at the start of a plan; kept for its memory.
    order: Vec<SequenceId>,
}

impl Scheduler {
    /// Makes a scheduler over `block_count` blocks of a backend's storage.
    pub fn new(limits: Limits, block_count: usize) -> Self {
        let max_sequences = limits.max_sequences.max(1);
        let token_budget = limits.token_budget.max(max_sequences);
        let keeps_states = limits.recurrent && limits.prefix_cache;
        let kept_states = if keeps_states { limits.kept_states } else { 0 };
        let spare_states = if limits.recurrent { limits.spare_states } else { 0 };
        let prefix_cache = limits.prefix_cache && (!limits.recurrent || kept_states > 0);
        let slots = u32::try_from(max_sequences).unwrap_or(u32::MAX);
        Self {
            limits: Limits {
                max_sequences,
                token_budget,
                prefix_cache,
                kept_states,
                spare_states,
                ..limits
            },
            cache: SharedCache::new(BlockCache::new(block_count)),
            sequences: BTreeMap::new(),
            free_slots: (0..slots).rev().collect(),
            states: StateCache::new(slots, kept_states),
            spare_slots: (max_sequences + kept_states..)
                .take(spare_states)
                .map(|slot| slot as u32)
                .collect(),
            pending: BTreeSet::new(),
            running: BTreeSet::new(),
            computing: HashSet::new(),
            keeping: HashSet::new(),
            decoded_last: None,
            credits: [0; 3],
            counters: Counters::default(),
            order: Vec::new(),
        }
    }

    /// Adds a pending sequence. `root` starts the hash chain of its blocks.
    pub fn add(&mut self, id: SequenceId, tokens: Vec<u32>, root: BlockHash) {
        assert!(!tokens.is_empty(), "a sequence has at least one token");
        let sequence = Sequence::new(tokens, root, self.limits.groups);
        let previous = self.sequences.insert(id, sequence);
        assert!(previous.is_none(), "{id:?} was added twice");
        self.pending.insert(id);
        let cache = self.cache.clone();
        self.expect(id, &mut cache.lock());
    }

    /// Records in the cache that a sequence is pending.
    fn expect(&mut self, id: SequenceId, cache: &mut BlockCache) {
        let sequence = self.sequences.get_mut(&id).filter(|_| self.limits.prefix_cache);
        if let Some(sequence) = sequence {
            sequence.expect(cache);
        }
    }

    /// Returns whether the scheduler has the sequence.
    pub fn contains(&self, id: SequenceId) -> bool {
        self.sequences.contains_key(&id)
    }

    /// Returns the state of a sequence, `None` once it has been removed.
    pub fn state(&self, id: SequenceId) -> Option<State> {
        self.sequences.get(&id).map(|sequence| sequence.state)
    }

    /// Returns the tokens of a sequence; none once it has been removed.
    pub fn tokens(&self, id: SequenceId) -> &[u32] {
        self.sequences.get(&id).map_or(&[], |sequence| &sequence.tokens)
    }

    /// Returns the number of sequences that hold blocks.
    pub fn running(&self) -> usize {
        self.running.len()
    }

    /// Returns the number of sequences that decode: all, those of the highest priority, or the others.
    pub fn decoding(&self, of_highest: Option<bool>) -> usize {
        let is_asked = |id: &&SequenceId| {
            of_highest.is_none_or(|highest| highest == (id.priority == Priority::High))
        };
        let decodes = |id: &&SequenceId| self.state(**id) == Some(State::Decoding);
        self.running.iter().filter(is_asked).filter(decodes).count()
    }

    /// Returns whether a sequence of the highest priority decodes.
    pub fn is_interactive(&self) -> bool {
        let high = self.running.iter().take_while(|id| id.priority == Priority::High);
        high.into_iter().any(|id| self.state(*id) == Some(State::Decoding))
    }

    /// Returns whether a sequence of the highest priority waits for its first token.
    pub fn is_awaited(&self) -> bool {
        let is_high = |id: &SequenceId| id.priority == Priority::High;
        let running = self.running.iter().take_while(|id| is_high(id));
        self.pending.first().is_some_and(is_high)
            || running.into_iter().any(|id| self.state(*id) == Some(State::Prefilling))
    }

    /// Returns the number of pending sequences.
    pub fn pending(&self) -> usize {
        self.pending.len()
    }

    /// Returns the number of tokens of the pending sequences, or a number from `enough` on if they have so many; `None`
    /// while one is running or one of them is of the highest priority.
    pub fn rows_of_first_step(&self, enough: usize) -> Option<usize> {
        let is_high = self.pending.first().is_some_and(|id| id.priority == Priority::High);
        if is_high || !self.running.is_empty() {
            return None;
        }
        let mut rows = 0;
        for id in &self.pending {
            rows += self.tokens(*id).len();
            if rows >= enough {
                break;
            }
        }
        Some(rows)
    }

    /// Waits until no other engine changes the KV blocks of the storage, and returns them with their holders.
    pub fn cache(&self) -> MutexGuard<'_, BlockCache> {
        self.cache.lock()
    }

    /// Returns the groups of layers that have blocks.
    pub fn groups(&self) -> LayerGroups {
        self.limits.groups
    }

    /// Returns the most tokens of a sequence that has all blocks.
    pub fn capacity(&self) -> usize {
        let Limits { groups, token_budget, .. } = self.limits;
        groups.tokens_in(self.cache().total(), token_budget)
    }

    /// Returns the leading full blocks of a sequence with their names, up to this many tokens: their number in the sequence, name,
    /// block.
    pub fn named_blocks(
        &self,
        id: SequenceId,
        tokens: usize,
    ) -> impl Iterator<Item = (usize, BlockHash, BlockId)> {
        let blocks = tokens / BLOCK_TOKENS;
        let sequence = self.sequences.get(&id).into_iter();
        sequence.flat_map(move |sequence| {
            let hashes = &sequence.hashes[..blocks.min(sequence.hashes.len())];
            sequence.blocks.named(hashes, 0)
        })
    }

    /// Returns how many of these leading blocks of a text a kept state is after, at most; 0 without one.
    pub fn blocks_with_state(&self, hashes: &[BlockHash]) -> usize {
        let has_state = |blocks: &usize| self.states.contains(&hashes[blocks - 1]);
        (1..=hashes.len()).rev().find(has_state).unwrap_or(0)
    }

    /// Returns the slot of the state that is kept after a block.
    pub fn state_slot(&self, hash: &BlockHash) -> Option<u32> {
        self.states.slot_of(hash)
    }

    /// Keeps the state after a block, the last of so many, which `write` writes to a slot, unless it is there; false if all slots are taken or
    /// `write` returns false.
    pub fn keep_state(
        &mut self,
        (hash, blocks): (BlockHash, usize),
        write: impl FnOnce(u32) -> bool,
    ) -> bool {
        if self.states.contains(&hash) {
            return true;
        }
        let cache = self.cache.lock();
        let Some(slot) = self.states.reserve(true, |hash| cache.is_expected(hash)) else {
            return false;
        };
        let is_written = write(slot);
        match is_written {
            true => self.states.insert(hash, slot, blocks),
            false => self.states.release(slot),
        }
        is_written
    }

    /// Counters since the scheduler was made.
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Returns the backend's view of a planned chunk, without a request for logits.
    pub fn chunk(&self, planned: &PlannedChunk) -> Chunk<'_> {
        let sequence = &self.sequences[&planned.id];
        // Further blocks, which drafts have taken, may have other holders.
        let blocks = blocks_for(planned.end) + usize::from(planned.has_next);
        Chunk {
            state: match sequence.trial {
                Some(trial) => {
                    StateSlots { own: trial.slot, from: sequence.slot, saves: &sequence.saves }
                }
                None => StateSlots {
                    own: sequence.slot.unwrap_or_default(),
                    from: sequence.begins_with,
                    saves: &sequence.saves,
                },
            },
            tokens: &sequence.tokens[planned.start..planned.end],
            position: planned.start,
            blocks: &sequence.blocks.full()[..blocks],
            windows: sequence.blocks.windows(),
            logits: LogitsFor::Nothing,
        }
    }

    /// Records that the step of `plan` succeeded: its positions are computed, and its full blocks are in the
    /// prefix cache. Drafts are not tokens yet: [`accept`](Self::accept) makes them computed tokens.
    pub fn commit(&mut self, plan: &Plan) {
        let mut cache = self.cache.lock();
        for planned in &plan.chunks {
            let Some(sequence) = self.sequences.get_mut(&planned.id) else { continue };
            sequence.drop_drafts();
            sequence.computed = planned.end - planned.drafts;
            if planned.samples {
                sequence.state = State::Decoding;
            }
            if self.limits.prefix_cache {
                let full = sequence.computed / BLOCK_TOKENS;
                sequence.hash_blocks(full);
                let named = sequence.blocks.named(&sequence.hashes[..full], sequence.named);
                named.for_each(|(_, hash, block)| cache.register(hash, block));
                sequence.named = full;
            }
            let first = self.limits.groups.first_block(sequence.computed);
            sequence.blocks.release_before(first, &mut cache);
            if sequence.trial.is_some() {
                sequence.saves.clear();
                continue;
            }
            sequence.begins_with = None;
            for (after, slot) in sequence.saves.drain(..) {
                let blocks = (planned.start + after) / BLOCK_TOKENS;
                self.states.insert(sequence.hashes[blocks - 1], slot, blocks);
            }
        }
    }

    /// Changes the drafts of every decoding sequence: `change` gets its tokens, and the list of those that may follow them. The next
    /// plan computes as many of these as it has room for. Other sequences have no drafts.
    pub fn for_drafts(&mut self, mut change: impl FnMut(SequenceId, &[u32], &mut Vec<u32>)) {
        for id in &self.running {
            if let Some(sequence) = self.sequences.get_mut(id) {
                match sequence.state {
                    State::Decoding => change(*id, &sequence.tokens, &mut sequence.proposed),
                    _ => sequence.proposed.clear(),
                }
            }
        }
    }

    /// Adds a sampled token, which is the draft with this index in the last step or not. If it is, its position is
    /// computed, and true is returned: the logits after it are known.
    pub fn accept(&mut self, id: SequenceId, draft: usize, token: u32) -> bool {
        let Some(sequence) = self.sequences.get_mut(&id) else { return false };
        let is_draft = sequence.proposed.get(draft) == Some(&token);
        sequence.computed += usize::from(is_draft);
        is_draft
    }

    /// Records that the step of `plan` failed: the blocks it used leave the prefix cache. The caller removes
    /// the sequences.
    pub fn invalidate(&mut self, plan: &Plan) {
        let mut cache = self.cache.lock();
        for planned in &plan.chunks {
            if let Some(sequence) = self.sequences.get(&planned.id) {
                sequence.blocks.held().for_each(|block| cache.forget(block));
            }
        }
    }

    /// Makes room for further tokens of a sequence, and for their blocks.
    pub fn reserve(&mut self, id: SequenceId, tokens: usize) {
        if let Some(sequence) = self.sequences.get_mut(&id) {
            sequence.tokens.reserve_exact(tokens);
            let blocks = blocks_for(sequence.tokens.len() + tokens);
            sequence.blocks.reserve(blocks);
            sequence.hashes.reserve_exact(blocks.saturating_sub(sequence.hashes.len()));
        }
    }

    /// Appends a sampled token.
    pub fn push_token(&mut self, id: SequenceId, token: u32) {
        if let Some(sequence) = self.sequences.get_mut(&id) {
            sequence.tokens.push(token);
            sequence.stalls = 0;
        }
    }

    /// Removes a sequence in any state, and releases its blocks.
    pub fn remove(&mut self, id: SequenceId) {
        if let Some(mut sequence) = self.sequences.remove(&id) {
            let mut cache = self.cache.lock();
            sequence.unexpect(&mut cache);
            sequence.blocks.release_all(&mut cache);
            drop(cache);
            sequence.drop_states(&mut self.states, &mut self.spare_slots);
            self.free_slots.extend(sequence.slot);
            self.running.remove(&id);
            self.pending.remove(&id);
        }
    }

    /// Makes a running sequence pending again, with its tokens and without its blocks.
    fn preempt(&mut self, id: SequenceId, cache: &mut BlockCache) {
        let Some(sequence) = self.sequences.get_mut(&id) else { return };
        sequence.blocks.release_all(cache);
        sequence.drop_drafts();
        sequence.drop_states(&mut self.states, &mut self.spare_slots);
        (sequence.computed, sequence.named) = (0, 0);
        self.free_slots.extend(sequence.slot.take());
        sequence.state = State::Pending;
        sequence.stalls += 1;
        self.running.remove(&id);
        self.pending.insert(id);
        self.expect(id, cache);
        self.counters.preemptions += 1;
    }
}

impl Drop for Scheduler {
    fn drop(&mut self) {
        let sequences = &mut self.sequences;
        self.cache.if_sound(|cache| {
            for sequence in sequences.values_mut() {
                sequence.unexpect(cache);
                sequence.blocks.release_all(cache);
            }
        });
    }
}

#[cfg(test)]
impl Scheduler {
    /// Checks every invariant that holds between two steps, if no other engine uses the storage.
    pub(crate) fn audit(&self) {
        Self::audit_all(&[self]);
    }

    /// Checks every invariant that holds between two steps of all engines of a storage.
    pub(crate) fn audit_all(all: &[&Self]) {
        let mut holders = BTreeMap::new();
        for scheduler in all {
            scheduler.audit_sequences(&mut holders);
        }
        for scheduler in all {
            scheduler.audit_slots();
            let without_drafts = scheduler.sequences.values().filter(|s| s.trial.is_none());
            let reserved = without_drafts.flat_map(|sequence| &sequence.saves);
            let Limits { max_sequences, kept_states, .. } = scheduler.limits;
            scheduler.states.audit(
                reserved.map(|(_, slot)| *slot),
                max_sequences as u32,
                kept_states,
            );
        }
        let Some(first) = all.first() else { return };
        let cache = first.cache.lock();
        cache.audit(&holders);
        let waiting = all.iter().flat_map(|scheduler| scheduler.sequences.values());
        let mut expected = HashMap::new();
        for sequence in waiting {
            assert!(sequence.state == State::Pending || sequence.expected == 0);
            for hash in &sequence.hashes[..sequence.expected] {
                for group in 0..sequence.groups.count() {
                    *expected.entry(hash.of_group(group)).or_default() += 1;
                }
            }
        }
        cache.audit_expected(&expected);
    }

    /// Checks that every slot of running sequences is free, spare, or that of one sequence.
    fn audit_slots(&self) {
        let Limits { max_sequences, kept_states, spare_states, .. } = self.limits;
        let sequences = self.sequences.values();
        let held = sequences.flat_map(|s| s.slot.into_iter().chain(s.trial.map(|t| t.slot)));
        let mut all: Vec<u32> = self.free_slots.iter().chain(&self.spare_slots).copied().collect();
        all.extend(held);
        all.sort_unstable();
        let first = max_sequences + kept_states;
        let expected = (0..max_sequences).chain(first..first + spare_states);
        let expected = expected.map(|slot| slot as u32);
        assert_eq!(all, expected.collect::<Vec<_>>());
    }

    fn audit_sequences(&self, holders: &mut BTreeMap<BlockId, u32>) {
        for (id, sequence) in &self.sequences {
            let pending = sequence.state == State::Pending;
            assert_eq!(self.pending.contains(id), pending);
            assert_eq!(self.running.contains(id), !pending);
            let is_empty = sequence.blocks.held().next().is_none();
            assert!(!pending || is_empty && sequence.computed == 0);
            assert!(sequence.computed < sequence.tokens.len());
            let tables = sequence.blocks.windows().iter().map(Vec::len);
            let shortest = tables.fold(sequence.blocks.full().len(), usize::min);
            assert!(sequence.computed <= shortest * BLOCK_TOKENS);
            for block in sequence.blocks.held() {
                *holders.entry(block).or_insert(0u32) += 1;
            }
        }
        assert_eq!(self.running.len() + self.pending.len(), self.sequences.len());
        assert!(self.running.len() <= self.limits.max_sequences);
    }
}
