//! Pulls entries: a script takes them, and a doorbell wakes waiting consumers.
//!
//! The script (a "look") never blocks, so it is atomic. If it finds nothing, the consumer waits for a ring:
//! a blocking pop of a list that scripts push to, so a ring before the wait ends it at once, and a dropped
//! wait leaves no pending entry. A ring wakes one consumer, not a thousand. One that finds more entries than
//! it takes rings again. If a consumer dies between its ring and its look, or its wait is dropped at that
//! moment, the others look again when their wait ends, after five seconds at most.
//!
//! A look runs in a task of its own, which hands its entries back if the caller is gone. If the answer is
//! lost (a timeout, a broken connection), the consumer may own entries that it does not know; it is marked
//! unsure, and its next look first reads its pending entries and takes the unknown ones.

use std::{
    collections::HashSet,
    sync::{Arc, atomic::AtomicU16},
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use redis::{RedisResult, Value};
use tokio::sync::oneshot;
use uuid::Uuid;

use super::{Inner, keys, scripts, shards::HOME_SHARDS};
use crate::{
    dispatch::{Delivery, DispatchError, Pull},
    job::{Priority, QueueName},
};

/// Maximum number of entries of one look, so that a script does not block Redis for long.
const LOOK_MAX: usize = 1024;
/// Entries delivered by a script: job, `PRIORITY:TENANT:ENTRY`, number of deliveries.
type Delivered = Vec<(String, String, u32)>;

/// The state of one consumer of this process.
#[derive(Debug, Default)]
pub(super) struct Consumer {
    /// Allows one look or reclaim at a time: each would take the other's entries for lost ones.
    gate: tokio::sync::Mutex<()>,
    /// Prefixes of the shards that a look or reclaim was sent to, and its answer has not arrived.
    unsure: Mutex<HashSet<String>>,
    /// Number of looks; see `shards.rs`.
    pub(super) turn: AtomicU16,
    /// Receipts of entries that it has not acknowledged, handed back or lost.
    held: Mutex<HashSet<String>>,
}

impl Consumer {
    fn hold(&self, deliveries: &[Delivery]) {
        let mut held = self.held.lock();
        held.extend(deliveries.iter().map(|delivery| delivery.receipt.clone()));
    }

    pub(super) fn release<'a>(&self, deliveries: impl IntoIterator<Item = &'a Delivery>) {
        let mut held = self.held.lock();
        for delivery in deliveries {
            held.remove(&delivery.receipt);
        }
    }

    fn is_unsure(&self, prefix: &str) -> bool {
        self.unsure.lock().contains(prefix)
    }

    /// Notes whether the consumer may own entries of a shard that it does not know; returns whether it could
    /// before.
    fn set_unsure(&self, prefix: &str, is_unsure: bool) -> bool {
        let mut unsure = self.unsure.lock();
        if is_unsure { !unsure.insert(prefix.to_owned()) } else { unsure.remove(prefix) }
    }

    fn held_of(&self, prefix: &str) -> Vec<String> {
        let held = self.held.lock();
        let here = held.iter().filter_map(|receipt| keys::split(receipt));
        here.filter(|(of, _)| *of == prefix).map(|(_, here)| here.to_owned()).collect()
    }
}

/// The result of a look.
#[derive(Debug, Default)]
struct Look {
    deliveries: Vec<Delivery>,
    /// Time until a delayed entry is due.
    due: Option<Duration>,
}

/// A running look. Entries that it finds after its caller has gone are handed back.
struct Handover {
    inner: Arc<Inner>,
    consumer: String,
    answer: oneshot::Receiver<RedisResult<Look>>,
}

impl Drop for Handover {
    fn drop(&mut self) {
        self.answer.close();
        let Ok(Ok(look)) = self.answer.try_recv() else { return };
        let (inner, consumer) = (Arc::clone(&self.inner), std::mem::take(&mut self.consumer));
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime
                .spawn(async move { inner.hand_back_unclaimed(&consumer, look.deliveries).await });
        }
    }
}

impl Inner {
    pub(super) async fn pull(
        self: &Arc<Self>,
        pull: Pull<'_>,
    ) -> Result<Vec<Delivery>, DispatchError> {
        let started = Instant::now();
        loop {
            let look = self.look_apart(pull.queue, pull.consumer, pull.max, pull.only).await?;
            if !look.deliveries.is_empty() || pull.max == 0 || pull.only.is_some() {
                return Ok(look.deliveries);
            }
            if look.due.is_some_and(|due| due.is_zero()) {
                self.promote(pull.queue).await?;
                continue;
            }
            let left = pull.wait.saturating_sub(started.elapsed());
            if left.is_zero() {
                return Ok(Vec::new());
            }
            let wait = look.due.map_or(left, |due| due.min(left));
            self.wait_for_bell(pull.queue, wait).await;
        }
    }

    /// Waits for a ring. A failure only shortens the wait: the next look reports whether Redis is
    /// reachable.
    async fn wait_for_bell(&self, queue: &QueueName, wait: Duration) {
        let wait = wait.min(super::connections::BLOCK_MAX).max(Duration::from_millis(1));
        let mut command = redis::cmd("BLPOP");
        command.arg(format!("{}:bells", keys::prefix(queue))).arg(wait.as_secs_f64());
        if let Err(error) = self.connections.block::<Value>(&command).await {
            tracing::debug!(%queue, %error, "waiting for entries failed");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// Runs a look in a task of its own.
    async fn look_apart(
        self: &Arc<Self>,
        queue: &QueueName,
        consumer: &str,
        max: usize,
        only: Option<Priority>,
    ) -> Result<Look, DispatchError> {
        let (tell, answer) = oneshot::channel();
        let mut handover =
            Handover { inner: Arc::clone(self), consumer: consumer.to_owned(), answer };
        let (inner, queue, name) = (Arc::clone(self), queue.clone(), consumer.to_owned());
        tokio::spawn(async move {
            let look = inner.look(&queue, &name, max, only).await;
            if let Err(Ok(look)) = tell.send(look) {
                inner.hand_back_unclaimed(&name, look.deliveries).await;
            }
        });
        match (&mut handover.answer).await {
            Ok(look) => look.map_err(super::unavailable),
            Err(ended) => Err(DispatchError::Unavailable(Box::new(ended))),
        }
    }

    /// Hands back entries after their caller is gone.
    async fn hand_back_unclaimed(&self, consumer: &str, deliveries: Vec<Delivery>) {
        if !deliveries.is_empty() && self.hand_back(consumer, &deliveries).await.is_err() {
            // Removed from the consumer's known entries, so that its next look finds them.
            let known = self.consumer(consumer);
            known.release(&deliveries);
            for (prefix, _) in deliveries.iter().filter_map(|one| keys::split(&one.receipt)) {
                known.set_unsure(prefix, true);
            }
        }
    }

    async fn look(
        &self,
        queue: &QueueName,
        name: &str,
        max: usize,
        only: Option<Priority>,
    ) -> RedisResult<Look> {
        let consumer = self.consumer(name);
        let _gate = consumer.gate.lock().await;
        let (mut all, mut failed) = (Look::default(), None);
        let order = match only {
            Some(_) => self.home_order(queue, name, &consumer),
            None => self.look_order(queue, name, &consumer),
        };
        for (position, prefix) in order.iter().enumerate() {
            if position >= usize::from(HOME_SHARDS) && !all.deliveries.is_empty() {
                break;
            }
            match self.look_at(prefix, name, &consumer, max - all.deliveries.len(), only).await {
                Ok(found) => {
                    consumer.hold(&found.deliveries);
                    all.deliveries.extend(found.deliveries);
                    all.due = all.due.into_iter().chain(found.due).min();
                }
                // The other shards may be on nodes that work.
                Err(error) => failed = Some(error),
            }
            if all.deliveries.len() >= max {
                // There may be more.
                self.ring(prefix, all.deliveries.len().min(1)).await;
                break;
            }
        }
        match failed {
            Some(error) if all.deliveries.is_empty() => Err(error),
            _ => Ok(all),
        }
    }

    /// Looks at one shard; once more over a new connection.
    async fn look_at(
        &self,
        prefix: &str,
        name: &str,
        consumer: &Consumer,
        max: usize,
        only: Option<Priority>,
    ) -> RedisResult<Look> {
        match self.look_once(prefix, name, consumer, max, only).await {
            // The connection is broken: the look may have been executed, so the next one recovers.
            Err(error) if super::connections::breaks(&error) && !error.is_timeout() => {
                self.look_once(prefix, name, consumer, max, only).await
            }
            found => found,
        }
    }

    async fn look_once(
        &self,
        prefix: &str,
        name: &str,
        consumer: &Consumer,
        max: usize,
        only: Option<Priority>,
    ) -> RedisResult<Look> {
        let max = max.min(LOOK_MAX);
        let mut deliveries = Vec::new();
        // Recovery takes entries of any priority, so a look for one leaves it to the next look for all.
        let stays_unsure = only.is_some() && consumer.is_unsure(prefix);
        if consumer.is_unsure(prefix) && !stays_unsure {
            deliveries = self.recover(prefix, name, consumer).await?;
            let excess = deliveries.split_off(max.min(deliveries.len()));
            if !excess.is_empty() {
                self.hand_back(name, &excess).await?;
            }
        }
        let wanted = max.saturating_sub(deliveries.len());
        if wanted == 0 && !deliveries.is_empty() {
            consumer.set_unsure(prefix, false);
            return Ok(Look { deliveries, due: None });
        }
        consumer.set_unsure(prefix, true);
        let fresh_name = Uuid::now_v7().simple().to_string();
        let only = only.map_or_else(String::new, |only| only.as_str().to_owned());
        let arguments = [keys::escape(name), wanted.to_string(), fresh_name, only];
        let answer = self.connections.run(&scripts::PULL, prefix, &arguments).await?;
        let (born, again, foreign, due, found): (String, u64, u64, i64, Delivered) = answer;
        consumer.set_unsure(prefix, stays_unsure);
        self.count_foreign(prefix, foreign);
        self.note_birth(prefix, born, again);
        deliveries.extend(self.deliveries(prefix, found));
        let due = u64::try_from(due).ok().map(Duration::from_millis);
        Ok(Look { deliveries, due })
    }

    /// Counts groups that were created again, and losses of all data.
    fn note_birth(&self, prefix: &str, born: String, again: u64) {
        let mut names = self.born.lock();
        let emptied = names.get(prefix).is_some_and(|known| *known != born);
        if emptied || !names.contains_key(prefix) {
            names.insert(prefix.to_owned(), born);
        }
        drop(names);
        let count = again + u64::from(emptied);
        if count > 0 {
            self.stats.lock().group_recreations += count;
            tracing::warn!(queue = prefix, emptied, "Redis lost data of a queue");
        }
    }

    async fn recover(
        &self,
        prefix: &str,
        name: &str,
        consumer: &Consumer,
    ) -> RedisResult<Vec<Delivery>> {
        let mut deliveries = Vec::new();
        let mut cursor = "0".to_owned();
        loop {
            let mut arguments = vec![keys::escape(name), cursor];
            arguments.extend(consumer.held_of(prefix));
            let answer = self.connections.run(&scripts::RECOVER, prefix, &arguments).await?;
            let (next, found): (String, Delivered) = answer;
            for delivery in self.deliveries(prefix, found) {
                // A scan may return a stream twice.
                if !deliveries.contains(&delivery) {
                    deliveries.push(delivery);
                }
            }
            if next == "0" {
                break;
            }
            cursor = next;
        }
        self.stats.lock().recovered += deliveries.len() as u64;
        Ok(deliveries)
    }

    pub(super) async fn reclaim(
        &self,
        pull: &Pull<'_>,
        idle: Duration,
    ) -> RedisResult<Vec<Delivery>> {
        let idle = idle.as_millis().to_string();
        let consumer = self.consumer(pull.consumer);
        let _gate = consumer.gate.lock().await;
        let (mut taken, mut asked) = (Vec::new(), Vec::new());
        for prefix in self.look_order(pull.queue, pull.consumer, &consumer) {
            // Set until everything has arrived: the next look finds what a dropped or failed reclaim
            // took.
            let was_unsure = consumer.set_unsure(&prefix, true);
            let mut cursor = "0".to_owned();
            while taken.len() < pull.max {
                let left = (pull.max - taken.len()).min(LOOK_MAX).to_string();
                let arguments = [keys::escape(pull.consumer), left, idle.clone(), cursor];
                let answer = self.connections.run(&scripts::RECLAIM, &prefix, &arguments).await?;
                let (next, deleted, foreign, found): (String, u64, u64, Delivered) = answer;
                taken.extend(self.deliveries(&prefix, found));
                self.stats.lock().deleted_entries += deleted;
                self.count_foreign(&prefix, foreign);
                if next == "0" {
                    break;
                }
                cursor = next;
            }
            asked.push((prefix, was_unsure));
        }
        consumer.hold(&taken);
        for (prefix, was_unsure) in asked {
            consumer.set_unsure(&prefix, was_unsure);
        }
        self.stats.lock().reclaimed += taken.len() as u64;
        Ok(taken)
    }

    /// Parses a script's answer. Scripts deliver only entries with valid ids.
    fn deliveries(&self, prefix: &str, found: Delivered) -> Vec<Delivery> {
        let parsed = found.into_iter().filter_map(|(id, here, deliveries)| {
            let receipt = keys::receipt(prefix, &here);
            Some(Delivery { id: id.parse().ok()?, receipt, deliveries })
        });
        parsed.collect()
    }
}
