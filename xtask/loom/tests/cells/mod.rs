//! Models with few forced switches of threads, and memory in which loom finds races.

use loom::{cell::UnsafeCell, model::Builder};

/// Explores `model` with at most `preemptions` forced switches of threads in an execution.
pub fn explore(preemptions: usize, model: impl Fn() + Sync + Send + 'static) {
    let mut builder = Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(model);
}

/// Memory that several threads access without synchronization of its own: loom fails the model if two accesses race.
pub struct Cells(Vec<UnsafeCell<usize>>);

// SAFETY: loom checks every access.
unsafe impl Sync for Cells {}

impl Cells {
    pub fn new(count: usize) -> Self {
        Self((0..count).map(UnsafeCell::new).collect())
    }

    pub fn add(&self, index: usize, value: usize) {
        // SAFETY: loom checks that no other thread accesses the cell.
        self.0[index].with_mut(|cell| unsafe { *cell += value });
    }

    pub fn values(&self) -> Vec<usize> {
        // SAFETY: loom checks that no other thread writes the cell.
        self.0.iter().map(|cell| cell.with(|cell| unsafe { *cell })).collect()
    }

    pub fn set(&self, index: usize, value: usize) {
        // SAFETY: loom checks that no other thread accesses the cell.
        self.0[index].with_mut(|cell| unsafe { *cell = value });
    }

    pub fn get(&self, index: usize) -> usize {
        // SAFETY: loom checks that no other thread writes the cell.
        self.0[index].with(|cell| unsafe { *cell })
    }
}
