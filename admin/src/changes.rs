//! [`Changes`]: the latest changes in the service, as events for operators.
//!
//! A ring keeps the latest changes. A subscriber reads on from the last change it knows; one that returns
//! soon enough misses none. Changes are named by the store's clock, so a subscriber may continue at
//! another admin process. They are hints to read again, not a record.

use std::{
    collections::VecDeque,
    fmt,
    str::FromStr,
    sync::{Arc, Mutex, PoisonError},
};

use serde_json::Value;
use tokio::sync::watch;

/// Changes that are kept.
const KEPT: usize = 4096;

/// Identifier of a change: when it was seen, and its number among those seen at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub(crate) struct ChangeId {
    ms: i64,
    number: u32,
}

impl fmt::Display for ChangeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.ms, self.number)
    }
}

impl FromStr for ChangeId {
    type Err = std::num::ParseIntError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (ms, number) = text.split_once('-').unwrap_or((text, "0"));
        Ok(Self { ms: ms.parse()?, number: number.parse()? })
    }
}

/// A change.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Change {
    pub id: ChangeId,
    /// `queue`, `worker`, `batch` or `job`.
    pub kind: &'static str,
    /// The item as the API lists it.
    pub data: Value,
}

/// The latest changes.
pub(crate) struct Changes {
    ring: Mutex<VecDeque<Arc<Change>>>,
    /// The latest change.
    last: watch::Sender<ChangeId>,
}

impl Default for Changes {
    fn default() -> Self {
        Self { ring: Mutex::default(), last: watch::Sender::new(ChangeId::default()) }
    }
}

impl Changes {
    /// Receives the identifier of every new change.
    pub fn subscribe(&self) -> watch::Receiver<ChangeId> {
        self.last.subscribe()
    }

    /// Changes after `id`, and whether earlier ones may have been dropped.
    pub fn after(&self, id: ChangeId) -> (Vec<Arc<Change>>, bool) {
        let ring = self.ring.lock().unwrap_or_else(PoisonError::into_inner);
        let missed = ring.front().is_none_or(|first| first.id > id) && id < *self.last.borrow();
        (ring.iter().filter(|change| change.id > id).cloned().collect(), missed)
    }

    /// Adds changes that were seen at the same time.
    pub fn add(&self, ms: i64, changed: Vec<(&'static str, Value)>) {
        let mut ring = self.ring.lock().unwrap_or_else(PoisonError::into_inner);
        for ((kind, data), number) in changed.into_iter().zip(1..) {
            ring.push_back(Arc::new(Change { id: ChangeId { ms, number }, kind, data }));
        }
        let excess = ring.len().saturating_sub(KEPT);
        ring.drain(..excess);
        if let Some(last) = ring.back() {
            self.last.send_replace(last.id);
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn subscriber_continues_where_it_was_and_learns_of_dropped_changes() {
        let changes = Changes::default();
        let start = ChangeId::default();
        assert_eq!(changes.after(start), (Vec::new(), false));
        changes.add(1000, vec![("queue", json!(1)), ("job", json!(2))]);
        let latest = *changes.subscribe().borrow();
        assert_eq!(latest.to_string().parse::<ChangeId>().expect("its own text"), latest);
        let first: ChangeId = "1000-1".parse().expect("an id");
        let (rest, missed) = changes.after(first);
        assert_eq!((rest.len(), rest[0].kind, missed), (1, "job", false));
        for ms in 0..KEPT as i64 {
            changes.add(2000 + ms, vec![("queue", json!(ms))]);
        }
        let (rest, missed) = changes.after(first);
        assert_eq!((rest.len(), missed), (KEPT, true));
        assert_eq!(changes.after(*changes.subscribe().borrow()), (Vec::new(), false));
        assert!("soon".parse::<ChangeId>().is_err());
    }
}
