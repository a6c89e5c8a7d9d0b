//! Counters of rare events.

use redis::FromRedisValue as _;

use super::{Inner, RedisDispatcher, unavailable};
use crate::dispatch::DispatchError;

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

impl RedisDispatcher {
    /// Returns the memory that Redis uses for its data, in bytes; in a cluster, that of one node.
    pub async fn used_memory_bytes(&self) -> Result<u64, DispatchError> {
        let mut command = redis::cmd("INFO");
        command.arg("memory");
        let answer: redis::Value =
            self.inner.connections.query_again(&command).await.map_err(unavailable)?;
        let info = String::from_redis_value(answer).unwrap_or_default();
        let bytes =
            info.lines().find_map(|line| line.strip_prefix("used_memory:")?.trim().parse().ok());
        bytes.ok_or_else(|| {
            let what = "Redis does not tell its memory";
            unavailable((redis::ErrorKind::UnexpectedReturnType, what).into())
        })
    }
}

impl Inner {
    /// Counts and logs foreign entries, without their content.
    pub(super) fn count_foreign(&self, queue: &str, count: u64) {
        if count > 0 {
            self.stats.lock().foreign_entries += count;
            tracing::warn!(queue, count, "dropped stream entries that are not jobs");
        }
    }
}
