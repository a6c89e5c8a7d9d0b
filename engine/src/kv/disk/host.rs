//! Blocks in the memory of the host: the tier between a GPU's blocks and the disk.

use std::collections::{BTreeMap, HashMap};

use crate::kv::BlockHash;

/// A block and when it was used.
#[derive(Debug)]
struct Entry {
    content: Vec<u8>,
    used: u64,
    is_expected: bool,
}

/// Blocks by hash within a limit of bytes. Blocks that no waiting request will use are evicted first, those that were
/// not used for longest before others.
#[derive(Debug)]
pub(super) struct HostBlocks {
    bytes_max: u64,
    bytes: u64,
    blocks: HashMap<BlockHash, Entry>,
    /// The order of eviction: whether a waiting request will use a block, and when it was used.
    order: BTreeMap<(bool, u64), BlockHash>,
    /// Number of uses so far.
    clock: u64,
}

impl HostBlocks {
    pub fn new(bytes_max: u64) -> Self {
        let (blocks, order) = (HashMap::new(), BTreeMap::new());
        Self { bytes_max, bytes: 0, blocks, order, clock: 0 }
    }

    /// Returns the number of bytes of all blocks.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns whether the block is there.
    pub fn contains(&self, hash: &BlockHash) -> bool {
        self.blocks.contains_key(hash)
    }

    /// Returns a block, which was used now.
    pub fn get(&mut self, hash: &BlockHash) -> Option<Vec<u8>> {
        let entry = self.blocks.get_mut(hash)?;
        self.clock += 1;
        self.order.remove(&(entry.is_expected, entry.used));
        entry.used = self.clock;
        self.order.insert((entry.is_expected, entry.used), *hash);
        Some(entry.content.clone())
    }

    /// Adds a block, in the place of others if necessary; not if these are all expected and it is not.
    pub fn insert(&mut self, hash: BlockHash, content: &[u8], is_expected: bool) {
        let bytes = content.len() as u64;
        if self.blocks.contains_key(&hash) || bytes > self.bytes_max {
            return;
        }
        if !is_expected {
            let others = self.order.iter().take_while(|((is_expected, _), _)| !is_expected);
            let evictable = others.filter_map(|(_, hash)| self.blocks.get(hash));
            let evictable: u64 = evictable.map(|entry| entry.content.len() as u64).sum();
            if self.bytes + bytes > self.bytes_max + evictable {
                return;
            }
        }
        while self.bytes + bytes > self.bytes_max {
            let Some((_, victim)) = self.order.pop_first() else { return };
            if let Some(entry) = self.blocks.remove(&victim) {
                self.bytes -= entry.content.len() as u64;
            }
        }
        self.clock += 1;
        self.bytes += bytes;
        self.order.insert((is_expected, self.clock), hash);
        let (content, used) = (content.to_vec(), self.clock);
        self.blocks.insert(hash, Entry { content, used, is_expected });
    }

    /// Notes whether a waiting request will use a block.
    pub fn set_expected(&mut self, hash: &BlockHash, is_expected: bool) {
        if let Some(entry) = self.blocks.get_mut(hash) {
            self.order.remove(&(entry.is_expected, entry.used));
            entry.is_expected = is_expected;
            self.order.insert((is_expected, entry.used), *hash);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kv::BLOCK_TOKENS;

    fn hash(number: u32) -> BlockHash {
        BlockHash::root("class", b"").child(&[number; BLOCK_TOKENS])
    }

    fn kept(blocks: &HostBlocks) -> Vec<u32> {
        (0..10).filter(|number| blocks.blocks.contains_key(&hash(*number))).collect()
    }

    #[test]
    fn block_that_was_not_used_for_longest_goes_first() {
        let mut blocks = HostBlocks::new(30);
        (0..3).for_each(|number| blocks.insert(hash(number), &[number as u8; 10], false));
        assert_eq!(blocks.get(&hash(0)), Some(vec![0; 10]));
        blocks.insert(hash(3), &[3; 10], false);
        assert_eq!((kept(&blocks), blocks.bytes()), (vec![0, 2, 3], 30));
        assert_eq!(blocks.get(&hash(1)), None);
        blocks.insert(hash(4), &[4; 31], false);
        assert_eq!(kept(&blocks), [0, 2, 3], "it is larger than the limit");
        blocks.insert(hash(4), &[4; 31], true);
        assert_eq!(kept(&blocks), [0, 2, 3], "also if it is expected");
        blocks.insert(hash(3), &[5; 10], true);
        assert_eq!((kept(&blocks), blocks.bytes()), (vec![0, 2, 3], 30), "it was there");
        assert_eq!(blocks.get(&hash(3)), Some(vec![3; 10]));
    }

    #[test]
    fn expected_blocks_stay() {
        let mut blocks = HostBlocks::new(30);
        (0..3).for_each(|number| blocks.insert(hash(number), &[1; 10], number < 2));
        blocks.insert(hash(3), &[1; 10], false);
        assert_eq!(kept(&blocks), [0, 1, 3], "only one was not expected");
        blocks.set_expected(&hash(3), true);
        blocks.insert(hash(4), &[1; 10], false);
        assert_eq!(kept(&blocks), [0, 1, 3], "all are");
        blocks.insert(hash(5), &[1; 10], true);
        assert_eq!(kept(&blocks), [1, 3, 5]);
        blocks.set_expected(&hash(3), false);
        blocks.insert(hash(6), &[1; 20], true);
        assert_eq!(kept(&blocks), [5, 6]);
        assert_eq!(blocks.bytes(), 30);
    }
}
