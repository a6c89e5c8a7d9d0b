//! What the tiers have and did.

use std::sync::atomic::{AtomicU64, Ordering};

use super::FolderUse;

/// Counters of a cache.
#[derive(Debug, Default)]
pub(super) struct Counters {
    pub hits: AtomicU64,
    pub host_hits: AtomicU64,
    pub remote_hits: AtomicU64,
    pub misses: AtomicU64,
    pub written: AtomicU64,
    pub refused: AtomicU64,
    pub failed: AtomicU64,
    pub damaged: AtomicU64,
    pub blocks: AtomicU64,
    pub bytes: AtomicU64,
    pub host_bytes: AtomicU64,
}

/// What a cache has and did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TierStats {
    /// Blocks found in any tier.
    pub hits: u64,
    /// Of these, blocks found in the memory of the host.
    pub host_hits: u64,
    /// Of these, blocks found at other workers.
    pub remote_hits: u64,
    /// Looked up blocks that no tier had, one for each chain.
    pub misses: u64,
    /// Blocks written.
    pub written: u64,
    /// Blocks not written: too many waited, or there was no room.
    pub refused: u64,
    /// Writes that failed.
    pub failed: u64,
    /// Files that were damaged, and deleted.
    pub damaged: u64,
    /// Files of the folder.
    pub usage: FolderUse,
    /// Bytes of blocks in the memory of the host.
    pub host_bytes: u64,
}

impl Counters {
    /// Returns the current values.
    pub fn stats(&self) -> TierStats {
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        TierStats {
            hits: of(&self.hits),
            host_hits: of(&self.host_hits),
            remote_hits: of(&self.remote_hits),
            misses: of(&self.misses),
            written: of(&self.written),
            refused: of(&self.refused),
            failed: of(&self.failed),
            damaged: of(&self.damaged),
            usage: FolderUse { blocks: of(&self.blocks), bytes: of(&self.bytes) },
            host_bytes: of(&self.host_bytes),
        }
    }
}
