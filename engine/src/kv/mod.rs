//! KV blocks: the holders of each block of the backend's storage, and the blocks that already have the
//! keys and values a new prompt needs. Pure bookkeeping; the storage itself belongs to the backend.
//!
//! Every block is in exactly one of three states:
//!
//! ```text
//!            allocate                    release by the last holder
//!   free ──────────────► held (refs ≥ 1) ───────────────────► free      (not in the prefix cache)
//!    ▲                        ▲    │
//!    │ evicted, oldest first  │    │ release by the last holder       (in the prefix cache)
//!    └──────────── cached ◄───┼────┘
//!                     └───────┘ prefix hit
//! ```
//!
//! [`BlockCache`] joins the two parts: [`BlockPool`] counts holders, [`PrefixCache`] records contents.

mod cache;
pub mod disk;
mod pool;
mod prefix;

pub(crate) use cache::{BlockCache, Writable};
pub(crate) use pool::BlockPool;
pub(crate) use prefix::{BlockHash, PrefixCache};

/// Token positions per KV block.
pub const BLOCK_TOKENS: usize = 16;

/// Index of a KV block in the backend's storage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockId(pub u32);

impl BlockId {
    pub(crate) fn index(self) -> usize {
        self.0 as usize
    }
}

/// Returns the number of blocks that `tokens` positions take.
pub fn blocks_for(tokens: usize) -> usize {
    tokens.div_ceil(BLOCK_TOKENS)
}
