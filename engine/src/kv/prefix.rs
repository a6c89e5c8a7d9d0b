//! The prefix cache: finds the block with the keys and values of given tokens.
//!
//! Keys and values at a position depend on every token before it, so a block is identified by a chain:
//!
//! ```text
//! root     = BLAKE3(numerics class, tenant salt)
//! hash[0]  = BLAKE3(root,    tokens  0..16)
//! hash[i]  = BLAKE3(hash[i-1], tokens 16 i .. 16 i + 16)
//! ```
//!
//! Only full blocks have a hash. The numerics class separates blocks that different arithmetic wrote; the
//! salt keeps tenants from finding out by latency what others have sent.
//!
//! Blocks without a holder are idle, and the one idle for longest is evicted first. Holders release
//! their last block first, so the tail of a chain is evicted before its head: without its head a chain
//! could never be hit.

use std::collections::{BTreeMap, HashMap};

use super::{BLOCK_TOKENS, BlockId};

/// Hash of a full block's contents: of the chain of all tokens up to its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct BlockHash([u8; 32]);

impl BlockHash {
    /// Start of the chains of a numerics class and a tenant's `salt`.
    pub fn root(numerics_class: &str, salt: &[u8]) -> Self {
        let mut hasher = blake3::Hasher::new_derive_key("tritmill KV prefix chain");
        hasher.update(&(numerics_class.len() as u64).to_le_bytes());
        hasher.update(numerics_class.as_bytes());
        hasher.update(salt);
        Self(*hasher.finalize().as_bytes())
    }

    pub(crate) fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// Returns the name of the state of recurrent layers after this block.
    pub(crate) fn of_state(&self) -> Self {
        Self(blake3::derive_key("tritmill state of recurrent layers", &self.0))
    }

    /// Returns the name of the same block in another [group of layers](super::LayerGroups); the hash itself is that of group 0.
    pub(crate) fn of_group(&self, group: usize) -> Self {
        let mut name = *self;
        name.0[31] ^= group as u8;
        name
    }

    /// Parses 64 hexadecimal digits in lower case, as [`Display`](std::fmt::Display) writes them.
    pub(crate) fn from_digits(digits: &str) -> Option<Self> {
        let is_lower = digits.bytes().all(|digit| matches!(digit, b'0'..=b'9' | b'a'..=b'f'));
        let hash = blake3::Hash::from_hex(digits).ok().filter(|_| is_lower)?;
        Some(Self(*hash.as_bytes()))
    }

    /// Returns the hashes of full blocks of tokens, which follow each other.
    pub fn chain(root: Self, tokens: &[u32]) -> Vec<Self> {
        let next = |last: &mut Self, tokens: &[u32]| {
            *last = last.child(tokens);
            Some(*last)
        };
        tokens.chunks_exact(BLOCK_TOKENS).scan(root, next).collect()
    }

    /// Hash of the block after this one, with `tokens`.
    ///
    /// # Panics
    /// If `tokens` is not one full block.
    pub fn child(&self, tokens: &[u32]) -> Self {
        assert_eq!(tokens.len(), BLOCK_TOKENS, "only full blocks have a hash");
        let mut bytes = [0u8; 32 + 4 * BLOCK_TOKENS];
        bytes[..32].copy_from_slice(&self.0);
        for (to, token) in bytes[32..].chunks_exact_mut(4).zip(tokens) {
            to.copy_from_slice(&token.to_le_bytes());
        }
        Self(*blake3::hash(&bytes).as_bytes())
    }
}

impl std::fmt::Display for BlockHash {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&blake3::Hash::from_bytes(self.0).to_hex())
    }
}

/// A block in the cache.
#[derive(Debug, Clone, Copy)]
struct Entry {
    hash: BlockHash,
    /// Tick at which the last holder released it; `None` while it is held.
    idle_since: Option<u64>,
}

/// Contents of blocks, and the order in which idle ones are evicted.
#[derive(Debug, Clone)]
pub struct PrefixCache {
    blocks: HashMap<BlockHash, BlockId>,
    entries: Vec<Option<Entry>>, // (block)
    /// Idle blocks in the order of eviction: those that waiting sequences use last, then by the tick of their release.
    idle: BTreeMap<(bool, u64), BlockId>,
    /// Number of waiting sequences that use a block.
    expected: HashMap<BlockHash, usize>,
    /// Number of releases, as a logical clock.
    tick: u64,
}

impl PrefixCache {
    /// Returns an empty cache over the blocks `0..count`.
    pub fn new(count: usize) -> Self {
        let (blocks, entries) = (HashMap::with_capacity(count), vec![None; count]);
        Self { blocks, entries, idle: BTreeMap::new(), expected: HashMap::new(), tick: 0 }
    }

    /// Returns the block with these contents, if it is cached.
    pub fn get(&self, hash: &BlockHash) -> Option<BlockId> {
        self.blocks.get(hash).copied()
    }

    /// Returns whether the cache has this block.
    pub fn contains(&self, block: BlockId) -> bool {
        self.entries[block.index()].is_some()
    }

    /// Returns the number of idle blocks, which eviction can free.
    pub fn idle(&self) -> usize {
        self.idle.len()
    }

    /// Adds a held block. Only the first block with given contents is added; a second one returns to the
    /// free list with its release.
    pub fn insert(&mut self, hash: BlockHash, block: BlockId) {
        if self.contains(block) || self.blocks.contains_key(&hash) {
            return;
        }
        self.blocks.insert(hash, block);
        self.entries[block.index()] = Some(Entry { hash, idle_since: None });
    }

    /// Removes a block, because its contents are about to change or are in doubt.
    pub fn forget(&mut self, block: BlockId) {
        if let Some(entry) = self.entries[block.index()].take() {
            self.blocks.remove(&entry.hash);
            if let Some(tick) = entry.idle_since {
                self.idle.remove(&(self.expected.contains_key(&entry.hash), tick));
            }
        }
    }

    /// Records that the last holder released the block. Returns whether the cache keeps it.
    pub fn mark_idle(&mut self, block: BlockId) -> bool {
        let Some(entry) = &mut self.entries[block.index()] else { return false };
        self.tick += 1;
        entry.idle_since = Some(self.tick);
        self.idle.insert((self.expected.contains_key(&entry.hash), self.tick), block);
        true
    }

    /// Records that an idle block has a holder again.
    pub fn mark_held(&mut self, block: BlockId) {
        if let Some(entry) = &mut self.entries[block.index()]
            && let Some(tick) = entry.idle_since.take()
        {
            self.idle.remove(&(self.expected.contains_key(&entry.hash), tick));
        }
    }

    /// Returns whether a waiting sequence uses a block with these contents.
    pub fn is_expected(&self, hash: &BlockHash) -> bool {
        self.expected.contains_key(hash)
    }

    /// Records that a sequence waits that uses these blocks.
    pub fn expect(&mut self, hashes: impl Iterator<Item = BlockHash>) {
        for hash in hashes {
            let count = self.expected.entry(hash).or_default();
            *count += 1;
            if *count == 1 {
                self.reorder(&hash);
            }
        }
    }

    /// Records that the sequence waits no more.
    pub fn unexpect(&mut self, hashes: impl Iterator<Item = BlockHash>) {
        for hash in hashes {
            let Some(count) = self.expected.get_mut(&hash) else { continue };
            *count -= 1;
            if *count == 0 {
                self.expected.remove(&hash);
                self.reorder(&hash);
            }
        }
    }

    /// Forgets all waiting sequences.
    pub fn expect_nothing(&mut self) {
        self.expected.clear();
        self.idle = std::mem::take(&mut self.idle)
            .into_iter()
            .map(|((_, tick), block)| ((false, tick), block))
            .collect();
    }

    /// Moves an idle block to its new place in the order, after it became expected or unexpected.
    fn reorder(&mut self, hash: &BlockHash) {
        let is_expected = self.expected.contains_key(hash);
        let entry = self.blocks.get(hash).map(|block| (*block, self.entries[block.index()]));
        if let Some((block, Some(Entry { idle_since: Some(tick), .. }))) = entry {
            self.idle.remove(&(!is_expected, tick));
            self.idle.insert((is_expected, tick), block);
        }
    }

    /// Removes an idle block and returns it: one that no waiting sequence uses, if there are any, and among these the one that
    /// has been idle for longest.
    pub fn evict(&mut self) -> Option<BlockId> {
        let (_, block) = self.idle.pop_first()?;
        self.forget(block);
        Some(block)
    }
}

#[cfg(test)]
impl PrefixCache {
    pub(super) fn expected(&self) -> &HashMap<BlockHash, usize> {
        &self.expected
    }

    pub(super) fn is_idle(&self, block: BlockId) -> bool {
        let entry = self.entries[block.index()];
        assert!(entry.is_none_or(|entry| self.get(&entry.hash) == Some(block)));
        entry.is_some_and(|entry| entry.idle_since.is_some())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(tokens: u32) -> Vec<u32> {
        (0..BLOCK_TOKENS as u32).map(|i| tokens + i).collect()
    }

    #[test]
    fn hash_depends_on_class_salt_parent_and_tokens() {
        let root = BlockHash::root("class", b"salt");
        let hash = root.child(&block(1));
        assert_eq!(hash, BlockHash::root("class", b"salt").child(&block(1)));
        assert_ne!(hash, BlockHash::root("other", b"salt").child(&block(1)));
        assert_ne!(hash, BlockHash::root("class", b"pepper").child(&block(1)));
        assert_ne!(hash, BlockHash::root("clas", b"ssalt").child(&block(1)));
        assert_ne!(hash, root.child(&block(2)));
        assert_ne!(root.child(&block(2)), hash.child(&block(2)));
    }

    #[test]
    fn blocks_that_waiting_sequences_use_are_evicted_last() {
        let mut cache = PrefixCache::new(4);
        let root = BlockHash::root("", b"");
        let hashes = [0, 1, 2, 3].map(|i| root.child(&block(i)));
        for (i, hash) in (0..).zip(&hashes) {
            cache.insert(*hash, BlockId(i));
            cache.mark_idle(BlockId(i));
        }
        let of = |range: std::ops::Range<usize>| hashes[range].iter().copied();
        cache.expect(of(0..2));
        cache.expect(of(1..3));
        cache.expect(of(0..1));
        cache.unexpect(of(1..3));
        // 0 is used by two, 1 by one, 2 no more; released again, 2 is newer than 3.
        cache.mark_held(BlockId(2));
        cache.mark_idle(BlockId(2));
        assert_eq!(cache.evict(), Some(BlockId(3)));
        assert_eq!(cache.evict(), Some(BlockId(2)));
        cache.unexpect(of(0..2));
        assert_eq!(cache.evict(), Some(BlockId(1)), "0 is still expected");
        cache.expect_nothing();
        cache.forget(BlockId(0));
        assert_eq!((cache.evict(), cache.idle()), (None, 0));
    }

    #[test]
    fn block_released_first_is_evicted_first() {
        let mut cache = PrefixCache::new(3);
        let root = BlockHash::root("", b"");
        let hashes = [0, 1, 2].map(|i| root.child(&block(i)));
        for (i, hash) in hashes.iter().enumerate() {
            cache.insert(*hash, BlockId(i as u32));
        }
        for i in [1, 0, 2] {
            assert!(cache.mark_idle(BlockId(i)));
        }
        cache.mark_held(BlockId(1));
        assert!(cache.mark_idle(BlockId(1)));
        assert_eq!(cache.evict(), Some(BlockId(0)));
        assert_eq!(cache.get(&hashes[0]), None);
        assert_eq!(cache.evict(), Some(BlockId(2)));
        assert_eq!(cache.evict(), Some(BlockId(1)));
        assert_eq!(cache.evict(), None);
    }

    #[test]
    fn held_blocks_are_never_evicted() {
        let mut cache = PrefixCache::new(1);
        cache.insert(BlockHash::root("", b"").child(&block(0)), BlockId(0));
        assert_eq!(cache.evict(), None);
    }

    #[test]
    fn first_of_two_blocks_with_equal_contents_stays() {
        let mut cache = PrefixCache::new(2);
        let hash = BlockHash::root("", b"").child(&block(0));
        cache.insert(hash, BlockId(0));
        cache.insert(hash, BlockId(1));
        assert_eq!(cache.get(&hash), Some(BlockId(0)));
        assert!(!cache.mark_idle(BlockId(1)));
    }
}
