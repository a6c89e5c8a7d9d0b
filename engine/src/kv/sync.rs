//! The lock of shared blocks.
//!
//! [`super::shared`] imports it only from here, so that `xtask/loom` can compile the same file with loom's types and
//! test every interleaving.

pub use std::sync::{Arc, Mutex, MutexGuard};
