//! Forks of sequences and of whole schedulers.

use std::collections::HashSet;

use super::{Counters, Scheduler, SequenceId};
use crate::kv::{BlockId, SharedCache};

/// What becomes of the KV blocks of a fork.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fork {
    /// The fork uses the same blocks. A block with several holders is copied before one of them writes to it.
    Shared,
    /// The fork gets copies of the blocks at once.
    Deep,
}

/// What a fork copies, from and to.
#[derive(Debug, Clone, Copy)]
pub enum ForkCopy {
    /// The keys and values of a block.
    Block(BlockId, BlockId),
    /// The state of recurrent layers in a slot.
    State(u32, u32),
}

impl Scheduler {
    /// Adds a sequence that continues from where `parent` is, another choice or request. `copy` makes a copy.
    /// If `max_sequences` are running, or there are too few blocks for copies, the new sequence is pending like a
    /// preempted one and computes its tokens again. No effect without the parent.
    pub fn fork(
        &mut self,
        parent: SequenceId,
        child: SequenceId,
        kind: Fork,
        mut copy: impl FnMut(ForkCopy),
    ) {
        let Some(original) = self.sequences.get_mut(&parent) else { return };
        self.spare_slots.extend(original.settle_trial());
        let has_place =
            self.running.contains(&parent) && self.running.len() < self.limits.max_sequences;
        let mut copies = Vec::new();
        let mut cache = self.cache.lock();
        let running = has_place.then(|| original.fork(kind, &mut cache, &mut copies)).flatten();
        copies.into_iter().for_each(|(from, to)| copy(ForkCopy::Block(from, to)));
        drop(cache);
        let (sequence, list) = match running {
            Some(mut sequence) => {
                sequence.slot = self.free_slots.pop();
                let slots = original.slot.zip(sequence.slot).filter(|_| self.limits.recurrent);
                slots.into_iter().for_each(|(from, to)| copy(ForkCopy::State(from, to)));
                (sequence, &mut self.running)
            }
            None => (original.unplaced(), &mut self.pending),
        };
        list.insert(child);
        let previous = self.sequences.insert(child, sequence);
        assert!(previous.is_none(), "{child:?} was added twice");
        if self.pending.contains(&child) {
            let cache = self.cache.clone();
            self.expect(child, &mut cache.lock());
        }
    }

    /// Returns a scheduler with the same sequences in the same states, and counters at zero. It holds the same blocks, and has slots
    /// of its own, with the same numbers.
    pub fn fork_shared(&self) -> Self {
        let mut cache = self.cache.lock();
        self.tables().for_each(|block| cache.retain(block));
        drop(cache);
        self.with_cache(self.cache.clone())
    }

    /// Returns the same as [`Self::fork_shared`] over a storage of its own. `copy` makes it, with the contents of the
    /// blocks and the states in the slots that it is called with, while no other engine can change blocks.
    ///
    /// # Errors
    /// If `copy` returns an error.
    pub fn fork_deep<T, E>(
        &self,
        copy: impl FnOnce(&[BlockId], &[u32]) -> Result<T, E>,
    ) -> Result<(Self, T), E> {
        let cache = self.cache.lock();
        let own = cache.with_holders(self.tables());
        let copied = copy(&own.with_contents(), &self.slots_with_states())?;
        drop(cache);
        Ok((self.with_cache(SharedCache::new(own)), copied))
    }

    /// Returns the slots with states of recurrent layers.
    pub fn slots_with_states(&self) -> Vec<u32> {
        if !self.limits.recurrent {
            return Vec::new();
        }
        let sequences = self.sequences.values();
        let of_sequences =
            sequences.flat_map(|s| s.slot.into_iter().chain(s.trial.map(|t| t.slot)));
        of_sequences.chain(self.states.slots()).collect()
    }

    /// Returns every block of every sequence.
    fn tables(&self) -> impl Iterator<Item = BlockId> {
        self.sequences.values().flat_map(|sequence| sequence.blocks.held())
    }

    fn with_cache(&self, cache: SharedCache) -> Self {
        let mut fork = Self {
            limits: self.limits,
            cache: cache.clone(),
            sequences: self.sequences.clone(),
            free_slots: self.free_slots.clone(),
            states: self.states.clone(),
            spare_slots: self.spare_slots.clone(),
            pending: self.pending.clone(),
            running: self.running.clone(),
            computing: HashSet::new(),
            keeping: HashSet::new(),
            decoded_last: self.decoded_last,
            credits: self.credits,
            counters: Counters::default(),
            order: Vec::new(),
        };
        for id in &self.pending {
            fork.expect(*id, &mut cache.lock());
        }
        fork
    }
}
