//! The blocks of one storage, for all engines that use it: an engine and its shared forks.
//!
//! One lock protects the bookkeeping of all blocks. The contents of blocks need no lock, because these rules order
//! every access to them, whichever threads the engines run on:
//!
//! 1. An engine reads and writes only blocks that it holds.
//! 2. It writes only to blocks with one holder and without a name in the prefix cache: fresh ones
//!    ([`BlockCache::allocate`]) and those of [`BlockCache::make_writable`].
//! 3. It copies a block while it has the lock in which it gave up its hold on the original.
//! 4. It gives a block a name, or releases it, under the lock, after its last write.
//!
//! A second holder comes only under the lock: by the block's name (after rule 4), or from the first holder by a fork,
//! between two of its steps. `xtask/loom` tests these rules with two engines, and `cargo xtask miri` the bookkeeping.
//!
//! Locks are always taken in this order: the blocks, then the backend.

use super::{
    BlockCache,
    sync::{Arc, Mutex, MutexGuard},
};

/// A handle to the blocks of one storage. Clones are handles to the same blocks.
#[derive(Debug, Clone)]
pub struct SharedCache(Arc<Mutex<BlockCache>>);

impl SharedCache {
    /// Makes the only handle to the blocks.
    pub fn new(cache: BlockCache) -> Self {
        Self(Arc::new(Mutex::new(cache)))
    }

    /// Waits until no other engine changes the blocks, and returns them.
    ///
    /// # Panics
    /// If an engine panicked while it changed them, because they may be inconsistent.
    pub fn lock(&self) -> MutexGuard<'_, BlockCache> {
        self.0.lock().expect("an engine of this storage panicked while it changed the blocks")
    }

    /// Changes the blocks for an engine that ends. No effect if an engine panicked while it changed them.
    pub fn if_sound(&self, change: impl FnOnce(&mut BlockCache)) {
        if let Ok(mut cache) = self.0.lock() {
            change(&mut cache);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        sync::{
            LazyLock,
            atomic::{AtomicU64, Ordering},
        },
        thread,
    };

    use super::*;
    use crate::kv::{BLOCK_TOKENS, BlockHash, BlockId, Writable};

    const BLOCKS: usize = 12;

    /// An engine with one sequence. The content of a block is one number, which only its writer changes.
    struct Engine<'a> {
        cache: SharedCache,
        contents: &'a [AtomicU64],
        table: Vec<BlockId>,
        /// Contents that the blocks of the table must have.
        expected: Vec<u64>,
        random: u64,
    }

    impl Engine<'_> {
        fn below(&mut self, limit: usize) -> usize {
            self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (self.random >> 33) as usize % limit
        }

        fn content(&self, block: BlockId) -> &AtomicU64 {
            &self.contents[block.index()]
        }

        /// Starts a sequence with what is cached of three names, or ends it.
        fn start_or_end(&mut self) {
            let mut cache = self.cache.lock();
            cache.release_all(&mut self.table);
            self.expected.clear();
            for name in 0..3 {
                let Some(hit) = cache.peek(&hash(name)) else { break };
                cache.retain(hit);
                self.table.push(hit);
                self.expected.push(name);
            }
        }

        /// Adds a block, or changes one; then gives the leading blocks their names.
        fn step(&mut self) {
            let (shared, at) = (self.cache.clone(), self.below(self.table.len() + 1));
            let mut cache = shared.lock();
            if at == self.table.len() {
                let Some(fresh) = cache.allocate() else { return };
                self.table.push(fresh);
                self.expected.push(0);
            } else {
                match cache.make_writable(self.table[at]) {
                    None => return,
                    Some(Writable::InPlace) => {}
                    Some(Writable::Copied(copy)) => {
                        let old = self.content(self.table[at]).load(Ordering::Relaxed);
                        self.content(copy).store(old, Ordering::Relaxed);
                        self.table[at] = copy;
                    }
                }
            }
            drop(cache);
            let (block, old) = (self.table[at], self.expected[at]);
            let is_fresh = at + 1 == self.table.len() && old == 0;
            let found = self.content(block).swap(at as u64, Ordering::Relaxed);
            assert!(is_fresh || found == old, "{block:?} has {found}, not {old}");
            self.expected[at] = at as u64;
            let mut cache = shared.lock();
            for (name, block) in (0..3).zip(&self.table) {
                cache.register(hash(name), *block);
            }
        }

        fn run(&mut self, steps: usize) {
            for _ in 0..steps {
                match self.below(6) {
                    0 => self.start_or_end(),
                    _ => self.step(),
                }
                for (block, expected) in self.table.iter().zip(&self.expected) {
                    assert_eq!(self.content(*block).load(Ordering::Relaxed), *expected);
                }
            }
            self.cache.if_sound(|cache| cache.release_all(&mut self.table));
        }
    }

    /// The hashes of the names; computed once, because that is slow under Miri.
    static HASHES: LazyLock<[BlockHash; 3]> = LazyLock::new(|| {
        [0, 1, 2].map(|name| BlockHash::root("class", b"").child(&[name; BLOCK_TOKENS]))
    });

    fn hash(name: u64) -> BlockHash {
        HASHES[name as usize]
    }

    #[test]
    fn engines_on_threads_find_their_contents_and_release_every_block() {
        let steps = if cfg!(miri) { 40 } else { 5_000 };
        let contents = [(); BLOCKS].map(|()| AtomicU64::new(0));
        for seed in 0..4 {
            let cache = SharedCache::new(BlockCache::new(BLOCKS));
            thread::scope(|scope| {
                for thread in 0..3 {
                    let (cache, random) = (cache.clone(), 1 + seed * 3 + thread);
                    let (table, expected) = (Vec::new(), Vec::new());
                    let contents = &contents[..];
                    let mut engine = Engine { cache, contents, table, expected, random };
                    scope.spawn(move || engine.run(steps));
                }
            });
            let cache = cache.lock();
            assert_eq!((cache.held(), cache.available()), (0, BLOCKS));
            cache.audit(&std::collections::BTreeMap::new());
        }
    }
}
