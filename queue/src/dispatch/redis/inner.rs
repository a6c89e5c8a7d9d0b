//! [`Inner`]: what the parts of a [`RedisDispatcher`](super::RedisDispatcher) share, and the errors of its scripts.

use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, atomic::AtomicU16},
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use redis::RedisError;

use super::{
    connections::{CannotConnect, Connections},
    keys,
};
use crate::{
    dispatch::{BacklogLimit, Delivery, DispatchError, Limit},
    job::QueueName,
    refusal::{self, Needs, Refusal},
};

/// Time after which to try again if no time is known.
pub(super) const RETRY_AFTER: Duration = Duration::from_secs(1);

/// The state of a dispatcher.
pub(super) struct Inner {
    pub connections: Arc<Connections>,
    /// Shards of each queue.
    pub shards: u16,
    pub limit: BacklogLimit,
    /// Shared with the publishers of events.
    pub stats: Arc<Mutex<DispatchStats>>,
    /// Names of the queues' data, by prefix: a new name shows that Redis was emptied.
    pub data_names: Mutex<HashMap<String, String>>,
    /// Consumers of this process, by name.
    pub consumers: Mutex<HashMap<String, Arc<Consumer>>>,
    /// Time of the last search for dead consumers, by queue.
    pub swept_at: Mutex<HashMap<QueueName, Instant>>,
}

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

/// The state of one consumer of this process.
#[derive(Debug, Default)]
pub(super) struct Consumer {
    /// Allows one poll or reclaim at a time: each would take the other's entries for lost ones.
    pub polling: tokio::sync::Mutex<()>,
    /// Prefixes of the shards that a poll or reclaim was sent to, and its answer has not arrived.
    unsure: Mutex<HashSet<String>>,
    /// Number of polls of all priorities; see `shards.rs`.
    pub polls: AtomicU16,
    /// Receipts of entries that it has not acknowledged, handed back or lost.
    held: Mutex<HashSet<String>>,
}

impl Consumer {
    pub fn hold(&self, deliveries: &[Delivery]) {
        let mut held = self.held.lock();
        held.extend(deliveries.iter().map(|delivery| delivery.receipt.clone()));
    }

    pub fn release<'a>(&self, deliveries: impl IntoIterator<Item = &'a Delivery>) {
        let mut held = self.held.lock();
        for delivery in deliveries {
            held.remove(&delivery.receipt);
        }
    }

    pub fn is_unsure(&self, prefix: &str) -> bool {
        self.unsure.lock().contains(prefix)
    }

    /// Notes whether the consumer may own entries of a shard that it does not know; returns whether it could
    /// before.
    pub fn set_unsure(&self, prefix: &str, is_unsure: bool) -> bool {
        let mut unsure = self.unsure.lock();
        if is_unsure { !unsure.insert(prefix.to_owned()) } else { unsure.remove(prefix) }
    }

    /// Returns what it holds of a shard, as `PRIORITY:TENANT:ENTRY`.
    pub fn held_in(&self, prefix: &str) -> Vec<String> {
        let held = self.held.lock();
        let receipts = held.iter().filter_map(|receipt| keys::split(receipt));
        let of_shard = receipts.filter(|(of, _)| *of == prefix);
        of_shard.map(|(_, place_and_entry)| place_and_entry.to_owned()).collect()
    }
}

impl Inner {
    /// The state of a new dispatcher with this limit for each shard.
    pub fn new(connections: Arc<Connections>, shards: u16, limit: BacklogLimit) -> Self {
        Self {
            connections,
            shards,
            limit,
            stats: Arc::default(),
            data_names: Mutex::default(),
            consumers: Mutex::default(),
            swept_at: Mutex::default(),
        }
    }

    /// Returns a consumer of this process.
    pub fn consumer(&self, name: &str) -> Arc<Consumer> {
        let mut consumers = self.consumers.lock();
        Arc::clone(consumers.entry(name.to_owned()).or_default())
    }

    /// Returns the prefixes of a queue's shards; the first one is that of shard 0.
    pub fn prefixes(&self, queue: &QueueName) -> impl Iterator<Item = String> {
        (0..self.shards).map(|shard| keys::shard_prefix(queue, shard))
    }

    /// Counts and logs foreign entries, without their content.
    pub fn count_foreign(&self, queue: &str, count: u64) {
        if count > 0 {
            self.stats.lock().foreign_entries += count;
            tracing::warn!(queue, count, "dropped stream entries that are not jobs");
        }
    }
}

/// Returns the error for a call that failed, sorted by what a retry can change.
pub(crate) fn unavailable(error: RedisError) -> DispatchError {
    match needs(&error) {
        Needs::Operator(remedy) => DispatchError::Refused(Refusal { said: words(&error), remedy }),
        Needs::Time | Needs::AnotherValue => DispatchError::Unavailable(Box::new(error)),
    }
}

/// Returns an error in words; the library puts quotation marks around the words of servers that it does not know.
pub(super) fn words(error: &RedisError) -> String {
    let words = match (CannotConnect::of(error), error.code(), error.detail()) {
        (None, Some(code), Some(detail)) => format!("{code} {detail}"),
        _ => error.to_string(),
    };
    words.trim_end_matches('.').to_owned()
}

/// Returns what a call that failed needs.
fn needs(error: &RedisError) -> Needs {
    let cause = CannotConnect::of(error).map_or(error, |failed| &failed.source);
    if cause.kind() == redis::ErrorKind::AuthenticationFailed {
        return Needs::Operator("check user and password in the Redis URL");
    }
    refusal::of_redis(cause.code().unwrap_or_default(), &cause.to_string())
}

/// Returns the error for a script that adds data and failed: a Redis with full memory refuses such a script as a whole.
pub(super) fn refusal(queue: &QueueName, error: RedisError) -> DispatchError {
    if error.code() == Some("OOM") {
        let (queue, limit) = (queue.clone(), Limit::Memory);
        return DispatchError::Busy { queue, limit, retry_after: RETRY_AFTER };
    }
    unavailable(error)
}
