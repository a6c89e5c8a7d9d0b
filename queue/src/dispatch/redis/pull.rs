//! Taking work: one script looks, a doorbell wakes.
//!
//! A look never blocks, so it can be one atomic script. When it finds nothing it says which ring of
//! the doorbell was the last it saw, and the wait is a blocking read of the bell from there: a ring
//! in between ends the wait at once, and a wait that is dropped leaves no pending entry behind. Every
//! waiter hears every ring and looks, which idle consumers can afford; a ring that one of them took
//! away would be lost if that one died before its look.
//!
//! Nor does a look whose caller went away: it runs in a task of its own, which hands back what
//! nobody took. And if the answer itself was lost (a timeout, a broken connection), the consumer may
//! own entries that it does not know; it is marked unsure, and its next look first reads its pending
//! entries and takes those it never saw.

use std::{
    collections::HashSet,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use redis::{RedisResult, Value};
use tokio::sync::oneshot;
use uuid::Uuid;

use super::{Inner, keys, scripts, stats::add};
use crate::{
    dispatch::{Delivery, DispatchError, Pull},
    job::QueueName,
};

/// Most entries of one look: what a script may do before others want their turn.
const LOOK_MAX: usize = 1024;
/// What a script delivers: job, `PRIORITY:TENANT:ENTRY`, how often it was delivered.
type Delivered = Vec<(String, String, u32)>;

/// What this process knows of one of its consumers.
#[derive(Debug, Default)]
pub(super) struct Consumer {
    /// One look or reclaim at a time, or the one would take the other's entries for lost ones.
    gate: tokio::sync::Mutex<()>,
    /// Set before either is sent, cleared when its answer is here.
    unsure: AtomicBool,
    /// Receipts of entries it was given and has not acknowledged, handed back or lost.
    held: Mutex<HashSet<String>>,
}

impl Consumer {
    fn hold(&self, deliveries: &[Delivery]) {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        held.extend(deliveries.iter().map(|delivery| delivery.receipt.clone()));
    }

    pub(super) fn release<'a>(&self, deliveries: impl IntoIterator<Item = &'a Delivery>) {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        for delivery in deliveries {
            held.remove(&delivery.receipt);
        }
    }

    fn held_of(&self, prefix: &str) -> Vec<String> {
        let held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        let here = held.iter().filter_map(|receipt| keys::split(receipt));
        here.filter(|(of, _)| *of == prefix).map(|(_, here)| here.to_owned()).collect()
    }
}

/// What a look found.
#[derive(Debug)]
struct Look {
    deliveries: Vec<Delivery>,
    /// Until a delayed entry is due.
    due: Option<Duration>,
    /// The last ring of the bell.
    bell: String,
}

/// A look under way. Whatever it finds after its caller has gone is handed back.
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
            runtime.spawn(async move { inner.unwanted(&consumer, look.deliveries).await });
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
            let look = self.look_apart(pull.queue, pull.consumer, pull.max).await?;
            if !look.deliveries.is_empty() || pull.max == 0 {
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
            self.wait_for_bell(pull.queue, &look.bell, wait).await;
        }
    }

    /// Waits for a ring after `bell`. A failure is no more than a short wait: the look that follows
    /// says whether Redis is there.
    async fn wait_for_bell(&self, queue: &QueueName, bell: &str, wait: Duration) {
        let ms = wait.min(super::connections::BLOCK_MAX).as_millis().max(1);
        let mut command = redis::cmd("XREAD");
        let block = u64::try_from(ms).unwrap_or(1);
        command.arg("BLOCK").arg(block).arg("STREAMS");
        command.arg(format!("{}:bell", keys::prefix(queue))).arg(bell);
        if let Err(error) = self.connections.block::<Value>(&command).await {
            tracing::debug!(%queue, %error, "waiting for entries failed");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// A look in a task of its own.
    async fn look_apart(
        self: &Arc<Self>,
        queue: &QueueName,
        consumer: &str,
        max: usize,
    ) -> Result<Look, DispatchError> {
        let (tell, answer) = oneshot::channel();
        let mut handover =
            Handover { inner: Arc::clone(self), consumer: consumer.to_owned(), answer };
        let (inner, queue, name) = (Arc::clone(self), queue.clone(), consumer.to_owned());
        tokio::spawn(async move {
            let look = inner.look(&queue, &name, max).await;
            if let Err(Ok(look)) = tell.send(look) {
                inner.unwanted(&name, look.deliveries).await;
            }
        });
        match (&mut handover.answer).await {
            Ok(look) => look.map_err(super::unavailable),
            Err(ended) => Err(DispatchError::Unavailable(Box::new(ended))),
        }
    }

    /// Gives back what a caller did not stay for.
    async fn unwanted(&self, consumer: &str, deliveries: Vec<Delivery>) {
        if !deliveries.is_empty() && self.hand_back(consumer, &deliveries).await.is_err() {
            // Not held, so that the consumer's next look finds them.
            let known = self.consumer(consumer);
            known.release(&deliveries);
            known.unsure.store(true, Ordering::SeqCst);
        }
    }

    async fn look(&self, queue: &QueueName, name: &str, max: usize) -> RedisResult<Look> {
        let consumer = self.consumer(name);
        let _gate = consumer.gate.lock().await;
        let found = match self.look_once(queue, name, &consumer, max).await {
            // A connection found broken: what was sent may have arrived, so the next look recovers.
            Err(error) if super::connections::breaks(&error) && !error.is_timeout() => {
                self.look_once(queue, name, &consumer, max).await?
            }
            found => found?,
        };
        consumer.hold(&found.deliveries);
        Ok(found)
    }

    async fn look_once(
        &self,
        queue: &QueueName,
        name: &str,
        consumer: &Consumer,
        max: usize,
    ) -> RedisResult<Look> {
        let prefix = keys::prefix(queue);
        let max = max.min(LOOK_MAX);
        let mut deliveries = Vec::new();
        if consumer.unsure.load(Ordering::SeqCst) {
            deliveries = self.recover(&prefix, name, consumer).await?;
            let excess = deliveries.split_off(max.min(deliveries.len()));
            if !excess.is_empty() {
                self.hand_back(name, &excess).await?;
            }
        }
        let wanted = max.saturating_sub(deliveries.len());
        if wanted == 0 && !deliveries.is_empty() {
            consumer.unsure.store(false, Ordering::SeqCst);
            return Ok(Look { deliveries, due: None, bell: String::new() });
        }
        consumer.unsure.store(true, Ordering::SeqCst);
        let fresh_name = Uuid::now_v7().simple().to_string();
        let arguments = [keys::escape(name), wanted.to_string(), fresh_name];
        let answer = self.connections.run(&scripts::PULL, &prefix, &arguments).await?;
        let (born, again, foreign, due, bell, found): (String, u64, u64, i64, String, Delivered) =
            answer;
        consumer.unsure.store(false, Ordering::SeqCst);
        self.stats.foreign(&prefix, foreign);
        self.note_birth(&prefix, born, again);
        deliveries.extend(self.deliveries(&prefix, found));
        let due = u64::try_from(due).ok().map(Duration::from_millis);
        Ok(Look { deliveries, due, bell })
    }

    /// Counts groups made again, and a Redis that came back empty.
    fn note_birth(&self, prefix: &str, born: String, again: u64) {
        let mut names = self.born.lock().unwrap_or_else(PoisonError::into_inner);
        let emptied = names.get(prefix).is_some_and(|known| *known != born);
        if emptied || !names.contains_key(prefix) {
            names.insert(prefix.to_owned(), born);
        }
        drop(names);
        let count = again + u64::from(emptied);
        if count > 0 {
            add(&self.stats.group_recreations, count);
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
                // A scan may show a stream twice.
                if !deliveries.contains(&delivery) {
                    deliveries.push(delivery);
                }
            }
            if next == "0" {
                break;
            }
            cursor = next;
        }
        add(&self.stats.recovered, deliveries.len() as u64);
        Ok(deliveries)
    }

    pub(super) async fn reclaim(
        &self,
        pull: &Pull<'_>,
        idle: Duration,
    ) -> RedisResult<Vec<Delivery>> {
        let (prefix, idle) = (keys::prefix(pull.queue), idle.as_millis().to_string());
        let consumer = self.consumer(pull.consumer);
        let _gate = consumer.gate.lock().await;
        // Until all is in hand: what a dropped or broken reclaim took, the next look finds.
        let was_unsure = consumer.unsure.swap(true, Ordering::SeqCst);
        let (mut taken, mut cursor) = (Vec::new(), "0".to_owned());
        while taken.len() < pull.max {
            let left = (pull.max - taken.len()).min(LOOK_MAX).to_string();
            let arguments = [keys::escape(pull.consumer), left, idle.clone(), cursor];
            let answer = self.connections.run(&scripts::RECLAIM, &prefix, &arguments).await?;
            let (next, deleted, foreign, found): (String, u64, u64, Delivered) = answer;
            taken.extend(self.deliveries(&prefix, found));
            add(&self.stats.deleted_entries, deleted);
            self.stats.foreign(&prefix, foreign);
            if next == "0" {
                break;
            }
            cursor = next;
        }
        add(&self.stats.reclaimed, taken.len() as u64);
        consumer.hold(&taken);
        consumer.unsure.store(was_unsure, Ordering::SeqCst);
        Ok(taken)
    }

    /// A script's answer as deliveries. Scripts deliver nothing whose id does not parse.
    fn deliveries(&self, prefix: &str, found: Delivered) -> Vec<Delivery> {
        let parsed = found.into_iter().filter_map(|(id, here, deliveries)| {
            let receipt = keys::receipt(prefix, &here);
            Some(Delivery { id: id.parse().ok()?, receipt, deliveries })
        });
        parsed.collect()
    }
}
