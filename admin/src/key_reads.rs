//! Reads of API keys that concurrent requests share.
//!
//! Requests with the same key wait for one read of the store instead of one each. A request never shares a read that has
//! begun before it: it would not see that the key has been revoked meanwhile. After a read that several requests shared,
//! the next one with that key begins [`READ_AGAIN_AFTER`] later, so that a flood of requests is not a flood of reads.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
    time::Duration,
};

use tokio::time::{Instant, sleep_until};

use crate::{
    ApiError,
    store::{ApiKey, KeyHash},
};

/// Slots for keys by their hash; the reads of one slot follow one another. A power of two.
const SLOTS: usize = 64;
/// Time from the beginning of a shared read to that of the next with the same key. A caller that waits for each answer
/// before its next request shares none.
const READ_AGAIN_AFTER: Duration = Duration::from_millis(5);

type Answer = Result<Option<ApiKey>, ApiError>;
/// The answer of a read that has not begun, when it is there.
type NextRead = Arc<OnceLock<Answer>>;

/// Reads that have not begun, by key.
pub(crate) struct KeyReads([Slot; SLOTS]);

impl Default for KeyReads {
    fn default() -> Self {
        Self(std::array::from_fn(|_| Slot::default()))
    }
}

#[derive(Default)]
struct Slot {
    /// Held during a read: the key of the last one, and when it began, if it was shared.
    reading: tokio::sync::Mutex<Option<(KeyHash, Instant)>>,
    next: Mutex<HashMap<KeyHash, NextRead>>,
}

impl Slot {
    fn next(&self) -> MutexGuard<'_, HashMap<KeyHash, NextRead>> {
        self.next.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A request's part in a read.
struct Joined<'a> {
    slot: &'a Slot,
    hash: &'a KeyHash,
    read: NextRead,
}

impl Joined<'_> {
    /// Lets requests that come from now on start another read.
    fn close(&self) {
        let mut next = self.slot.next();
        if next.get(self.hash).is_some_and(|next| Arc::ptr_eq(next, &self.read)) {
            next.remove(self.hash);
        }
    }
}

impl Drop for Joined<'_> {
    fn drop(&mut self) {
        // The map and this request hold it: no other request waits for it.
        if Arc::strong_count(&self.read) <= 2 {
            self.close();
        }
    }
}

impl KeyReads {
    /// Returns the key with this hash as `read` finds it, in this call or in that of another request.
    ///
    /// # Errors
    /// As `read`.
    pub async fn key(&self, hash: &KeyHash, read: impl AsyncFnOnce() -> Answer) -> Answer {
        let slot = &self.0[usize::from(hash[0]) % SLOTS];
        let next = Arc::clone(slot.next().entry(*hash).or_default());
        let joined = Joined { slot, hash, read: next };
        let mut last = slot.reading.lock().await;
        if let Some(answer) = joined.read.get() {
            return answer.clone();
        }
        if let Some((key, begun)) = *last
            && key == *hash
        {
            sleep_until(begun + READ_AGAIN_AFTER).await;
        }
        joined.close();
        // Of this request, and of others that wait for the lock.
        let is_shared = Arc::strong_count(&joined.read) > 1;
        *last = is_shared.then(|| (*hash, Instant::now()));
        let answer = read().await;
        // Only the holder of the lock sets it.
        let _ = joined.read.set(answer.clone());
        answer
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use futures_util::{FutureExt as _, future::join_all};
    use tokio::sync::Notify;

    use super::*;

    const HASH: KeyHash = [7; 32];

    #[tokio::test]
    async fn requests_share_a_read_that_begins_after_them() {
        let (reads, begun, go_on) = (KeyReads::default(), AtomicUsize::new(0), Notify::new());
        let read = async || {
            begun.fetch_add(1, Ordering::Relaxed);
            go_on.notified().await;
            Ok(None)
        };
        let first = reads.key(&HASH, read);
        let later = async {
            while begun.load(Ordering::Relaxed) == 0 {
                tokio::task::yield_now().await;
            }
            let others = join_all((0..5).map(|_| reads.key(&HASH, read)));
            let release = async {
                go_on.notify_one();
                while begun.load(Ordering::Relaxed) < 2 {
                    tokio::task::yield_now().await;
                }
                go_on.notify_one();
            };
            tokio::join!(others, release).0
        };
        let (first, later) = tokio::join!(first, later);
        assert!(first.is_ok() && later.iter().all(Result::is_ok));
        assert_eq!(begun.into_inner(), 2, "the read in progress is not shared");
        assert!(reads.0.iter().all(|slot| slot.next().is_empty()));
    }

    #[tokio::test]
    async fn next_read_after_a_shared_one_begins_later() {
        let reads = KeyReads::default();
        let ask = || reads.key(&HASH, async || Ok(None));
        for _ in 0..3 {
            assert!(ask().now_or_never().is_some(), "requests one after another do not wait");
        }
        let held = reads.0[7].reading.lock().await;
        let mut both = Box::pin(async { tokio::join!(ask(), ask()) });
        assert!((&mut both).now_or_never().is_none());
        let begun = Instant::now();
        drop(held);
        let (first, second) = both.await;
        assert!(first.is_ok() && second.is_ok() && ask().await.is_ok());
        assert!(begun.elapsed() >= READ_AGAIN_AFTER);
    }

    #[tokio::test]
    async fn dropped_request_leaves_its_read_to_the_others() {
        let reads = KeyReads::default();
        let stuck = reads.key(&HASH, async || std::future::pending().await);
        let mut stuck = Box::pin(stuck);
        assert!((&mut stuck).now_or_never().is_none());
        let mut waiting = Box::pin(reads.key(&HASH, async || Ok(None)));
        let mut gone = Box::pin(reads.key(&[8; 32], async || Ok(None)));
        assert!((&mut waiting).now_or_never().is_none());
        assert!((&mut gone).now_or_never().is_some(), "another slot");
        drop(stuck);
        assert_eq!(waiting.await.ok(), Some(None));
        let held = reads.0[7].reading.lock().await;
        let mut left = Box::pin(reads.key(&HASH, async || Ok(None)));
        assert!((&mut left).now_or_never().is_none());
        drop((left, held));
        assert!(reads.0.iter().all(|slot| slot.next().is_empty()), "nothing is kept");
    }
}
