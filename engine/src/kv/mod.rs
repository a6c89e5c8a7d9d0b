//! KV blocks: who holds which block of the backend's storage, and which block already has the keys
//! and values a new prompt needs. Pure bookkeeping; the storage itself belongs to the backend.

/// Token positions per KV block.
pub const BLOCK_TOKENS: usize = 16;

/// Index of a KV block in the backend's storage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockId(pub u32);
