//! Shards of queues, for queues that one Redis core cannot carry: `?shards=N` in the URL.
//!
//! Each shard is a queue of its own in Redis, with its own keys, hash tag and scripts, so the shards of a queue
//! can be on different nodes of a cluster. An entry's shard is its key ([`Entry::shard_key`]) modulo their
//! number. A queue without shards is a queue with one.
//!
//! A consumer takes entries from up to four home shards, which follow from its name, beginning with another one
//! each time. When these are empty it takes from the others, so no entry waits while a consumer is idle.
//! Priorities and fairness between tenants hold within a shard. Waiting consumers are woken by the ring of
//! shard 0 alone: whatever adds entries to another shard rings there afterwards. If it dies in between,
//! consumers find them when their wait ends.
//!
//! Limits of the backlog apply to each shard; quotas apply to the sum over all shards.

use std::{
    hash::{DefaultHasher, Hash as _, Hasher as _},
    sync::atomic::Ordering,
};

use super::{Inner, keys, pull::Consumer, scripts};
use crate::{dispatch::Entry, job::QueueName};

/// Shards that a consumer looks at before all others.
pub(super) const HOME_SHARDS: u16 = 4;

impl Inner {
    /// Returns the prefixes of a queue's shards; the first one is that of shard 0.
    pub(super) fn prefixes(&self, queue: &QueueName) -> impl Iterator<Item = String> {
        (0..self.shards).map(|shard| keys::shard_prefix(queue, shard))
    }

    /// Returns the shard of an entry.
    pub(super) fn shard_of(&self, entry: &Entry) -> u16 {
        entry.shard_key % self.shards
    }

    /// Returns the prefixes of all shards in the order in which a consumer looks at them: its home shards, then
    /// the others.
    pub(super) fn look_order(
        &self,
        queue: &QueueName,
        name: &str,
        consumer: &Consumer,
    ) -> Vec<String> {
        if self.shards == 1 {
            return vec![keys::prefix(queue)];
        }
        let mut hash = DefaultHasher::new();
        name.hash(&mut hash);
        let first = (hash.finish() % u64::from(self.shards)) as u16;
        let turn = consumer.turn.fetch_add(1, Ordering::Relaxed);
        let home = HOME_SHARDS.min(self.shards);
        let rotated = |begin: u16, length: u16| {
            let turned = (0..length).map(move |n| begin + (turn + n) % length.max(1));
            turned.map(|n| (first + n) % self.shards)
        };
        let order = rotated(0, home).chain(rotated(home, self.shards - home));
        order.map(|shard| keys::shard_prefix(queue, shard)).collect()
    }

    /// Wakes consumers after entries were added to a shard above 0; scripts of shard 0 do so themselves. A
    /// failure only makes consumers find the entries later.
    pub(super) async fn ring(&self, prefix: &str, entries: usize) {
        let first = keys::first_shard(prefix);
        if entries == 0 || first == prefix {
            return;
        }
        let rung = self.connections.run_again(&scripts::RING, &first, &[entries.to_string()]).await;
        if let Err(error) = rung.map(|_: i64| ()) {
            tracing::debug!(queue = first, %error, "consumers were not woken");
        }
    }
}
