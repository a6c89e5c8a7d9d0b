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
//! Several engines may use the blocks of one storage, each through its [`SharedCache`].

mod block;
mod cache;
pub mod disk;
mod groups;
mod pool;
mod prefix;
mod shared;
mod states;
mod sync;
mod table;

pub use block::{BLOCK_TOKENS, BlockId, blocks_for};
pub(crate) use cache::{BlockCache, Writable};
pub use groups::LayerGroups;
pub(crate) use pool::BlockPool;
pub(crate) use prefix::{BlockHash, PrefixCache};
pub(crate) use shared::SharedCache;
pub(crate) use states::StateCache;
pub(crate) use table::BlockTable;
