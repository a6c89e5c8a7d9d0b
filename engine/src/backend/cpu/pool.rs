//! Threads that stay awake between the operators of a step.
//!
//! A step has hundreds of short parallel regions; waking a sleeping thread costs more than many of
//! them. Workers therefore spin for a short while after a region and sleep only when no further one
//! comes. Each thread has a stretch of a region's tasks, whose weights lie one after another, and
//! then takes what is left of the others': a thread that is held up takes fewer. Which thread runs a
//! task never changes its result.

use std::{
    ops::Range,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    sync::{
        Arc, Condvar, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering},
    },
    thread::JoinHandle,
};

/// Spins before a worker sleeps, and before a waiting caller starts to yield its core.
const SPINS: u32 = 4_000;

type Task<'a> = &'a (dyn Fn(usize) + Sync);

/// The next task of a stretch to hand out, on a cache line of its own.
#[derive(Default)]
#[repr(align(128))]
struct Next(AtomicUsize);

#[derive(Default)]
struct Shared {
    /// Grows by one for every region; workers wait for it to change.
    region: AtomicU64,
    /// The running region's task: a `*const Task` of the caller's stack frame.
    task: AtomicPtr<Task<'static>>,
    task_count: AtomicUsize,
    /// One stretch for each thread, the caller's first.
    stretches: Vec<Next>,
    /// Workers that have not yet finished the region.
    busy: AtomicUsize,
    /// A task of the region panicked in a worker.
    panicked: AtomicBool,
    stop: AtomicBool,
    sleepers: Mutex<usize>,
    wake: Condvar,
}

/// A fixed set of threads, the caller's being one of them.
pub struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
}

impl Pool {
    /// Starts `threads - 1` workers; `threads` is at least 1.
    pub fn new(threads: usize) -> Self {
        let stretches = (0..threads.max(1)).map(|_| Next::default()).collect();
        let shared = Arc::new(Shared { stretches, ..Shared::default() });
        let workers = (1..threads.max(1))
            .map(|i| {
                let shared = Arc::clone(&shared);
                std::thread::Builder::new()
                    .name(format!("step-{i}"))
                    .spawn(move || work(&shared, i))
                    .expect("the system refused a thread at start-up")
            })
            .collect();
        Self { shared, workers }
    }

    /// Threads that run tasks, the caller's with them.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Runs `task(0)` … `task(count - 1)`, each once, on any thread, and returns when all are done.
    ///
    /// `&mut self`: regions never overlap.
    pub fn run(&mut self, count: usize, task: &(dyn Fn(usize) + Sync)) {
        if self.workers.is_empty() || count <= 1 {
            (0..count).for_each(task);
            return;
        }
        let shared = &*self.shared;
        let task: *const Task<'_> = &task;
        shared.task.store(task.cast_mut().cast(), Ordering::Relaxed);
        shared.task_count.store(count, Ordering::Relaxed);
        for (thread, next) in shared.stretches.iter().enumerate() {
            next.0.store(shared.stretch(thread, count).start, Ordering::Relaxed);
        }
        shared.busy.store(self.workers.len(), Ordering::Relaxed);
        {
            // The lock orders this against a worker that is about to sleep.
            let sleepers = shared.sleepers.lock().unwrap_or_else(PoisonError::into_inner);
            shared.region.fetch_add(1, Ordering::Release);
            if *sleepers > 0 {
                shared.wake.notify_all();
            }
        }
        let mine = catch_unwind(AssertUnwindSafe(|| run_tasks(shared, 0)));
        // `task` lives in this frame: no way out before every worker is done with it.
        let mut spins = 0;
        while shared.busy.load(Ordering::Acquire) > 0 {
            spins += 1;
            if spins < SPINS { std::hint::spin_loop() } else { std::thread::yield_now() }
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
            // A worker only ends by `stop`: its tasks' panics were caught and reported by `run`.
            let _ = worker.join();
        }
    }
}

impl Shared {
    /// The tasks that a thread takes first, of `count`.
    fn stretch(&self, thread: usize, count: usize) -> Range<usize> {
        let threads = self.stretches.len();
        thread * count / threads..(thread + 1) * count / threads
    }
}

fn run_tasks(shared: &Shared, thread: usize) {
    let count = shared.task_count.load(Ordering::Relaxed);
    let task = shared.task.load(Ordering::Relaxed).cast_const();
    let threads = shared.stretches.len();
    for other in (thread..threads).chain(0..thread) {
        let (next, end) = (&shared.stretches[other].0, shared.stretch(other, count).end);
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            if index >= end {
                break;
            }
            // SAFETY: `run` stored a pointer into its own frame before it opened the region and does
            // not return before `busy` is zero, which this thread brings about after this call.
            let task = unsafe { *task };
            task(index);
        }
    }
}

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

/// Spins, then sleeps, until the region counter differs from `seen`; returns it.
fn wait_for_region(shared: &Shared, seen: u64) -> u64 {
    for _ in 0..SPINS {
        let region = shared.region.load(Ordering::Acquire);
        if region != seen {
            return region;
        }
        std::hint::spin_loop();
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
            let mut pool = Pool::new(threads);
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
    fn a_panic_reaches_the_caller_and_the_pool_goes_on() {
        let mut pool = Pool::new(3);
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
