//! The identifier and the size of a KV block.

/// Token positions per KV block.
pub const BLOCK_TOKENS: usize = 16;

/// Index of a KV block in the backend's storage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockId(pub u32);

impl BlockId {
    /// In the place of a block that is no longer read.
    pub(crate) const GONE: Self = Self(u32::MAX);

    pub(crate) fn index(self) -> usize {
        self.0 as usize
    }
}

/// Returns the number of blocks that `tokens` positions take.
pub fn blocks_for(tokens: usize) -> usize {
    tokens.div_ceil(BLOCK_TOKENS)
}
