//! Pulls entries: a consumer polls the shards of its queue, and waits to be woken if they are empty.
//!
//! The script of a poll never blocks, so it is atomic. If it finds nothing, the consumer waits for a blocking pop of a
//! list that scripts push to: an element that was pushed before the wait ends it at once, and a dropped wait leaves no
//! pending entry. An element wakes one consumer, not a thousand; one that finds more entries than it takes wakes
//! another. If a consumer dies between its wake-up and its poll, or its wait is dropped at that moment, the others poll
//! again when their wait ends, after five seconds at most.
//!
//! A poll runs in a task of its own, which hands its entries back if the caller is gone. If the answer is lost (a
//! timeout, a broken connection), the consumer may own entries that it does not know; it is marked unsure, and its next
//! poll first reads its pending entries and takes the unknown ones.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use redis::{RedisResult, Value};
use tokio::sync::oneshot;
use uuid::Uuid;

use super::{
    connections::{BLOCK_MAX, breaks},
    inner::{Consumer, Inner, unavailable},
    keys, scripts,
    shards::HOME_SHARDS,
};
use crate::{
    dispatch::{Delivery, DispatchError, Pull},
    job::{Priority, QueueName},
};

/// Maximum number of entries of one script, so that it does not block Redis for long.
const SCRIPT_MAX: usize = 1024;
/// Entries delivered by a script: job, `PRIORITY:TENANT:ENTRY`, number of deliveries.
type Delivered = Vec<(String, String, u32)>;

/// What a poll found.
#[derive(Debug, Default)]
struct Polled {
    deliveries: Vec<Delivery>,
    /// Time until a delayed entry is due.
    due_in: Option<Duration>,
}

/// The task of a poll. Entries that it finds after its caller has gone are handed back.
struct PollTask {
    inner: Arc<Inner>,
    consumer: String,
    answer: oneshot::Receiver<RedisResult<Polled>>,
}

impl Drop for PollTask {
    fn drop(&mut self) {
        self.answer.close();
        let Ok(Ok(polled)) = self.answer.try_recv() else { return };
        let (inner, consumer) = (Arc::clone(&self.inner), std::mem::take(&mut self.consumer));
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(
                async move { inner.hand_back_unclaimed(&consumer, polled.deliveries).await },
            );
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
            let polled = self.poll_in_task(pull.queue, pull.consumer, pull.max, pull.only).await?;
            if !polled.deliveries.is_empty() || pull.max == 0 || pull.only.is_some() {
                return Ok(polled.deliveries);
            }
            if polled.due_in.is_some_and(|due_in| due_in.is_zero()) {
                self.promote(pull.queue).await?;
                continue;
            }
            let left = pull.wait.saturating_sub(started.elapsed());
            if left.is_zero() {
                return Ok(Vec::new());
            }
            let wait = polled.due_in.map_or(left, |due_in| due_in.min(left));
            self.wait_to_be_woken(pull.queue, wait).await;
        }
    }

    /// Waits until entries arrive. A failure only shortens the wait: the next poll reports whether Redis is reachable.
    async fn wait_to_be_woken(&self, queue: &QueueName, wait: Duration) {
        let wait = wait.min(BLOCK_MAX).max(Duration::from_millis(1));
        let mut command = redis::cmd("BLPOP");
        command.arg(format!("{}:wakeups", keys::prefix(queue))).arg(wait.as_secs_f64());
        if let Err(error) = self.connections.block::<Value>(&command).await {
            tracing::debug!(%queue, %error, "waiting for entries failed");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// Polls in a task of its own.
    async fn poll_in_task(
        self: &Arc<Self>,
        queue: &QueueName,
        consumer: &str,
        max: usize,
        only: Option<Priority>,
    ) -> Result<Polled, DispatchError> {
        let (tell, answer) = oneshot::channel();
        let mut task = PollTask { inner: Arc::clone(self), consumer: consumer.to_owned(), answer };
        let (inner, queue, name) = (Arc::clone(self), queue.clone(), consumer.to_owned());
        tokio::spawn(async move {
            let polled = inner.poll(&queue, &name, max, only).await;
            if let Err(Ok(polled)) = tell.send(polled) {
                inner.hand_back_unclaimed(&name, polled.deliveries).await;
            }
        });
        match (&mut task.answer).await {
            Ok(polled) => polled.map_err(unavailable),
            Err(ended) => Err(DispatchError::Unavailable(Box::new(ended))),
        }
    }

    /// Hands back entries after their caller is gone.
    async fn hand_back_unclaimed(&self, consumer: &str, deliveries: Vec<Delivery>) {
        if !deliveries.is_empty() && self.hand_back(consumer, &deliveries).await.is_err() {
            // Removed from the consumer's known entries, so that its next poll finds them.
            let known = self.consumer(consumer);
            known.release(&deliveries);
            for (prefix, _) in deliveries.iter().filter_map(|one| keys::split(&one.receipt)) {
                known.set_unsure(prefix, true);
            }
        }
    }

    /// Polls the shards of a queue, until there are enough entries.
    async fn poll(
        &self,
        queue: &QueueName,
        name: &str,
        max: usize,
        only: Option<Priority>,
    ) -> RedisResult<Polled> {
        let consumer = self.consumer(name);
        let _polling = consumer.polling.lock().await;
        let (mut all, mut failed) = (Polled::default(), None);
        let order = match only {
            Some(_) => self.home_order(queue, name, &consumer),
            None => self.poll_order(queue, name, &consumer),
        };
        for (position, prefix) in order.iter().enumerate() {
            if position >= usize::from(HOME_SHARDS) && !all.deliveries.is_empty() {
                break;
            }
            match self.poll_shard(prefix, name, &consumer, max - all.deliveries.len(), only).await {
                Ok(found) => {
                    consumer.hold(&found.deliveries);
                    all.deliveries.extend(found.deliveries);
                    all.due_in = all.due_in.into_iter().chain(found.due_in).min();
                }
                // The other shards may be on nodes that work.
                Err(error) => failed = Some(error),
            }
            if all.deliveries.len() >= max {
                // There may be more.
                self.wake(prefix, all.deliveries.len().min(1)).await;
                break;
            }
        }
        match failed {
            Some(error) if all.deliveries.is_empty() => Err(error),
            _ => Ok(all),
        }
    }

    /// Polls one shard; once more over a new connection.
    async fn poll_shard(
        &self,
        prefix: &str,
        name: &str,
        consumer: &Consumer,
        max: usize,
        only: Option<Priority>,
    ) -> RedisResult<Polled> {
        match self.poll_shard_once(prefix, name, consumer, max, only).await {
            // The connection is broken: the poll may have been executed, so the next one recovers.
            Err(error) if breaks(&error) && !error.is_timeout() => {
                self.poll_shard_once(prefix, name, consumer, max, only).await
            }
            found => found,
        }
    }

    async fn poll_shard_once(
        &self,
        prefix: &str,
        name: &str,
        consumer: &Consumer,
        max: usize,
        only: Option<Priority>,
    ) -> RedisResult<Polled> {
        let max = max.min(SCRIPT_MAX);
        let mut deliveries = Vec::new();
        // Recovery takes entries of any priority, so a poll of one leaves it to the next poll of all.
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
            return Ok(Polled { deliveries, due_in: None });
        }
        consumer.set_unsure(prefix, true);
        let new_name = Uuid::now_v7().simple().to_string();
        let only = only.map_or_else(String::new, |only| only.as_str().to_owned());
        let arguments = [keys::escape(name), wanted.to_string(), new_name, only];
        let answer = self.connections.run(&scripts::PULL, prefix, &arguments).await?;
        let (data_name, groups_created, foreign, due_in_ms, found): (
            String,
            u64,
            u64,
            i64,
            Delivered,
        ) = answer;
        consumer.set_unsure(prefix, stays_unsure);
        self.count_foreign(prefix, foreign);
        self.count_losses(prefix, data_name, groups_created);
        deliveries.extend(self.deliveries(prefix, found));
        let due_in = u64::try_from(due_in_ms).ok().map(Duration::from_millis);
        Ok(Polled { deliveries, due_in })
    }

    /// Counts groups that were created again, and losses of all data.
    fn count_losses(&self, prefix: &str, data_name: String, groups_created: u64) {
        let mut names = self.data_names.lock();
        let emptied = names.get(prefix).is_some_and(|known| *known != data_name);
        if emptied || !names.contains_key(prefix) {
            names.insert(prefix.to_owned(), data_name);
        }
        drop(names);
        let count = groups_created + u64::from(emptied);
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
            arguments.extend(consumer.held_in(prefix));
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
        let _polling = consumer.polling.lock().await;
        let (mut taken, mut asked) = (Vec::new(), Vec::new());
        for prefix in self.poll_order(pull.queue, pull.consumer, &consumer) {
            // Set until everything has arrived: the next poll finds what a dropped or failed reclaim
            // took.
            let was_unsure = consumer.set_unsure(&prefix, true);
            let mut cursor = "0".to_owned();
            while taken.len() < pull.max {
                let left = (pull.max - taken.len()).min(SCRIPT_MAX).to_string();
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
        let parsed = found.into_iter().filter_map(|(id, place_and_entry, deliveries)| {
            let receipt = keys::receipt(prefix, &place_and_entry);
            Some(Delivery { id: id.parse().ok()?, receipt, deliveries })
        });
        parsed.collect()
    }
}
