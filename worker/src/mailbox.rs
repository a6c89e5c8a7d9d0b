//! A buffer between two tasks that merges updates until they are taken; a channel would grow or
//! block.

use parking_lot::Mutex;
use tokio::sync::Notify;

/// Content that a writer updates without waiting and one reader takes as a whole.
#[derive(Debug, Default)]
pub(crate) struct Mailbox<T> {
    content: Mutex<T>,
    changed: Notify,
}

impl<T: Default> Mailbox<T> {
    /// Updates the content and wakes the reader.
    pub fn update(&self, change: impl FnOnce(&mut T)) {
        change(&mut self.content.lock());
        self.changed.notify_one();
    }

    /// Waits for an update since the last call.
    pub async fn changed(&self) {
        self.changed.notified().await;
    }

    /// Takes the content.
    pub fn take(&self) -> T {
        std::mem::take(&mut *self.content.lock())
    }
}
