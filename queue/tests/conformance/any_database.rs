//! Databases for the ids of tests.

use std::{
    sync::atomic::{AtomicUsize, Ordering},
    thread::sleep,
    time::Duration,
};

use tritmill_queue::DatabaseIndex;

/// Returns each of two databases in turn: a store in one database takes all ids. Waits for a millisecond, so
/// that ids of both are in the order of their generation.
pub fn any_database() -> DatabaseIndex {
    static TURN: AtomicUsize = AtomicUsize::new(0);
    sleep(Duration::from_millis(1));
    DatabaseIndex::new(TURN.fetch_add(1, Ordering::Relaxed) % 2).unwrap()
}
