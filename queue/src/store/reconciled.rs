//! What reconciliation changed, and jobs that the dispatcher may lack.

use crate::{
    dispatch::Entry,
    job::{JobId, Timestamp},
};

/// Maximum number of entries in [`Reconciled::queued`].
pub const RECONCILED_MAX: usize = 8192;

/// What [`Store::reconcile`] changed.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Reconciled {
    /// Jobs that changed their state.
    pub moved: u64,
    /// Jobs among them with an expired lease.
    pub lapsed: u64,
    /// Jobs that are queued now, of any queue, at most [`RECONCILED_MAX`]. They may be missing from
    /// the dispatcher; [`Store::queued`] returns the rest.
    pub queued: Vec<Entry>,
}

impl Reconciled {
    /// Adds what another statement changed.
    pub(super) fn extend(&mut self, moved: u64, queued: impl IntoIterator<Item = Entry>) {
        self.moved += moved;
        let room = RECONCILED_MAX.saturating_sub(self.queued.len());
        self.queued.extend(queued.into_iter().take(room));
    }
}

/// Jobs that were queued and may be missing from the dispatcher.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Unannounced {
    /// Those that are still queued.
    pub entries: Vec<Entry>,
    /// Whether there may be more.
    pub more: bool,
    /// The store's notes that these jobs are from.
    pub(super) rows: Vec<(JobId, bool, Timestamp)>,
}

impl Unannounced {
    /// Returns whether the store has no notes.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }
}
