//! The engine's thread pool, and its KV blocks shared by several engines, compiled with loom's threads, locks and
//! atomics.
//!
//! The sources are the engine's own files. Only `sync` and `kv::sync` differ: the engine's versions re-export the
//! types of the standard library. No `--cfg loom` is needed, so these tests build and run with all
//! others.

mod sync {
    pub use loom::{
        hint::spin_loop,
        sync::{
            Arc, Condvar, Mutex,
            atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering},
        },
        thread::{Builder, JoinHandle, yield_now},
    };

    /// Models have no memory nodes.
    pub fn stay_on(_: Option<usize>) {}

    /// One, so that a model explores both a worker that spins and one that sleeps.
    pub const SPINS: u32 = 1;
}

#[path = "../../../engine/src/backend/cpu/pool.rs"]
mod pool;

/// The bookkeeping of KV blocks.
#[allow(dead_code, reason = "parts that only blocks on disk need")]
#[path = "../../../engine/src/kv"]
pub mod kv {
    mod block;
    mod cache;
    mod groups;
    mod pool;
    mod prefix;
    mod shared;

    mod sync {
        pub use loom::sync::{Arc, Mutex, MutexGuard};
    }

    pub use block::{BLOCK_TOKENS, BlockId, blocks_for};
    pub use cache::{BlockCache, Writable};
    pub use groups::LayerGroups;
    pub use pool::BlockPool;
    pub use prefix::{BlockHash, PrefixCache};
    pub use shared::SharedCache;
}

pub use pool::Pool;
