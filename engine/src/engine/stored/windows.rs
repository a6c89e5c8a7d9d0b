//! Blocks of layers with a window: a prompt needs those alone that its next tokens read, behind the last block that all other layers
//! have. A prompt that ends between two prefixes of which the last blocks are kept goes on after the shorter one.

use super::{FETCH_BLOCKS, Stored, Waiting};
use crate::{
    kv::{BLOCK_TOKENS, BlockHash, BlockTable},
    scheduler::Scheduler,
};

/// Returns the names of a sequence's blocks in layers with a window, the last ones first; empty if nothing needs to be read.
pub(super) fn names_of_windows(waiting: &Waiting, scheduler: &Scheduler) -> Vec<BlockHash> {
    let groups = scheduler.groups();
    let cached =
        BlockTable::cached(&scheduler.cache(), groups, &waiting.hashes, waiting.tokens.len());
    if cached == waiting.hashes.len() {
        return Vec::new();
    }
    let hashes = waiting.hashes.iter().rev();
    hashes.flat_map(|hash| (1..groups.count()).map(|group| hash.of_group(group))).collect()
}

impl Waiting {
    /// Finds the numbers of leading blocks after which the sequence can go on, and leaves it no blocks behind the last one.
    /// `found` are the places of what was found among [`names_of_windows`].
    pub(super) fn find_ends(&mut self, scheduler: &Scheduler, found: &[usize]) {
        let (groups, all, cache) = (scheduler.groups(), self.hashes.len(), scheduler.cache());
        let has = |block: usize, group: usize| {
            let place = (all - 1 - block) * groups.windows + group - 1;
            found.binary_search(&place).is_ok()
                || cache.peek(&self.hashes[block].of_group(group)).is_some()
        };
        // The first of the blocks in a row up to here that all groups have.
        let mut first = 0;
        for block in 0..all {
            if !(1..groups.count()).all(|group| has(block, group)) {
                first = block + 1;
            } else if first <= groups.first_block((block + 1) * BLOCK_TOKENS) {
                self.ends.push(block + 1);
            }
        }
        drop(cache);
        self.cut_to_windows();
    }

    /// Leaves the sequence the blocks up to the last end among them.
    pub(super) fn cut_to_windows(&mut self) {
        let ends = self.ends.partition_point(|end| *end <= self.hashes.len());
        self.hashes.truncate(self.ends[..ends].last().copied().unwrap_or(0));
    }
}

impl Stored {
    /// Returns whether a sequence needs not wait for the blocks of its windows: they are in memory, or cannot be read. `is_missing`
    /// returns whether a read has ended without a name.
    pub(super) fn has_windows(
        &mut self,
        waiting: &mut Waiting,
        scheduler: &Scheduler,
        is_missing: impl Fn(&BlockHash) -> bool,
    ) -> bool {
        let (groups, blocks) = (scheduler.groups(), waiting.hashes.len());
        if groups.windows == 0 || blocks == 0 {
            return true;
        }
        let first = groups.first_block(blocks * BLOCK_TOKENS).min(blocks);
        for group in 1..groups.count() {
            let names: Vec<BlockHash> =
                waiting.hashes[first..].iter().map(|hash| hash.of_group(group)).collect();
            let next = {
                let cache = scheduler.cache();
                names.iter().position(|name| cache.peek(name).is_none())
            };
            let Some(next) = next else { continue };
            let end = names.len().min(next + FETCH_BLOCKS);
            self.expect_more(waiting.id.request, names[next]);
            return is_missing(&names[next])
                || !self.read_names(waiting, names[next..end].to_vec(), first + next);
        }
        true
    }
}
