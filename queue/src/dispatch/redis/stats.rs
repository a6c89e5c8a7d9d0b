//! What happened that should not happen often.

use std::sync::atomic::{AtomicU64, Ordering};

/// Counts since the dispatcher was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DispatchStats {
    /// Consumer groups that were gone and were made again, and times that a queue was found empty
    /// where it was not: Redis lost data, and the store should feed it.
    pub group_recreations: u64,
    /// Acknowledgements refused because the entry was no longer the consumer's.
    pub fenced_acknowledgements: u64,
    /// Entries that were none of ours and were dropped.
    pub foreign_entries: u64,
    /// Entries taken over from consumers that left them alone.
    pub reclaimed: u64,
    /// Pending entries whose data somebody had deleted.
    pub deleted_entries: u64,
    /// Entries of a pull whose answer was lost, found again.
    pub recovered: u64,
    /// Consumers without entries that were removed.
    pub consumers_removed: u64,
}

/// The same, while they are counted. Relaxed: nothing is ordered by them.
#[derive(Debug, Default)]
pub(super) struct Counters {
    pub group_recreations: AtomicU64,
    pub fenced_acknowledgements: AtomicU64,
    pub foreign_entries: AtomicU64,
    pub reclaimed: AtomicU64,
    pub deleted_entries: AtomicU64,
    pub recovered: AtomicU64,
    pub consumers_removed: AtomicU64,
}

pub(super) fn add(counter: &AtomicU64, count: u64) {
    counter.fetch_add(count, Ordering::Relaxed);
}

impl Counters {
    pub(super) fn read(&self) -> DispatchStats {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        DispatchStats {
            group_recreations: read(&self.group_recreations),
            fenced_acknowledgements: read(&self.fenced_acknowledgements),
            foreign_entries: read(&self.foreign_entries),
            reclaimed: read(&self.reclaimed),
            deleted_entries: read(&self.deleted_entries),
            recovered: read(&self.recovered),
            consumers_removed: read(&self.consumers_removed),
        }
    }

    /// Foreign entries are said where they are found, without what was in them.
    pub(super) fn foreign(&self, queue: &str, count: u64) {
        if count > 0 {
            add(&self.foreign_entries, count);
            tracing::warn!(queue, count, "dropped stream entries that are no jobs");
        }
    }
}
