//! Shards of queues, for queues that one Redis core cannot carry: `?shards=N` in the URL.
//!
//! Each shard is a queue of its own in Redis, with its own keys, hash tag and scripts, so the shards of a queue
//! can be on different nodes of a cluster. An entry's shard is its key ([`Entry::shard_key`]) modulo their
//! number. A queue without shards is a queue with one.
//!
//! A consumer takes entries from up to four home shards, which follow from its name, beginning with another one every
//! sixteen times. When these are empty it takes from the others, so no entry waits while a consumer is idle. One poll in
//! sixteen begins with another shard, so that no shard waits for ever where consumers are few. Priorities and fairness
//! between tenants hold within a shard. Waiting consumers are woken through shard 0 alone: a process that adds entries
//! to another shard wakes them there afterwards. If it dies in between, consumers find the entries when their wait ends.
//!
//! Limits of the backlog apply to each shard; quotas apply to the sum over all shards.

use std::{
    hash::{DefaultHasher, Hash as _, Hasher as _},
    sync::atomic::Ordering,
};

use super::{
    inner::{Consumer, Inner},
    keys, scripts,
};
use crate::{dispatch::Entry, job::QueueName};

/// Shards that a consumer polls before all others.
pub(super) const HOME_SHARDS: u16 = 4;

/// Every so many polls, a consumer begins with another shard than its own.
const ELSEWHERE_EVERY: u16 = 16;

/// Polls in succession that begin with the same home shard: its jobs begin alike.
const SAME_SHARD: u16 = 16;

/// Returns this many shards from one on, beginning with another one in each turn.
fn rotated(begin: u16, length: u16, turn: u16) -> impl Iterator<Item = u16> {
    (0..length).map(move |n| begin + (turn % length + n) % length)
}

/// Returns the home shards in the order of a poll, counted from the first one.
fn home_order(shards: u16, turn: u16) -> impl Iterator<Item = u16> {
    rotated(0, HOME_SHARDS.min(shards), turn / SAME_SHARD)
}

/// Returns the shards in the order of a poll, counted from the first home shard: the home shards in turns, then
/// the others in turns. One poll in [`ELSEWHERE_EVERY`] begins with one of the others.
fn order(shards: u16, turn: u16) -> impl Iterator<Item = u16> {
    let home = HOME_SHARDS.min(shards);
    let others = shards - home;
    let is_elsewhere = others > 0 && turn % ELSEWHERE_EVERY == ELSEWHERE_EVERY - 1;
    let mut elsewhere = rotated(home, others, turn / ELSEWHERE_EVERY);
    let first = is_elsewhere.then(|| elsewhere.next()).flatten();
    first.into_iter().chain(home_order(shards, turn)).chain(elsewhere)
}

impl Inner {
    /// Returns the shard of an entry.
    pub(super) fn shard_of(&self, entry: &Entry) -> u16 {
        entry.shard_key % self.shards
    }

    /// Returns the prefixes of all shards in the order in which a consumer polls them: its home shards, then
    /// the others.
    pub(super) fn poll_order(
        &self,
        queue: &QueueName,
        name: &str,
        consumer: &Consumer,
    ) -> Vec<String> {
        let turn = consumer.polls.fetch_add(1, Ordering::Relaxed);
        self.prefixes_of(queue, name, order(self.shards, turn))
    }

    /// Returns the prefixes of a consumer's home shards, in the order of its next poll, which does not change.
    pub(super) fn home_order(
        &self,
        queue: &QueueName,
        name: &str,
        consumer: &Consumer,
    ) -> Vec<String> {
        let turn = consumer.polls.load(Ordering::Relaxed);
        self.prefixes_of(queue, name, home_order(self.shards, turn))
    }

    /// Returns the prefixes of shards that are counted from a consumer's first home shard.
    fn prefixes_of(
        &self,
        queue: &QueueName,
        name: &str,
        shards: impl Iterator<Item = u16>,
    ) -> Vec<String> {
        let mut hash = DefaultHasher::new();
        name.hash(&mut hash);
        let first = (hash.finish() % u64::from(self.shards)) as u16;
        shards.map(|n| keys::shard_prefix(queue, (first + n) % self.shards)).collect()
    }

    /// Wakes consumers after entries were added to a shard above 0; scripts of shard 0 do so themselves. A
    /// failure only makes consumers find the entries later.
    pub(super) async fn wake(&self, prefix: &str, entries: usize) {
        let first = keys::first_shard(prefix);
        if entries == 0 || first == prefix {
            return;
        }
        let woken =
            self.connections.run_again(&scripts::WAKE, &first, &[entries.to_string()]).await;
        if let Err(error) = woken.map(|_: i64| ()) {
            tracing::debug!(queue = first, %error, "consumers were not woken");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_poll_has_each_shard_once_and_no_shard_is_left_out() {
        for shards in 1..=20 {
            let mut first_ones = vec![0; usize::from(shards)];
            for turn in 0..2560 {
                let mut polled: Vec<u16> = order(shards, turn).collect();
                first_ones[usize::from(polled[0])] += 1;
                polled.sort_unstable();
                assert_eq!(polled, (0..shards).collect::<Vec<_>>());
            }
            assert!(first_ones.iter().all(|times| *times >= 5), "{shards}: {first_ones:?}");
        }
    }
}
