//! A thread pool with workers that stay awake between the parallel regions of a step.
//!
//! A step has hundreds of short regions, and waking a sleeping thread takes longer than many of these
//! regions. Workers therefore spin for a short while after a region, and sleep only if no other one
//! follows. Each thread has a range of the region's tasks, with weights that are adjacent in memory. It
//! first runs the tasks of its own range and then the remaining tasks of other ranges, so that a delayed
//! thread runs fewer tasks. A task's result does not depend on the thread that runs it.
//!
//! `xtask/loom` tests this file with loom.

use std::{
    ops::Range,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    sync::PoisonError,
};

use super::sync::{
    Arc, AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Builder, Condvar, JoinHandle, Mutex,
    Ordering, SPINS, spin_loop, stay_on, yield_now,
};

type Task<'a> = &'a (dyn Fn(usize) + Sync);

/// The next task of a range, on a cache line of its own.
#[derive(Default)]
#[repr(align(128))]
struct NextTask(AtomicUsize);

#[derive(Default)]
struct Shared {
    /// Number of the newest region. Workers wait for it to change.
    region: AtomicU64,
    /// The running region's task: a `*const Task` into the caller's stack frame.
    task: AtomicPtr<Task<'static>>,
    task_count: AtomicUsize,
    /// One range of tasks for each thread, the caller's first.
    ranges: Vec<NextTask>,
    /// Workers that have not finished the region.
    busy: AtomicUsize,
    /// Whether a task of the region panicked in a worker.
    panicked: AtomicBool,
    stop: AtomicBool,
    sleepers: Mutex<usize>,
    wake: Condvar,
}

/// A fixed set of threads, the caller's included.
pub struct Pool {
    shared: Arc<Shared>,
    /// Memory node that the threads stay on.
    node: Option<usize>,
    workers: Vec<JoinHandle<()>>,
}

impl Pool {
    /// Starts `threads - 1` workers; `threads` is at least 1. With a memory node, they and every thread that calls
    /// [`Self::run`] stay on its cores.
    pub fn new(node: Option<usize>, threads: usize) -> Self {
        let ranges = (0..threads.max(1)).map(|_| NextTask::default()).collect();
        let shared = Arc::new(Shared { ranges, ..Shared::default() });
        let workers = (1..threads.max(1))
            .map(|i| {
                let shared = Arc::clone(&shared);
                Builder::new()
                    .name(format!("step-{i}"))
                    .spawn(move || {
                        stay_on(node);
                        work(&shared, i);
                    })
                    .expect("the system refused a thread at start-up")
            })
            .collect();
        Self { shared, node, workers }
    }

    /// Returns the number of threads that run tasks, the caller's included.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Returns the memory node that the threads stay on.
    pub fn node(&self) -> Option<usize> {
        self.node
    }

    /// Runs `task(0)` … `task(count - 1)`, each once and on any thread, and returns when all have finished.
    ///
    /// It takes `&mut self` so that regions never overlap.
    ///
    /// # Panics
    /// If a task panics. The pool stays usable.
    pub fn run(&mut self, count: usize, task: &(dyn Fn(usize) + Sync)) {
        stay_on(self.node);
        if self.workers.is_empty() || count <= 1 {
            (0..count).for_each(task);
            return;
        }
        let shared = &*self.shared;
        let task: *const Task<'_> = &task;
        shared.task.store(task.cast_mut().cast(), Ordering::Relaxed);
        shared.task_count.store(count, Ordering::Relaxed);
        for (thread, next) in shared.ranges.iter().enumerate() {
            next.0.store(shared.range(thread, count).start, Ordering::Relaxed);
        }
        shared.busy.store(self.workers.len(), Ordering::Relaxed);
        {
            // The lock orders this with a worker that is about to sleep, so that no wake-up is lost.
            let sleepers = shared.sleepers.lock().unwrap_or_else(PoisonError::into_inner);
            shared.region.fetch_add(1, Ordering::Release);
            if *sleepers > 0 {
                shared.wake.notify_all();
            }
        }
        let mine = catch_unwind(AssertUnwindSafe(|| run_tasks(shared, 0)));
        // `task` is in this stack frame: do not return before every worker has finished with it.
        let mut spins = 0;
        while shared.busy.load(Ordering::Acquire) > 0 {
            spins += 1;
            if spins < SPINS { spin_loop() } else { yield_now() }
        }
        if let Err(panic) = mine {
            resume_unwind(panic);
        }
        assert!(!shared.panicked.swap(false, Ordering::Relaxed), "a task panicked in a worker");
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        {
            let _sleepers = self.shared.sleepers.lock().unwrap_or_else(PoisonError::into_inner);
            self.shared.stop.store(true, Ordering::Relaxed);
            self.shared.region.fetch_add(1, Ordering::Release);
            self.shared.wake.notify_all();
        }
        for worker in self.workers.drain(..) {
            // A worker exits only after `stop`; `run` has caught and reported panics of its tasks.
            let _ = worker.join();
        }
    }
}

impl Shared {
    /// Returns the range of the `count` tasks that a thread runs first.
    fn range(&self, thread: usize, count: usize) -> Range<usize> {
        let threads = self.ranges.len();
        thread * count / threads..(thread + 1) * count / threads
    }
}

/// Runs tasks until all tasks of the region are taken, starting with the thread's own range.
fn run_tasks(shared: &Shared, thread: usize) {
    let count = shared.task_count.load(Ordering::Relaxed);
    let task = shared.task.load(Ordering::Relaxed).cast_const();
    let threads = shared.ranges.len();
    for other in (thread..threads).chain(0..thread) {
        let (next, end) = (&shared.ranges[other].0, shared.range(other, count).end);
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            if index >= end {
                break;
            }
            // SAFETY: `run` stored a pointer into its own frame before it opened the region, and returns
            // only when `busy` is zero, which this thread decrements after this call.
            let task = unsafe { *task };
            task(index);
        }
    }
}

/// Runs the main loop of a worker.
fn work(shared: &Shared, thread: usize) {
    let mut seen = 0;
    loop {
        seen = wait_for_region(shared, seen);
        if shared.stop.load(Ordering::Relaxed) {
            return;
        }
        if catch_unwind(AssertUnwindSafe(|| run_tasks(shared, thread))).is_err() {
            shared.panicked.store(true, Ordering::Relaxed);
        }
        shared.busy.fetch_sub(1, Ordering::Release);
    }
}

/// Spins, then sleeps, until the number of the region differs from `seen`; returns the number.
fn wait_for_region(shared: &Shared, seen: u64) -> u64 {
    for _ in 0..SPINS {
        let region = shared.region.load(Ordering::Acquire);
        if region != seen {
            return region;
        }
        spin_loop();
    }
    let mut sleepers = shared.sleepers.lock().unwrap_or_else(PoisonError::into_inner);
    *sleepers += 1;
    let region = loop {
        let region = shared.region.load(Ordering::Acquire);
        if region != seen {
            break region;
        }
        sleepers = shared.wake.wait(sleepers).unwrap_or_else(PoisonError::into_inner);
    };
    *sleepers -= 1;
    region
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_task_runs_once_in_every_region() {
        for threads in [1, 2, 5] {
            let mut pool = Pool::new(None, threads);
            for region in 0..200 {
                let counts: Vec<AtomicUsize> = (0..region).map(|_| AtomicUsize::new(0)).collect();
                pool.run(region, &|i| {
                    counts[i].fetch_add(1, Ordering::Relaxed);
                });
                assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 1));
            }
        }
    }

    #[test]
    fn panic_of_a_task_reaches_the_caller_and_the_pool_stays_usable() {
        let mut pool = Pool::new(None, 3);
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            pool.run(64, &|i| assert!(i != 40, "task forty fails"));
        }));
        assert!(outcome.is_err());
        let sum = AtomicUsize::new(0);
        pool.run(10, &|i| {
            sum.fetch_add(i, Ordering::Relaxed);
        });
        assert_eq!(sum.into_inner(), 45);
    }
}
