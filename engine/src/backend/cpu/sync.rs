//! Threads, locks and atomics of the thread pool.
//!
//! [`super::pool`] imports them only from here, so that `xtask/loom` can compile the same file with
//! loom's types and test every interleaving.

pub use std::{
    hint::spin_loop,
    sync::{
        Arc, Condvar, Mutex,
        atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering},
    },
    thread::{Builder, JoinHandle, yield_now},
};

pub use super::topology::stay_on;

/// Spins before a worker sleeps, and before a waiting caller starts to yield its core.
pub const SPINS: u32 = 4_000;
