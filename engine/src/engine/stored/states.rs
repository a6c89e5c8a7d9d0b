//! States of recurrent layers on disk: a prompt goes on after the last state there, and reads no blocks behind it.
//!
//! First the names of the states that its blocks may have are looked for, the deepest one first; then the blocks before the state are
//! read, and the state itself last. States that are in memory already are used from there.

use super::{READ_SHARE_MAX, Stored, Waiting};
use crate::{
    backend::Backend,
    kv::{
        BLOCK_TOKENS, BlockHash,
        disk::{Fetched, Find},
    },
    scheduler::Scheduler,
};

/// How far the search for the last state of a sequence is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Search {
    /// Not begun.
    Ahead,
    /// The first name that was asked for.
    Asked(BlockHash),
    /// The blocks of the sequence end where its last state is, or the model has no recurrent layers.
    Done,
}

impl Stored {
    /// Looks for the last state of a sequence, and leaves it the blocks up to there. Returns whether that is done. `found` returns
    /// what a search found that began with a name.
    pub(super) fn search(
        &mut self,
        waiting: &mut Waiting,
        scheduler: &Scheduler,
        found: impl Fn(&BlockHash) -> Option<Option<usize>>,
    ) -> bool {
        let found = match waiting.search {
            Search::Done => return true,
            Search::Ahead => None,
            Search::Asked(first) => match found(&first) {
                None => return false,
                found => found,
            },
        };
        let (all, in_memory) = (waiting.hashes.len(), scheduler.blocks_with_state(&waiting.hashes));
        let end = match found {
            None => {
                let names = waiting.hashes[in_memory..].iter().rev();
                let hashes: Vec<BlockHash> = names.map(BlockHash::of_state).collect();
                let first = hashes.first().copied();
                let answer = self.answers.0.clone();
                if let Some(first) = first.filter(|_| self.disk.find(Find { hashes, answer })) {
                    waiting.search = Search::Asked(first);
                    return false;
                }
                in_memory
            }
            Some(at) => {
                let on_disk = at.map_or(0, |at| all - at);
                let is_better =
                    on_disk > in_memory && self.is_state_worth_it(on_disk, on_disk - in_memory);
                if is_better { on_disk } else { in_memory }
            }
        };
        waiting.hashes.truncate(end);
        waiting.search = Search::Done;
        if let Some(name) =
            waiting.hashes.last().map(BlockHash::of_state).filter(|_| end > in_memory)
        {
            self.expect_more(waiting.id.request, name);
        }
        true
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
        self.reading_states.insert(name, last);
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
        block: BlockHash,
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
