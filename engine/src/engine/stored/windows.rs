//! Blocks of layers with a window: a prompt needs those alone that its next tokens read, behind the last block that all other layers
//! have.

use super::{FETCH_BLOCKS, Stored, Waiting};
use crate::{
    kv::{BLOCK_TOKENS, BlockHash},
    scheduler::Scheduler,
};

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
