//! Block pool and prefix cache together: allocation that evicts, prefix hits, copy-on-write.

use super::{BlockHash, BlockId, BlockPool, LayerGroups, PrefixCache};

/// How a holder may write to a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Writable {
    /// There is no other holder: write in place.
    InPlace,
    /// The block has other holders: copy its storage to this new block first. The caller now holds the new
    /// block.
    Copied(BlockId),
}

/// All KV blocks of a backend. See the state diagram in [the module](super).
#[derive(Debug, Clone)]
pub struct BlockCache {
    pool: BlockPool,
    prefix: PrefixCache,
}

impl BlockCache {
    /// Returns a cache over the blocks `0..count`, all free.
    pub fn new(count: usize) -> Self {
        let pool = BlockPool::new(count);
        let prefix = PrefixCache::new(pool.total());
        Self { pool, prefix }
    }

    /// Returns the number of blocks in the backend's storage.
    pub fn total(&self) -> usize {
        self.pool.total()
    }

    /// Returns the number of blocks without a holder, kept for their contents.
    pub fn cached(&self) -> usize {
        self.prefix.idle()
    }

    /// Returns the number of blocks available to allocations: free, or cached and evictable.
    pub fn available(&self) -> usize {
        self.pool.free() + self.prefix.idle()
    }

    /// Returns the number of blocks with a holder.
    pub fn held(&self) -> usize {
        self.total() - self.available()
    }

    /// Returns the number of holders of a block.
    pub fn references(&self, block: BlockId) -> u32 {
        self.pool.references(block)
    }

    /// Takes a block from the free list, or else evicts a cached block ([`PrefixCache::evict`]). `None` when every block is
    /// held.
    pub fn allocate(&mut self) -> Option<BlockId> {
        if let Some(block) = self.pool.allocate() {
            return Some(block);
        }
        let evicted = self.prefix.evict()?;
        self.pool.recycle(evicted);
        self.pool.allocate()
    }

    /// Returns the block with these contents, if it is cached. Adds no holder.
    pub fn peek(&self, hash: &BlockHash) -> Option<BlockId> {
        self.prefix.get(hash)
    }

    /// Adds a holder to a held or cached block.
    pub fn retain(&mut self, block: BlockId) {
        self.pool.retain(block);
        self.prefix.mark_held(block);
    }

    /// Removes a holder.
    pub fn release(&mut self, block: BlockId) {
        if self.pool.release(block) == 0 && !self.prefix.mark_idle(block) {
            self.pool.recycle(block);
        }
    }

    /// Removes a holder from every block of a list, the last block first (see [`PrefixCache`]).
    pub fn release_all(&mut self, table: &mut Vec<BlockId>) {
        while let Some(block) = table.pop() {
            self.release(block);
        }
    }

    /// Adds a full, held block to the prefix cache.
    pub fn register(&mut self, hash: BlockHash, block: BlockId) {
        self.prefix.insert(hash, block);
    }

    /// Removes a block from the prefix cache. Holders keep it; without holders it becomes free.
    pub fn forget(&mut self, block: BlockId) {
        let idle = self.prefix.contains(block) && self.references(block) == 0;
        self.prefix.forget(block);
        if idle {
            self.pool.recycle(block);
        }
    }

    /// Returns whether a waiting sequence uses a block with these contents.
    pub fn is_expected(&self, hash: &BlockHash) -> bool {
        self.prefix.is_expected(hash)
    }

    /// Records that a sequence waits that uses these blocks of every group: they are evicted last.
    pub fn expect(&mut self, hashes: &[BlockHash], groups: LayerGroups) {
        self.prefix.expect(of_groups(hashes, groups));
    }

    /// Records that the sequence waits no more.
    pub fn unexpect(&mut self, hashes: &[BlockHash], groups: LayerGroups) {
        self.prefix.unexpect(of_groups(hashes, groups));
    }

    /// Returns a copy of the bookkeeping in which these holders are the only ones, and no sequences wait: blocks of others are
    /// cached or free.
    pub fn with_holders(&self, held: impl Iterator<Item = BlockId>) -> Self {
        let mut copy = self.clone();
        copy.prefix.expect_nothing();
        let mut holders = vec![0; self.total()]; // (block)
        held.for_each(|block| holders[block.index()] += 1);
        for (block, holders) in (0..).map(BlockId).zip(holders) {
            (holders..self.references(block)).for_each(|_| copy.release(block));
        }
        copy
    }

    /// Returns the blocks with contents, held or cached, in ascending order.
    pub fn with_contents(&self) -> Vec<BlockId> {
        let has = |block: &BlockId| self.references(*block) > 0 || self.prefix.contains(*block);
        (0..self.total() as u32).map(BlockId).filter(has).collect()
    }

    /// Prepares a held block for writing. A sole holder writes in place, and the block leaves the prefix
    /// cache until it is registered again; otherwise the caller gets a new block. `None` when a copy is
    /// needed and every block is held.
    pub fn make_writable(&mut self, block: BlockId) -> Option<Writable> {
        if self.references(block) == 1 {
            self.prefix.forget(block);
            return Some(Writable::InPlace);
        }
        let copy = self.allocate()?;
        self.release(block);
        Some(Writable::Copied(copy))
    }
}

/// Returns the names of blocks in every group.
fn of_groups(hashes: &[BlockHash], groups: LayerGroups) -> impl Iterator<Item = BlockHash> {
    hashes.iter().flat_map(move |hash| (0..groups.count()).map(|group| hash.of_group(group)))
}

#[cfg(test)]
impl BlockCache {
    /// Checks the number of waiting sequences that use each block.
    pub(crate) fn audit_expected(&self, expected: &std::collections::HashMap<BlockHash, usize>) {
        assert_eq!(self.prefix.expected(), expected);
    }

    /// Checks that reference counts equal `holders`, and that every block is in exactly one of the states
    /// free, cached and held.
    pub(crate) fn audit(&self, holders: &std::collections::BTreeMap<BlockId, u32>) {
        let (mut free, mut cached) = (0, 0);
        for index in 0..self.total() as u32 {
            let block = BlockId(index);
            let held = holders.get(&block).copied().unwrap_or(0);
            assert_eq!(self.references(block), held, "holders of {block:?}");
            let states = [self.pool.is_free(block), self.prefix.is_idle(block), held > 0];
            assert_eq!(states.iter().filter(|state| **state).count(), 1, "{block:?}: {states:?}");
            free += usize::from(states[0]);
            cached += usize::from(states[1]);
        }
        assert_eq!((free, cached), (self.pool.free(), self.prefix.idle()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kv::BLOCK_TOKENS;

    fn hash(tokens: u32) -> BlockHash {
        BlockHash::root("class", b"").child(&[tokens; BLOCK_TOKENS])
    }

    fn allocate(cache: &mut BlockCache) -> BlockId {
        cache.allocate().expect("a block is available")
    }

    #[test]
    fn released_block_is_cached_if_registered_and_free_otherwise() {
        let mut cache = BlockCache::new(2);
        let (registered, plain) = (allocate(&mut cache), allocate(&mut cache));
        cache.register(hash(1), registered);
        cache.release_all(&mut vec![registered, plain]);
        assert_eq!((cache.held(), cache.cached(), cache.available()), (0, 1, 2));
        assert_eq!(cache.peek(&hash(1)), Some(registered));
    }

    #[test]
    fn hit_protects_a_block_from_eviction() {
        let mut cache = BlockCache::new(1);
        let block = allocate(&mut cache);
        cache.register(hash(1), block);
        cache.release(block);
        cache.retain(block);
        assert_eq!(cache.allocate(), None);
        cache.release(block);
        assert_eq!(cache.allocate(), Some(block), "without holders again, so evicted");
        assert_eq!(cache.peek(&hash(1)), None);
    }

    #[test]
    fn tail_of_a_chain_is_evicted_before_its_head() {
        let mut cache = BlockCache::new(2);
        let mut table = vec![allocate(&mut cache), allocate(&mut cache)];
        cache.register(hash(1), table[0]);
        cache.register(hash(2), table[1]);
        cache.release_all(&mut table);
        allocate(&mut cache);
        assert!(cache.peek(&hash(1)).is_some());
        assert!(cache.peek(&hash(2)).is_none());
    }

    #[test]
    fn writing_copies_a_shared_block_and_unregisters_an_unshared_one() {
        let mut cache = BlockCache::new(2);
        let block = allocate(&mut cache);
        cache.register(hash(1), block);
        cache.retain(block);
        let Some(Writable::Copied(copy)) = cache.make_writable(block) else {
            panic!("a shared block is copied")
        };
        assert_eq!((cache.references(block), cache.references(copy)), (1, 1));
        assert_eq!(cache.peek(&hash(1)), Some(block));
        assert_eq!(cache.make_writable(block), Some(Writable::InPlace));
        assert_eq!(cache.peek(&hash(1)), None);
    }

    #[test]
    fn copy_for_some_holders_keeps_names_and_frees_the_rest() {
        let mut cache = BlockCache::new(5);
        let [mine, both, named, other] = [(); 4].map(|()| allocate(&mut cache));
        cache.retain(both);
        cache.register(hash(1), named);
        let copy = cache.with_holders([mine, both].into_iter());
        assert_eq!((copy.held(), copy.cached(), copy.available()), (2, 1, 3));
        assert_eq!((copy.references(both), copy.references(other)), (1, 0));
        assert_eq!(copy.peek(&hash(1)), Some(named));
        let mut contents = vec![mine, both, named];
        contents.sort();
        assert_eq!(copy.with_contents(), contents);
        assert_eq!(cache.held(), 4, "the original is unchanged");
    }

    #[test]
    fn copy_is_refused_without_a_free_block() {
        let mut cache = BlockCache::new(1);
        let block = allocate(&mut cache);
        cache.retain(block);
        assert_eq!(cache.make_writable(block), None);
        assert_eq!(cache.references(block), 2);
    }

    #[test]
    fn forgetting_an_unheld_block_frees_it_once() {
        let mut cache = BlockCache::new(1);
        let block = allocate(&mut cache);
        cache.register(hash(1), block);
        cache.release(block);
        cache.forget(block);
        cache.forget(block);
        assert_eq!((cache.available(), cache.cached()), (1, 0));
    }
}
