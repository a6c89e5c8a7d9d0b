//! [`RequestMemory`]: a budget for the request bodies that are in memory, over all connections.
//!
//! A body takes its bytes from the budget as they arrive, and gives them back when its response begins. If the budget
//! is used up, a body waits for [`WAIT`] and then fails, and its client is told to try again.
//!
//! The body of an admitted request takes what it declares with its first part: if bodies took memory part by part, each of
//! many would have some of it and none enough. Strangers have what they have sent.

use std::{
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll, ready},
    time::Duration,
};

use parking_lot::Mutex;
use prometheus_client::metrics::gauge::Gauge;
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::timeout,
};

/// How long a body waits for others to give back memory.
const WAIT: Duration = Duration::from_secs(1);
/// Most bytes of an upload that are in memory at once: its reader stores them as they arrive.
const UPLOAD_BYTES_MAX: usize = 3 << 20;
/// Most bytes that a body takes before they arrive.
const DECLARED_BYTES_MAX: u64 = 4 << 20;

/// The budget of a server.
pub(crate) struct RequestMemory {
    free_bytes: Arc<Semaphore>,
    used_bytes: Gauge,
}

impl RequestMemory {
    pub fn new(bytes: usize, used_bytes: Gauge) -> Self {
        let free_bytes = Arc::new(Semaphore::new(bytes.min(Semaphore::MAX_PERMITS)));
        Self { free_bytes, used_bytes }
    }

    /// What a new request holds: nothing.
    pub fn hold(&self) -> Held {
        let Self { free_bytes, used_bytes } = self;
        let (free_bytes, used_bytes) = (Arc::clone(free_bytes), used_bytes.clone());
        Held { free_bytes, used_bytes, received: AtomicUsize::new(0), permit: Mutex::default() }
    }
}

/// What one request holds of the budget.
pub(crate) struct Held {
    free_bytes: Arc<Semaphore>,
    used_bytes: Gauge,
    /// Bytes of the body that have arrived.
    received: AtomicUsize,
    permit: Mutex<Option<OwnedSemaphorePermit>>,
}

/// What is known of a body when a part of it arrives.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BodyPart {
    /// Bytes of the part.
    pub bytes: usize,
    /// Bytes of the whole body, if its head says so.
    pub declared: Option<u64>,
    pub is_upload: bool,
    pub is_admitted: bool,
}

impl Held {
    /// Begins to take memory for the next part of a body; `None` if there is nothing to wait for.
    pub fn take(&self, part: BodyPart) -> Option<Taking> {
        let received = self.received.fetch_add(part.bytes, Ordering::Relaxed) + part.bytes;
        let declared = part.declared.filter(|_| part.is_admitted).unwrap_or_default();
        // Fits, since it has a bound.
        let wanted = received.max(declared.min(DECLARED_BYTES_MAX) as usize);
        let wanted = if part.is_upload { wanted.min(UPLOAD_BYTES_MAX) } else { wanted };
        let held = self.permit.lock().as_ref().map_or(0, OwnedSemaphorePermit::num_permits);
        // A part is at most as large as the read buffer of its connection.
        let bytes = u32::try_from(wanted.saturating_sub(held)).unwrap_or(u32::MAX);
        if let Ok(permit) = Arc::clone(&self.free_bytes).try_acquire_many_owned(bytes) {
            self.keep(permit);
            return None;
        }
        let free = Arc::clone(&self.free_bytes);
        let taking = async move { timeout(WAIT, free.acquire_many_owned(bytes)).await.ok()?.ok() };
        Some(Taking(Box::pin(taking)))
    }

    fn keep(&self, more: OwnedSemaphorePermit) {
        self.used_bytes.inc_by(more.num_permits() as i64);
        let mut permit = self.permit.lock();
        match &mut *permit {
            Some(permit) => permit.merge(more),
            None => *permit = Some(more),
        }
    }

    /// Gives everything back.
    pub fn release(&self) {
        if let Some(permit) = self.permit.lock().take() {
            self.used_bytes.dec_by(permit.num_permits() as i64);
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.release();
    }
}

/// A wait for memory.
pub(crate) struct Taking(Pin<Box<dyn Future<Output = Option<OwnedSemaphorePermit>> + Send>>);

impl Taking {
    /// Ready when the memory is there and `held` has it, or with `false` if it was not given back in time.
    pub fn poll(&mut self, held: &Held, context: &mut Context<'_>) -> Poll<bool> {
        let permit = ready!(self.0.as_mut().poll(context));
        let is_there = permit.is_some();
        if let Some(permit) = permit {
            held.keep(permit);
        }
        Poll::Ready(is_there)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(bytes: usize) -> BodyPart {
        BodyPart { bytes, declared: None, is_upload: false, is_admitted: true }
    }

    #[test]
    fn upload_takes_what_it_can_have_in_memory() {
        let memory = RequestMemory::new(UPLOAD_BYTES_MAX + 10, Gauge::default());
        let (upload, form) = (memory.hold(), memory.hold());
        for _ in 0..9 {
            assert!(upload.take(BodyPart { is_upload: true, ..part(1 << 20) }).is_none());
        }
        assert_eq!(memory.used_bytes.get(), UPLOAD_BYTES_MAX as i64);
        assert!(form.take(part(10)).is_none());
        assert!(form.take(part(1)).is_some(), "it has to wait");
        drop(upload);
        assert!(form.take(part(1 << 20)).is_none());
        form.release();
        assert_eq!(memory.used_bytes.get(), 0);
    }

    #[test]
    fn admitted_body_takes_what_it_declares_at_once() {
        let memory = RequestMemory::new(10 << 20, Gauge::default());
        let declared =
            |bytes, is_admitted| BodyPart { declared: Some(bytes), is_admitted, ..part(9) };
        let [one, two, three] = [(); 3].map(|()| memory.hold());
        assert!(one.take(declared(1_000_000, true)).is_none());
        assert!(one.take(declared(1_000_000, true)).is_none());
        assert_eq!(memory.used_bytes.get(), 1_000_000, "the next part is among them");
        assert!(two.take(declared(u64::MAX, true)).is_none());
        assert_eq!(memory.used_bytes.get(), 1_000_000 + DECLARED_BYTES_MAX as i64);
        assert!(three.take(declared(1_000_000, false)).is_none());
        assert_eq!(memory.used_bytes.get(), 1_000_009 + DECLARED_BYTES_MAX as i64);
    }
}
