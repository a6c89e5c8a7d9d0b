//! [`Kept`]: what a step of a batch leaves open in this process, for the next step if that is of this process, too.
//!
//! Nothing depends on it: a step that finds nothing opens it anew, and goes on from what is saved. What is not taken for a while, because
//! another process has the batch or it has ended, is dropped.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::store::BatchId;

/// Time after which it is dropped.
const IDLE_MAX: Duration = Duration::from_secs(60);

/// What steps leave open, by batch.
pub(crate) struct Kept<T> {
    open: Mutex<HashMap<BatchId, (T, Instant)>>,
    slots: Arc<Semaphore>,
}

impl<T> Kept<T> {
    /// Nothing, with slots for this many.
    pub fn new(slots: usize) -> Self {
        Self { open: Mutex::default(), slots: Arc::new(Semaphore::new(slots)) }
    }

    /// Returns a slot for one more, to be held until what is opened has ended; `None` if all are taken.
    pub fn slot(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.slots).try_acquire_owned().ok()
    }

    /// Takes what the last step of a batch left.
    pub fn take(&self, id: BatchId) -> Option<T> {
        self.with(|open| open.remove(&id)).map(|(kept, _)| kept)
    }

    /// Keeps something for the next step of a batch.
    pub fn put(&self, id: BatchId, kept: T) {
        self.with(|open| open.insert(id, (kept, Instant::now())));
    }

    /// Drops what was not taken for a while.
    pub fn drop_idle(&self) {
        self.drop_older(IDLE_MAX);
    }

    fn drop_older(&self, than: Duration) {
        self.with(|open| open.retain(|_, (_, since)| since.elapsed() < than));
    }

    /// Drops everything.
    pub fn clear(&self) {
        self.with(HashMap::clear);
    }

    fn with<R>(&self, change: impl FnOnce(&mut HashMap<BatchId, (T, Instant)>) -> R) -> R {
        change(&mut self.open.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_open_is_taken_once_and_dropped_after_a_while() {
        let kept = Kept::new(1);
        let (first, second) = (BatchId::generate(), BatchId::generate());
        let slot = kept.slot().expect("room");
        assert!(kept.slot().is_none());
        kept.put(first, slot);
        kept.drop_idle();
        assert!(kept.take(second).is_none());
        let slot = kept.take(first).expect("it was left");
        assert!(kept.take(first).is_none());
        kept.put(first, slot);
        kept.drop_older(Duration::ZERO);
        assert!(kept.take(first).is_none() && kept.slot().is_some());
    }
}
