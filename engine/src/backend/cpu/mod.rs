//! The CPU backend: packed weights, KV storage and a pool of threads.
//!
//! `forward.rs` contains the step, in the order of the paper's figure; each of its named parts is one
//! or a few parallel regions. The result of a row depends on that row alone: integer sums are exact,
//! every float reduction has one order (see [`crate::kernels::float`]), and the number of threads
//! decides only which thread computes a part.

mod attention;
mod backend;
mod buffers;
mod delta;
mod disjoint;
mod experts;
mod forward;
pub(super) mod head;
mod kv_layers;
mod kv_store;
mod linears;
mod load;
mod logits;
pub(crate) mod memory;
mod options;
pub(crate) mod packed_file;
mod pool;
pub(super) mod screen;
mod sections;
mod self_test;
mod sync;
mod tiles;
mod together;
pub(crate) mod topology;
mod weights;

pub use load::{LoadError, kv_block_bytes, layer_groups, load};
pub use options::{CpuOptions, HeadMode, KvType, PackedCache};
pub use self_test::SelfTestError;
