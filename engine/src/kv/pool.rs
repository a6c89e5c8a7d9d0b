//! The free list and the reference counts of KV blocks.
//!
//! A block leaves the free list with one holder and can get more ([`BlockPool::retain`]: forks and prefix
//! hits). It returns by [`BlockPool::recycle`]: a block without holders is not free yet, since the
//! prefix cache may keep its contents.

use super::BlockId;

/// Free list and holder counts over the blocks `0..count`.
#[derive(Debug, Clone)]
pub struct BlockPool {
    /// Free blocks. The last is allocated next, so that storage stays in the processor's caches.
    free: Vec<BlockId>,
    /// Holders of each block: the sequences with the block in their table.
    references: Vec<u32>, // (block)
}

impl BlockPool {
    /// Returns a pool of `count` free blocks.
    pub fn new(count: usize) -> Self {
        let count = u32::try_from(count).unwrap_or(u32::MAX);
        Self { free: (0..count).rev().map(BlockId).collect(), references: vec![0; count as usize] }
    }

    /// Returns the number of blocks in the pool, free or not.
    pub fn total(&self) -> usize {
        self.references.len()
    }

    /// Returns the number of blocks on the free list.
    pub fn free(&self) -> usize {
        self.free.len()
    }

    /// Returns the number of holders of a block.
    pub fn references(&self, block: BlockId) -> u32 {
        self.references[block.index()]
    }

    /// Takes a block off the free list, with one holder.
    pub fn allocate(&mut self) -> Option<BlockId> {
        let block = self.free.pop()?;
        debug_assert_eq!(self.references(block), 0, "a free block has no holder");
        self.references[block.index()] = 1;
        Some(block)
    }

    /// Adds a holder.
    pub fn retain(&mut self, block: BlockId) {
        self.references[block.index()] += 1;
    }

    /// Removes a holder and returns the number of remaining ones.
    ///
    /// # Panics
    /// If the block has no holder, because a caller released it twice.
    pub fn release(&mut self, block: BlockId) -> u32 {
        let references = &mut self.references[block.index()];
        assert!(*references > 0, "block {} released without a holder", block.0);
        *references -= 1;
        *references
    }

    /// Puts a block without holders on the free list.
    ///
    /// # Panics
    /// If the block still has a holder.
    pub fn recycle(&mut self, block: BlockId) {
        assert_eq!(self.references(block), 0, "block {} recycled while held", block.0);
        self.free.push(block);
    }
}

#[cfg(test)]
impl BlockPool {
    pub(super) fn is_free(&self, block: BlockId) -> bool {
        self.free.contains(&block)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn block_is_allocated_once_until_recycled() {
        let mut pool = BlockPool::new(2);
        let a = pool.allocate().expect("two are free");
        let b = pool.allocate().expect("one is free");
        assert_ne!(a, b);
        assert_eq!(pool.allocate(), None);
        assert_eq!(pool.release(a), 0);
        assert_eq!(pool.allocate(), None, "released is not yet free");
        pool.recycle(a);
        assert_eq!(pool.allocate(), Some(a));
    }

    #[test]
    fn every_holder_must_release() {
        let mut pool = BlockPool::new(1);
        let a = pool.allocate().expect("one is free");
        pool.retain(a);
        assert_eq!(pool.release(a), 1);
        assert_eq!(pool.release(a), 0);
    }

    #[test]
    #[should_panic(expected = "released without a holder")]
    fn double_release_panics() {
        let mut pool = BlockPool::new(1);
        let a = pool.allocate().expect("one is free");
        pool.release(a);
        pool.release(a);
    }
}
