//! A dispatcher for one process: bounded queues in its memory.
//!
//! The weighted order is smooth weighted round robin (as in nginx): each non-empty priority earns its
//! weight per pick, the priority with the most credit is served, and the sum of the weights of all
//! non-empty priorities is subtracted from its credit. So sixteen high, four normal and one low entry
//! interleave instead of coming in bursts, and low always makes progress. Within a priority tenants take turns.

mod lanes;
mod tenants;

use std::{
    collections::{HashMap, HashSet},
    time::{Duration, Instant},
};

use async_trait::async_trait;
use parking_lot::Mutex;
use tokio::{sync::Notify, time::timeout};

use self::{
    lanes::Lanes,
    tenants::{Place, Waiting},
};
use super::{
    BacklogByPriority, Delivery, Demand, DispatchError, Dispatcher, Entry, Limit, Missing, Pull,
    Quotas,
};
use crate::job::{JobId, QueueName, Timestamp};

/// Time after which a caller that found the queue full should retry: about one step of an engine.
const RETRY_AFTER: Duration = Duration::from_millis(100);

/// Queues in memory, which are lost with the process.
#[derive(Debug)]
pub struct MemoryDispatcher {
    /// Maximum number of entries of a queue, without delivered ones.
    limit: usize,
    state: Mutex<State>,
    /// Notified of every enqueue and hand-back.
    arrived: Notify,
}

#[derive(Debug, Default)]
struct State {
    queues: HashMap<QueueName, Lanes>,
    /// Ids waiting in any lane, so that enqueueing twice adds once.
    waiting: HashSet<JobId>,
    /// Entries that are delivered and not acknowledged.
    pending: HashMap<JobId, Pending>,
    receipts: u64,
}

#[derive(Debug)]
struct Pending {
    waiting: Waiting,
    consumer: String,
    receipt: String,
    /// Time of its delivery or last renewal.
    renewed: Instant,
}

impl State {
    /// Returns the ids that are new, or an error if a queue has no room for its entries. Requeued
    /// entries have twice as much room, and what the store has in addition does not count.
    fn admit(
        &self,
        entries: &[Entry],
        limit: usize,
        again: bool,
    ) -> Result<HashSet<JobId>, DispatchError> {
        let mut added: HashMap<&QueueName, usize> = HashMap::new();
        let mut fresh = HashSet::new();
        for entry in entries {
            let known = self.waiting.contains(&entry.id) || self.pending.contains_key(&entry.id);
            if !known && fresh.insert(entry.id) {
                *added.entry(&entry.queue).or_default() += 1;
            }
        }
        for (queue, count) in added {
            let lanes = self.queues.get(queue);
            let depth = lanes.map_or(0, Lanes::len);
            let (depth, room) = match again {
                true => (depth, limit.saturating_mul(2)),
                false => (depth.saturating_add(lanes.map_or(0, Lanes::missing_entries)), limit),
            };
            if depth.saturating_add(count) > room {
                let queue = queue.clone();
                let limit = Limit::Entries(limit);
                return Err(DispatchError::Busy { queue, limit, retry_after: RETRY_AFTER });
            }
        }
        Ok(fresh)
    }

    fn take(&mut self, pull: &Pull<'_>) -> Vec<Delivery> {
        let (mut taken, now) = (Vec::new(), Timestamp::by_this_machine());
        while taken.len() < pull.max {
            let Some(waiting) = self.queues.get_mut(pull.queue) else { break };
            let Some(mut waiting) = waiting.pop(pull.only, now) else { break };
            let id = waiting.entry.id;
            waiting.deliveries = waiting.deliveries.saturating_add(1);
            self.receipts += 1;
            let receipt = self.receipts.to_string();
            let deliveries = waiting.deliveries;
            self.waiting.remove(&id);
            let consumer = pull.consumer.to_owned();
            let renewed = Instant::now();
            self.pending
                .insert(id, Pending { waiting, consumer, receipt: receipt.clone(), renewed });
            taken.push(Delivery { id, receipt, deliveries });
        }
        taken
    }

    /// Assigns to the consumer entries that others have not renewed for `idle`.
    fn take_over(&mut self, pull: &Pull<'_>, idle: Duration) -> Vec<Delivery> {
        let mut taken = Vec::new();
        for (id, pending) in &mut self.pending {
            let theirs = pending.consumer != pull.consumer && pending.renewed.elapsed() >= idle;
            if taken.len() >= pull.max || !theirs || pending.waiting.entry.queue != *pull.queue {
                continue;
            }
            self.receipts += 1;
            pending.waiting.deliveries = pending.waiting.deliveries.saturating_add(1);
            pending.consumer = pull.consumer.to_owned();
            pending.receipt = self.receipts.to_string();
            pending.renewed = Instant::now();
            let (receipt, deliveries) = (pending.receipt.clone(), pending.waiting.deliveries);
            taken.push(Delivery { id: *id, receipt, deliveries });
        }
        taken
    }

    /// Returns the pending entry, if this delivery still belongs to the consumer.
    fn pending_of(&mut self, consumer: &str, delivery: &Delivery) -> Option<&mut Pending> {
        self.pending
            .get_mut(&delivery.id)
            .filter(|pending| pending.consumer == consumer && pending.receipt == delivery.receipt)
    }

    /// Removes a pending entry if this delivery still belongs to the consumer.
    fn release(&mut self, consumer: &str, delivery: &Delivery) -> Option<Waiting> {
        self.pending_of(consumer, delivery)?;
        self.pending.remove(&delivery.id).map(|pending| pending.waiting)
    }
}

impl MemoryDispatcher {
    /// Creates a dispatcher that holds up to `limit` entries per queue.
    pub fn new(limit: usize) -> Self {
        Self { limit, state: Mutex::default(), arrived: Notify::new() }
    }

    fn add(&self, entries: &[Entry], again: bool) -> Result<usize, DispatchError> {
        let mut state = self.state.lock();
        let mut new = state.admit(entries, self.limit, again)?;
        let added = new.len();
        for entry in entries.iter().filter(|entry| new.remove(&entry.id)) {
            state.waiting.insert(entry.id);
            let lanes = state.queues.entry(entry.queue.clone()).or_default();
            let waiting = Waiting { entry: entry.clone(), deliveries: 0 };
            lanes.push(waiting, if again { Place::Requeued } else { Place::Fresh });
        }
        drop(state);
        self.arrived.notify_waiters();
        Ok(added)
    }

    /// Checks a demand against the limits of a queue; returns what waits in it.
    fn admit_to(
        &self,
        lanes: &Lanes,
        demand: &Demand,
        quotas: &Quotas,
    ) -> Result<BacklogByPriority, DispatchError> {
        let busy = |limit| {
            let queue = demand.queue.clone();
            Err(DispatchError::Busy { queue, limit, retry_after: RETRY_AFTER })
        };
        let count = lanes.len().saturating_add(lanes.missing_entries());
        if demand.entries == 0 || (demand.entries == 1 && count == 0) {
            return Ok(lanes.backlog(demand));
        }
        let limit = demand.entries_of(self.limit);
        if count.saturating_add(demand.entries) > limit {
            return busy(Limit::Entries(limit));
        }
        let all = lanes.tokens().saturating_add(demand.tokens.values().sum());
        let bound = quotas.tokens.map(|bound| demand.part_of(bound));
        if let Some(limit) = bound.filter(|limit| all > *limit) {
            return busy(Limit::Tokens(limit));
        }
        for (tenant, tokens) in &demand.tokens {
            let Some(quota) = quotas.of_tenant(tenant).map(|quota| demand.part_of(quota)) else {
                continue;
            };
            let own = lanes.tokens_of(tenant);
            if own.saturating_add(*tokens) > quota && (demand.entries > 1 || own > 0) {
                return busy(Limit::Tenant(quota));
            }
        }
        Ok(lanes.backlog(demand))
    }

    /// Takes entries and waits without a limit for the first; [`Dispatcher::pull`] limits the wait.
    async fn take_first(&self, pull: &Pull<'_>) -> Vec<Delivery> {
        loop {
            // Subscribe before looking, or an enqueue in between would be missed.
            let arrived = self.arrived.notified();
            let taken = self.state.lock().take(pull);
            if !taken.is_empty() {
                return taken;
            }
            arrived.await;
        }
    }
}

#[async_trait]
impl Dispatcher for MemoryDispatcher {
    async fn enqueue(&self, entries: &[Entry]) -> Result<usize, DispatchError> {
        self.add(entries, false)
    }

    async fn requeue(&self, entries: &[Entry]) -> Result<usize, DispatchError> {
        self.add(entries, true)
    }

    async fn missing(&self, queue: &QueueName) -> Result<Option<Missing>, DispatchError> {
        Ok(self.state.lock().queues.get(queue).and_then(|lanes| lanes.missing))
    }

    async fn set_missing(&self, queue: &QueueName, missing: Missing) -> Result<(), DispatchError> {
        self.state.lock().queues.entry(queue.clone()).or_default().missing = Some(missing);
        Ok(())
    }

    async fn admit(
        &self,
        demand: &Demand,
        quotas: &Quotas,
    ) -> Result<BacklogByPriority, DispatchError> {
        let state = self.state.lock();
        let Some(lanes) = state.queues.get(&demand.queue) else {
            return self.admit_to(&Lanes::default(), demand, quotas);
        };
        self.admit_to(lanes, demand, quotas)
    }

    async fn pull(&self, pull: Pull<'_>) -> Result<Vec<Delivery>, DispatchError> {
        let taken = self.state.lock().take(&pull);
        if !taken.is_empty() || pull.max == 0 || pull.wait.is_zero() || pull.only.is_some() {
            return Ok(taken);
        }
        Ok(timeout(pull.wait, self.take_first(&pull)).await.unwrap_or_default())
    }

    async fn acknowledge(
        &self,
        consumer: &str,
        deliveries: &[Delivery],
    ) -> Result<usize, DispatchError> {
        let mut state = self.state.lock();
        Ok(deliveries.iter().filter(|delivery| state.release(consumer, delivery).is_some()).count())
    }

    async fn hand_back(
        &self,
        consumer: &str,
        deliveries: &[Delivery],
    ) -> Result<usize, DispatchError> {
        let mut state = self.state.lock();
        let mut count = 0;
        // Backwards, so that the first delivery is first in its lane again.
        for delivery in deliveries.iter().rev() {
            let Some(waiting) = state.release(consumer, delivery) else { continue };
            count += 1;
            state.waiting.insert(delivery.id);
            let lanes = state.queues.entry(waiting.entry.queue.clone()).or_default();
            lanes.push(waiting, Place::Returned);
        }
        drop(state);
        self.arrived.notify_waiters();
        Ok(count)
    }

    async fn renew(
        &self,
        consumer: &str,
        deliveries: &[Delivery],
    ) -> Result<Vec<Delivery>, DispatchError> {
        let mut state = self.state.lock();
        let lost = deliveries.iter().filter(|delivery| {
            let mine = state.pending_of(consumer, delivery);
            mine.map(|pending| pending.renewed = Instant::now()).is_none()
        });
        Ok(lost.cloned().collect())
    }

    async fn reclaim(
        &self,
        pull: Pull<'_>,
        idle: Duration,
    ) -> Result<Vec<Delivery>, DispatchError> {
        Ok(self.state.lock().take_over(&pull, idle))
    }

    async fn depth(&self, queue: &QueueName) -> Result<usize, DispatchError> {
        Ok(self.state.lock().queues.get(queue).map_or(0, Lanes::len))
    }
}
