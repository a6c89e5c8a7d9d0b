//! Counters of rare events.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

/// Counts since the dispatcher was created.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DispatchStats {
    /// Consumer groups that had to be created again, and times that the data of a queue was gone: Redis
    /// lost data, which reconcilers restore from the store.
    pub group_recreations: u64,
    /// Acknowledgements refused because the entry no longer belonged to the consumer.
    pub fenced_acknowledgements: u64,
    /// Entries of other programs that were dropped.
    pub foreign_entries: u64,
    /// Entries taken over from consumers that did not renew them.
    pub reclaimed: u64,
    /// Pending entries that another program had deleted from the stream.
    pub deleted_entries: u64,
    /// Entries recovered after the answer of a pull was lost.
    pub recovered: u64,
    /// Consumers without entries that were removed.
    pub consumers_removed: u64,
    /// Events of jobs dropped because the event streams were full; subscribers get the result from the
    /// store.
    pub events_dropped: u64,
}

/// The live counters. Relaxed ordering: no other data depends on them.
#[derive(Debug, Default)]
pub(super) struct Counters {
    pub group_recreations: AtomicU64,
    pub fenced_acknowledgements: AtomicU64,
    pub foreign_entries: AtomicU64,
    pub reclaimed: AtomicU64,
    pub deleted_entries: AtomicU64,
    pub recovered: AtomicU64,
    pub consumers_removed: AtomicU64,
    /// Shared with the publishers of events.
    pub events_dropped: Arc<AtomicU64>,
}

pub(crate) fn add(counter: &AtomicU64, count: u64) {
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
            events_dropped: read(&self.events_dropped),
        }
    }

    /// Counts and logs foreign entries, without their content.
    pub(super) fn foreign(&self, queue: &str, count: u64) {
        if count > 0 {
            add(&self.foreign_entries, count);
            tracing::warn!(queue, count, "dropped stream entries that are not jobs");
        }
    }
}
