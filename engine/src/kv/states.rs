//! States of recurrent layers that are kept where prefixes end.
//!
//! Recurrent layers cannot begin in the middle of a text without the state there, so a prefix is only reused up to a kept state. A
//! state has the name of the last block before it. Scheduler and backend number slots alike: first as many as sequences may run, then
//! those of this cache, then spare ones for states after drafts.
//!
//! All states have one size, so a state is worth as much as the blocks before it, which need not be computed: the least worth makes
//! room for a new one. Each state that made room raises the worth of those that are used or kept from then on (GreedyDual: Cao and Irani,
//! Cost-Aware WWW Proxy Caching Algorithms, 1997), so a state that is not used goes in the end, whatever it spares. Of equal ones the
//! one goes that was used last longest ago; those that waiting sequences need go last.

use std::collections::HashMap;

use super::BlockHash;

/// A kept state.
#[derive(Debug, Clone, Copy)]
struct Entry {
    slot: u32,
    /// Step of its last use.
    used: u64,
    /// Blocks before it.
    blocks: usize,
    /// The raise at its last use, and the blocks.
    worth: u64,
}

/// The kept states of a backend, by the block that they are after.
#[derive(Debug, Clone, Default)]
pub struct StateCache {
    entries: HashMap<BlockHash, Entry>,
    free: Vec<u32>,
    /// The number of steps, as a logical clock.
    step: u64,
    /// The worth of the state that made room last.
    raise: u64,
}

impl StateCache {
    /// Returns an empty cache with so many slots, from `first` on.
    pub fn new(first: u32, count: usize) -> Self {
        let count = u32::try_from(count).unwrap_or(u32::MAX);
        let free = (first..first.saturating_add(count)).rev().collect();
        Self { entries: HashMap::new(), free, step: 0, raise: 0 }
    }

    /// Begins a step: states that it uses stay until the next one.
    pub fn begin_step(&mut self) {
        self.step += 1;
    }

    /// Returns whether the state after a block is kept.
    pub fn contains(&self, hash: &BlockHash) -> bool {
        self.entries.contains_key(hash)
    }

    /// Returns the slot of the state after a block, which this step uses.
    pub fn get(&mut self, hash: &BlockHash) -> Option<u32> {
        let entry = self.entries.get_mut(hash)?;
        (entry.used, entry.worth) = (self.step, self.raise + entry.blocks as u64);
        Some(entry.slot)
    }

    /// Returns the slot of the state after a block, without a use of it.
    pub fn slot_of(&self, hash: &BlockHash) -> Option<u32> {
        self.entries.get(hash).map(|entry| entry.slot)
    }

    /// Returns the slots of all states.
    pub fn slots(&self) -> impl Iterator<Item = u32> {
        self.entries.values().map(|entry| entry.slot)
    }

    /// Takes a slot for a new state, if need be that of another one. With `spares_expected` that is none that waiting sequences
    /// need.
    pub fn reserve(
        &mut self,
        spares_expected: bool,
        is_expected: impl Fn(&BlockHash) -> bool,
    ) -> Option<u32> {
        if let Some(slot) = self.free.pop() {
            return Some(slot);
        }
        let evictable = self.entries.iter().filter(|(_, entry)| entry.used < self.step);
        let first = evictable.map(|(hash, entry)| (is_expected(hash), *entry, *hash)).min_by_key(
            |(is_expected, entry, _)| (*is_expected, entry.worth, entry.used, entry.slot),
        );
        let (_, entry, hash) = first.filter(|(expected, ..)| !(*expected && spares_expected))?;
        self.entries.remove(&hash);
        self.raise = self.raise.max(entry.worth);
        Some(entry.slot)
    }

    /// Names the state in a reserved slot, with so many blocks before it. Of two states after the same block the first one stays.
    pub fn insert(&mut self, hash: BlockHash, slot: u32, blocks: usize) {
        if self.contains(&hash) {
            return self.release(slot);
        }
        let worth = self.raise + blocks as u64;
        self.entries.insert(hash, Entry { slot, used: self.step, blocks, worth });
    }

    /// Returns a reserved slot in which there is no state.
    pub fn release(&mut self, slot: u32) {
        self.free.push(slot);
    }
}

#[cfg(test)]
impl StateCache {
    /// Checks that every slot is free, or has a state, or is reserved.
    pub(crate) fn audit(&self, reserved: impl Iterator<Item = u32>, first: u32, count: usize) {
        let kept = self.entries.values().map(|entry| entry.slot);
        let mut all: Vec<u32> = kept.chain(self.free.iter().copied()).chain(reserved).collect();
        all.sort_unstable();
        assert_eq!(all, (first..first + count as u32).collect::<Vec<_>>());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kv::BLOCK_TOKENS;

    fn hash(tokens: u32) -> BlockHash {
        BlockHash::root("class", b"").child(&[tokens; BLOCK_TOKENS])
    }

    fn keep(states: &mut StateCache, tokens: u32) -> u32 {
        let slot = states.reserve(false, |_| false).expect("a slot is free or evictable");
        states.insert(hash(tokens), slot, 4);
        slot
    }

    #[test]
    fn the_state_used_longest_ago_makes_room() {
        let mut states = StateCache::new(8, 2);
        states.begin_step();
        assert_eq!((keep(&mut states, 1), keep(&mut states, 2)), (8, 9));
        states.begin_step();
        assert_eq!(states.get(&hash(1)), Some(8));
        states.begin_step();
        assert_eq!(keep(&mut states, 3), 9);
        assert!(states.contains(&hash(1)) && !states.contains(&hash(2)));
    }

    #[test]
    fn a_state_after_a_long_prefix_stays_longer_but_not_for_ever() {
        let mut states = StateCache::new(0, 2);
        states.begin_step();
        let long = states.reserve(false, |_| false).expect("a slot is free");
        states.insert(hash(99), long, 10);
        for tokens in 0..3 {
            states.begin_step();
            keep(&mut states, tokens);
            assert!(states.contains(&hash(99)), "{tokens} states after four blocks came later");
        }
        states.begin_step();
        keep(&mut states, 3);
        assert!(!states.contains(&hash(99)), "it was not used while three others made room");
    }

    #[test]
    fn states_of_this_step_and_expected_ones_stay() {
        let mut states = StateCache::new(0, 2);
        states.begin_step();
        keep(&mut states, 1);
        keep(&mut states, 2);
        assert_eq!(states.reserve(false, |_| false), None, "both are of this step");
        states.begin_step();
        let first = |of: &BlockHash| *of == hash(1);
        assert_eq!(states.reserve(true, first), Some(1), "2 is not expected");
        assert_eq!(states.reserve(true, first), None);
        assert_eq!(states.reserve(false, first), Some(0));
    }

    #[test]
    fn the_second_of_two_equal_states_is_dropped() {
        let mut states = StateCache::new(0, 2);
        states.begin_step();
        let slots = [(); 2].map(|()| states.reserve(false, |_| false).expect("free"));
        slots.iter().for_each(|slot| states.insert(hash(1), *slot, 4));
        assert_eq!(states.get(&hash(1)), Some(slots[0]));
        assert_eq!(states.reserve(false, |_| false), Some(slots[1]));
    }
}
