//! Threads, locks and atomics of the thread pool.
//!
//! [`super::pool`] takes them from here alone, so that `xtask/loom` can compile the same file over
//! loom's and try every interleaving.

pub use std::{
    hint::spin_loop,
    sync::{
        Arc, Condvar, Mutex,
        atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering},
    },
    thread::{Builder, JoinHandle, yield_now},
};

/// Spins before a worker sleeps, and before a waiting caller starts to yield its core.
pub const SPINS: u32 = 4_000;
