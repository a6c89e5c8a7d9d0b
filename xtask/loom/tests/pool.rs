//! The pool under every interleaving that loom finds within the preemption bound.

#[expect(dead_code, reason = "each test program uses its part of it")]
mod cells;

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use cells::{Cells, explore};
use loom::sync::atomic::{AtomicUsize, Ordering};
use tritmill_loom::Pool;

/// Runs a region of `count` tasks. Each reads and writes a cell that the caller wrote before the region
/// and reads after it.
fn check_region(pool: &mut Pool, count: usize) {
    let cells = Cells::new(count);
    pool.run(count, &|task| cells.add(task, 100));
    let expected: Vec<usize> = (100..100 + count).collect();
    assert_eq!(cells.values(), expected, "each task ran once");
}

#[test]
fn region_runs_each_task_once_and_publishes_its_writes() {
    explore(3, || check_region(&mut Pool::new(None, 2), 3));
}

#[test]
fn region_of_three_threads_runs_each_task_once() {
    explore(2, || check_region(&mut Pool::new(None, 3), 3));
}

#[test]
fn tasks_of_one_region_never_run_in_the_next() {
    explore(3, || {
        let mut pool = Pool::new(None, 2);
        for count in [3, 2] {
            check_region(&mut pool, count);
        }
    });
}

/// A worker that has slept, or is about to sleep, runs the tasks of a region that starts meanwhile: a
/// lost wake-up would leave the caller waiting forever, which loom reports.
#[test]
fn sleeping_workers_wake_for_a_region() {
    explore(3, || {
        let mut pool = Pool::new(None, 2);
        // Lets the worker go to sleep first in some of the executions.
        loom::thread::yield_now();
        check_region(&mut pool, 2);
    });
}

#[test]
fn workers_end_when_the_pool_is_dropped() {
    explore(3, || drop(Pool::new(None, 3)));
    explore(3, || {
        let mut pool = Pool::new(None, 2);
        check_region(&mut pool, 2);
        drop(pool);
    });
}

#[test]
fn panic_of_a_task_on_any_thread_reaches_the_caller_and_the_pool_stays_usable() {
    explore(2, || {
        let mut pool = Pool::new(None, 2);
        let ran = AtomicUsize::new(0);
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            pool.run(2, &|task| {
                ran.fetch_add(1, Ordering::Relaxed);
                if task == 1 {
                    // Without the panic hook: its output would fill the log.
                    resume_unwind(Box::new("task 1 fails"));
                }
            });
        }));
        assert!(outcome.is_err());
        assert_eq!(ran.load(Ordering::Relaxed), 2);
        check_region(&mut pool, 2);
    });
}
