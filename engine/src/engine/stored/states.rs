//! States of recurrent layers on disk: a prompt goes on after the last state there, and reads no blocks behind it.
//!
//! First the names of the states that its blocks may have are looked for, the deepest one first; then the blocks before the state are
//! read, and the state itself last. States that are in memory already are used from there.

use super::{READ_SHARE_MAX, Stored, Waiting};
use crate::{
    backend::Backend,
    kv::{BLOCK_TOKENS, BlockHash, disk::Fetched},
    scheduler::Scheduler,
};

impl Stored {
    /// Returns the names of the states that are not in memory and that a sequence could go on after, the last one first.
    pub(super) fn names_of_states(
        &self,
        waiting: &Waiting,
        scheduler: &Scheduler,
    ) -> Vec<BlockHash> {
        let in_memory = scheduler.blocks_with_state(&waiting.hashes);
        waiting.hashes[in_memory..].iter().rev().map(BlockHash::of_state).collect()
    }

    /// Leaves a sequence the blocks up to its last state: that in memory, or the one that was found at this place, from its end.
    pub(super) fn cut_to_state(
        &mut self,
        waiting: &mut Waiting,
        scheduler: &Scheduler,
        found: Option<usize>,
    ) {
        let (all, in_memory) = (waiting.hashes.len(), scheduler.blocks_with_state(&waiting.hashes));
        let on_disk = found.map_or(0, |at| all - at);
        let is_better = on_disk > in_memory && self.is_state_worth_it(on_disk, on_disk - in_memory);
        let end = if is_better { on_disk } else { in_memory };
        waiting.hashes.truncate(end);
        let name = waiting.hashes.last().map(BlockHash::of_state).filter(|_| end > in_memory);
        if let Some(name) = name {
            self.expect_more(waiting.id.request, name);
        }
    }

    /// Returns whether a sequence needs not wait for its state: it is in memory, or it cannot be read. `is_missing` returns whether
    /// a read has ended without a name.
    pub(super) fn has_state(
        &mut self,
        waiting: &mut Waiting,
        scheduler: &Scheduler,
        is_missing: impl Fn(&BlockHash) -> bool,
    ) -> bool {
        let last = waiting.hashes.last().filter(|_| self.state_bytes.is_some()).copied();
        let Some(last) = last.filter(|last| scheduler.state_slot(last).is_none()) else {
            return true;
        };
        let name = last.of_state();
        if is_missing(&name) || !self.read_names(waiting, vec![name], waiting.hashes.len() - 1) {
            return true;
        }
        self.reading_states.insert(name, (last, waiting.hashes.len()));
        false
    }

    /// Returns whether reading a state and the blocks before it takes less time than computing the tokens of some of these.
    fn is_state_worth_it(&self, blocks: usize, saved: usize) -> bool {
        let Some((state, block)) = self.state_bytes else { return false };
        let reads = blocks as f64 + state as f64 / block.max(1) as f64;
        match (self.read_seconds, self.compute_seconds) {
            (Some(read), Some(compute)) => {
                read * reads <= READ_SHARE_MAX * compute * (saved * BLOCK_TOKENS) as f64
            }
            _ => true,
        }
    }

    /// Keeps a state that was read. Returns its name if that is not possible.
    pub(super) fn install_state(
        &mut self,
        block: (BlockHash, usize),
        fetched: Fetched,
        scheduler: &mut Scheduler,
        backend: &mut dyn Backend,
    ) -> Option<BlockHash> {
        let (mut contents, missing) = fetched.take();
        let Some((name, content)) = contents.pop() else { return missing };
        let is_kept = backend.as_recurrent().is_some_and(|backend| {
            // Otherwise it is not of this backend.
            content.len() == backend.state_bytes()
                && scheduler.keep_state(block, |slot| backend.write_state(slot, &content).is_ok())
        });
        if is_kept {
            self.remember(name);
        }
        (!is_kept).then_some(name)
    }

    /// Copies the state after a block for writing. Returns whether it was still kept.
    pub(super) fn write_state(
        &mut self,
        (block, depth): (BlockHash, usize),
        scheduler: &Scheduler,
        backend: &mut dyn Backend,
    ) -> bool {
        let slot = scheduler.state_slot(&block);
        let Some((slot, backend)) = slot.zip(backend.as_recurrent()) else { return false };
        let mut content = Vec::with_capacity(backend.state_bytes());
        let is_read = backend.read_state(slot, &mut content).is_ok();
        if is_read {
            self.disk.store(block.of_state(), depth, content);
        }
        is_read
    }
}
