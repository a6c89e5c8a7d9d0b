//! The engine's thread pool, compiled with loom's threads, locks and atomics.
//!
//! The source is the engine's own file. Only [`sync`] differs: the engine's version re-exports the
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

    /// One, so that a model explores both a worker that spins and one that sleeps.
    pub const SPINS: u32 = 1;
}

#[path = "../../../engine/src/backend/cpu/pool.rs"]
mod pool;

pub use pool::Pool;
