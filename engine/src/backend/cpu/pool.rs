//! A thread pool with workers that stay awake between the parallel regions of a step.
//!
//! A step has hundreds of short regions, and waking a sleeping thread takes longer than many of these
//! regions. Workers therefore spin for a short while after a region, and sleep only if no other one
//! follows. Each thread has a range of the region's tasks, with weights that are adjacent in memory. It
//! first runs the tasks of its own range and then the remaining tasks of other ranges, so that a delayed
//! thread runs fewer tasks. A task's result does not depend on the thread that runs it.
//!
//! A worker enters a region as long as it is open. The caller closes it once no tasks are left, and then waits only for
//! workers that have entered: one that the system has taken off its core does not delay a region whose tasks others
//! have run.
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
    /// The newest region: see [`Region`]. Workers wait for its number to change.
    region: AtomicU64,
    /// The running region's task: a `*const Task` into the caller's stack frame.
    task: AtomicPtr<Task<'static>>,
    task_count: AtomicUsize,
    /// One range of tasks for each thread, the caller's first.
    ranges: Vec<NextTask>,
    /// Whether a task of the region panicked in a worker.
    panicked: AtomicBool,
    stop: AtomicBool,
    sleepers: Mutex<usize>,
    wake: Condvar,
}

/// The state of a region in one word: its number in the high half, then whether it is open, then the workers in it.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Region(u64);

impl Region {
    const OPEN: u64 = 1 << 31;
    const WORKERS: u64 = Self::OPEN - 1;

    /// Returns the next region, open and without workers.
    fn next(self) -> Self {
        Self((u64::from(self.number().wrapping_add(1)) << 32) | Self::OPEN)
    }

    fn number(self) -> u32 {
        (self.0 >> 32) as u32
    }

    fn is_open(self) -> bool {
        self.0 & Self::OPEN != 0
    }

    fn workers(self) -> u64 {
        self.0 & Self::WORKERS
    }
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
        {
            // The lock orders this with a worker that is about to sleep, so that no wake-up is lost.
            let sleepers = shared.sleepers.lock().unwrap_or_else(PoisonError::into_inner);
            // Only this thread changes a region without workers that is closed.
            let last = Region(shared.region.load(Ordering::Relaxed));
            shared.region.store(last.next().0, Ordering::Release);
            if *sleepers > 0 {
                shared.wake.notify_all();
            }
        }
        let mine = catch_unwind(AssertUnwindSafe(|| run_tasks(shared, 0)));
        // `task` is in this stack frame: do not return before every worker in the region has finished with it.
        shared.region.fetch_and(!Region::OPEN, Ordering::Relaxed);
        let mut spins = 0;
        while Region(shared.region.load(Ordering::Acquire)).workers() > 0 {
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
            let last = Region(self.shared.region.load(Ordering::Relaxed));
            self.shared.region.store(last.next().0, Ordering::Release);
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
            // only when no worker is in it, which this thread leaves after this call.
            let task = unsafe { *task };
            task(index);
        }
    }
}

/// Runs the main loop of a worker.
fn work(shared: &Shared, thread: usize) {
    let mut seen = Region(0);
    loop {
        seen = wait_for_region(shared, seen);
        if shared.stop.load(Ordering::Relaxed) {
            return;
        }
        if !enter(shared, seen) {
            continue;
        }
        if catch_unwind(AssertUnwindSafe(|| run_tasks(shared, thread))).is_err() {
            shared.panicked.store(true, Ordering::Relaxed);
        }
        shared.region.fetch_sub(1, Ordering::Release);
    }
}

/// Enters a region; false if it is not open any more.
fn enter(shared: &Shared, region: Region) -> bool {
    let mut state = region;
    while state.number() == region.number() && state.is_open() {
        let entered = shared.region.compare_exchange_weak(
            state.0,
            state.0 + 1,
            Ordering::Acquire,
            Ordering::Acquire,
        );
        match entered {
            Ok(_) => return true,
            Err(now) => state = Region(now),
        }
    }
    false
}

/// Spins, then sleeps, until the number of the region differs from that of `seen`; returns the state of the region.
fn wait_for_region(shared: &Shared, seen: Region) -> Region {
    let newer = || {
        let region = Region(shared.region.load(Ordering::Acquire));
        (region.number() != seen.number()).then_some(region)
    };
    for _ in 0..SPINS {
        if let Some(region) = newer() {
            return region;
        }
        spin_loop();
    }
    let mut sleepers = shared.sleepers.lock().unwrap_or_else(PoisonError::into_inner);
    *sleepers += 1;
    let region = loop {
        if let Some(region) = newer() {
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
