//! [`KeyUses`]: records when keys are used, at most once an hour for each key, and not while a request waits.

use std::{
    collections::HashMap,
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use uuid::Uuid;

use crate::App;

/// Time between two records of one key's use.
const EVERY: Duration = Duration::from_secs(3600);
/// Most keys in memory.
const KEYS_MAX: usize = 16_384;

/// When this process recorded the use of a key last.
#[derive(Default)]
pub(crate) struct KeyUses(Mutex<HashMap<Uuid, Instant>>);

impl KeyUses {
    /// Records that a key is used, unless this was recorded within the last hour.
    pub fn note(&self, app: &App, key: Uuid) {
        if !self.is_due(key, Instant::now()) {
            return;
        }
        let app = app.clone();
        tokio::spawn(async move {
            if let Err(error) = app.store.note_key_use(key).await {
                tracing::debug!(%error, %key, "the use of a key is not recorded");
            }
        });
    }

    fn is_due(&self, key: Uuid, now: Instant) -> bool {
        let mut recorded = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if recorded.get(&key).is_some_and(|at| now < *at + EVERY) {
            return false;
        }
        if recorded.len() >= KEYS_MAX {
            recorded.retain(|_, at| now < *at + EVERY);
        }
        // With more keys within an hour, the use of the others is recorded when there is room.
        let has_room = recorded.len() < KEYS_MAX;
        if has_room {
            recorded.insert(key, now);
        }
        has_room
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn use_of_a_key_is_recorded_once_an_hour() {
        let (uses, now) = (KeyUses::default(), Instant::now());
        let (one, two) = (Uuid::from_u128(1), Uuid::from_u128(2));
        assert!(uses.is_due(one, now) && uses.is_due(two, now));
        assert!(!uses.is_due(one, now + EVERY / 2));
        assert!(uses.is_due(one, now + EVERY));
        for key in 3..=KEYS_MAX as u128 {
            assert!(uses.is_due(Uuid::from_u128(key), now + EVERY));
        }
        assert!(uses.is_due(Uuid::max(), now + EVERY), "the second key made room");
        assert!(!uses.is_due(Uuid::from_u128(2), now + EVERY), "all room is taken");
    }
}
