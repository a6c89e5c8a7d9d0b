//! Keeps the dispatcher consistent with the store: enqueues jobs that became due or lost their lease, and
//! jobs that a restarted dispatcher no longer has.
//!
//! Jobs that were just queued are requeued at once. All others are covered by a slow scan over all queued
//! jobs, which requeues them and so restores lost entries. When the depth shows that most of a page was
//! new, the dispatcher has lost many entries, and the next page follows at once.
//!
//! A dispatcher without any data is refilled: first the oldest jobs of every priority and tenant, so that
//! they are served in their shares from the start, then all others. Until that is complete, admission counts
//! what the store has in addition.
//!
//! Every worker has a reconciler. What concerns all queues is done by the worker that leads the store, what
//! concerns one queue by the one that leads the queue; both are chosen by heartbeats. Nothing goes wrong if
//! two do it at a time: when a refill of another worker makes no progress, this one refills. A worker without
//! heartbeats, in one process with its store, leads both.

use std::{collections::HashMap, sync::Arc, time::Duration};

use tokio::{
    sync::watch,
    time::{Instant, MissedTickBehavior, interval},
};
use tritmill_queue::{
    DispatchError, Dispatcher, JobId, QueueName, Store,
    dispatch::{Entry, Missing},
    store::{RECONCILED_MAX, workers::Directive},
};

use super::{error::WorkerError, setup::Worker};
use crate::metrics::Metrics;

const INTERVAL: Duration = Duration::from_secs(1);
/// Entries scanned per tick while the dispatcher has enough.
const SCAN_COUNT: u32 = 512;
/// Entries enqueued at a time when the dispatcher has run low or lost much.
const FEED_COUNT: u32 = 4096;
/// Entries enqueued at a time: a full dispatcher still takes what it has room for.
const CHUNK: usize = 512;
/// First jobs of every priority and tenant, and of all, with which a refill begins.
const HEADS: (u32, u32) = (1024, 1 << 16);
/// Pages of a refill between two rounds of other work.
const REFILL_PAGES: usize = 16;
/// A refill by another worker that makes no progress for this long has ended.
const REFILL_STALLED: Duration = Duration::from_secs(10);

/// The task's state.
pub(super) struct Reconciler {
    store: Arc<dyn Store>,
    dispatcher: Arc<dyn Dispatcher>,
    metrics: Arc<Metrics>,
    queue: QueueName,
    directive: watch::Receiver<Directive>,
    /// A dispatcher with fewer entries than this has run low.
    low: usize,
    /// Position of the scan over the queued jobs.
    cursor: Option<JobId>,
    /// Jobs that became due and are not enqueued yet, by queue.
    due: HashMap<QueueName, Vec<Entry>>,
    /// What a refill by this worker has not reached yet.
    refill: Option<Missing>,
    /// What a refill by another worker had not reached, and since when.
    others_refill: Option<(Missing, Instant)>,
}

impl Reconciler {
    pub fn new(worker: &Worker, directive: watch::Receiver<Directive>) -> Self {
        Self {
            store: Arc::clone(&worker.store),
            dispatcher: Arc::clone(&worker.dispatcher),
            metrics: Arc::clone(&worker.metrics),
            queue: worker.config.queue.clone(),
            directive,
            low: worker.config.slots.saturating_mul(4),
            cursor: None,
            due: HashMap::new(),
            refill: None,
            others_refill: None,
        }
    }

    /// Runs until it is aborted.
    pub async fn run(mut self) {
        let mut ticks = interval(INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            loop {
                match self.round().await {
                    Ok(true) => {}
                    Ok(false) => break,
                    Err(error) => {
                        tracing::warn!(%error, "queue not reconciled, trying again");
                        break;
                    }
                }
            }
        }
    }

    /// Returns whether the next round should follow at once.
    async fn round(&mut self) -> Result<bool, WorkerError> {
        let leads = self.directive.borrow().leads;
        if leads.store {
            self.reconcile_store().await?;
        }
        self.enqueue_due().await;
        if !leads.queue {
            (self.refill, self.others_refill, self.cursor) = (None, None, None);
            self.metrics.set_queue_depth(self.dispatcher.depth(&self.queue).await?);
            return Ok(false);
        }
        let again = self.reconcile_queue().await?;
        self.metrics.upkeep.queue_reconciled(&self.queue);
        Ok(again)
    }

    /// Gives the dispatcher entries of the queue that it lacks. Returns whether to go on at once.
    async fn reconcile_queue(&mut self) -> Result<bool, WorkerError> {
        self.enqueue_unannounced().await?;
        if let Some(again) = self.refill().await? {
            return Ok(again);
        }
        let mut depth = self.dispatcher.depth(&self.queue).await?;
        let mut count = if depth < self.low { FEED_COUNT } else { SCAN_COUNT };
        loop {
            self.metrics.set_queue_depth(depth);
            let scanned = self.enqueue_page(count).await?;
            let before = std::mem::replace(&mut depth, self.dispatcher.depth(&self.queue).await?);
            let new = depth.saturating_sub(before);
            if scanned < count as usize || new < scanned / 2 {
                return Ok(false);
            }
            count = FEED_COUNT;
        }
    }

    /// Applies what time has changed, and notes which jobs were queued by that.
    async fn reconcile_store(&mut self) -> Result<(), WorkerError> {
        let moved = self.store.reconcile().await?;
        self.metrics.upkeep.store_reconciled();
        self.metrics.add_reclaimed(moved.lapsed);
        for entry in moved.queued {
            let due = self.due.entry(entry.queue.clone()).or_default();
            // If the dispatcher is full for long, the rest is left to the store's notes and the scan.
            if due.len() < RECONCILED_MAX {
                due.push(entry);
            }
        }
        Ok(())
    }

    /// Enqueues jobs that the store has queued and whose enqueueing is in doubt.
    async fn enqueue_unannounced(&mut self) -> Result<(), WorkerError> {
        loop {
            let unannounced = self.store.unannounced(&self.queue).await?;
            if unannounced.is_empty() {
                return Ok(());
            }
            match self.requeue(&unannounced.entries).await {
                // The notes stay until there is room.
                Err(WorkerError::Dispatch(DispatchError::Busy { .. })) => return Ok(()),
                requeued => requeued?,
            }
            self.store.forget_announcements(&unannounced).await?;
            if !unannounced.more {
                return Ok(());
            }
        }
    }

    /// Enqueues due jobs, each queue by itself since one may be full. Failures are retried in the next
    /// tick.
    async fn enqueue_due(&mut self) {
        for (queue, entries) in std::mem::take(&mut self.due) {
            if let Err(error) = self.dispatcher.requeue(&entries).await {
                tracing::warn!(%queue, %error, "due jobs not enqueued, trying again");
                self.due.insert(queue, entries);
            }
        }
    }

    /// Refills a dispatcher that lacks jobs, a bounded number at a time. Returns whether to go on at once;
    /// `None` if it lacks none, or if another worker refills it.
    async fn refill(&mut self) -> Result<Option<bool>, WorkerError> {
        let missing = self.dispatcher.missing(&self.queue).await?;
        if missing.is_some_and(|missing| !missing.refilling) {
            (self.refill, self.others_refill) = (None, None);
            return Ok(None);
        }
        if missing.is_none() {
            // The data is gone, and with it what an earlier refill added.
            self.refill = None;
        }
        if self.refill.is_none() {
            if let Some(missing) = missing
                && !self.is_stalled(missing)
            {
                return Ok(None);
            }
            self.begin_refill().await?;
        }
        let mut again = true;
        for _ in 0..REFILL_PAGES {
            let scanned = match self.enqueue_page(FEED_COUNT).await {
                // The rest follows as workers take entries.
                Err(WorkerError::Dispatch(DispatchError::Busy { .. })) => {
                    again = false;
                    break;
                }
                scanned => scanned?,
            };
            if scanned < FEED_COUNT as usize {
                (self.refill, again) = (None, false);
                tracing::info!(queue = %self.queue, "dispatcher refilled");
                break;
            }
        }
        let missing = self.refill.unwrap_or_default();
        self.dispatcher.set_missing(&self.queue, missing).await?;
        self.metrics.set_queue_depth(self.dispatcher.depth(&self.queue).await?);
        Ok(Some(again))
    }

    /// Returns whether another worker's refill has stopped.
    fn is_stalled(&mut self, missing: Missing) -> bool {
        match self.others_refill {
            Some((known, since)) if known == missing => since.elapsed() >= REFILL_STALLED,
            _ => {
                self.others_refill = Some((missing, Instant::now()));
                false
            }
        }
    }

    /// Tells the dispatcher what the store has, and enqueues the heads of all lines.
    async fn begin_refill(&mut self) -> Result<(), WorkerError> {
        // Keeps other workers from doing the same; the numbers follow. If this worker dies in between,
        // nothing counts that may not be there.
        let begun = Missing { refilling: true, ..Missing::default() };
        self.dispatcher.set_missing(&self.queue, begun).await?;
        let heads = self.store.queued_heads(&self.queue, HEADS.0, HEADS.1).await;
        let (total, heads) = heads.unwrap_or_else(|error| {
            // A long queue may take the store longer than a call may; the scan finds everything.
            tracing::warn!(queue = %self.queue, %error, "refilling in order of age");
            (begun, Vec::new())
        });
        let known = self.dispatcher.depth(&self.queue).await? as u64;
        let entries = total.entries.saturating_sub(known);
        // Without the tokens of the known entries, at the mean cost.
        let tokens =
            u128::from(total.tokens) * u128::from(entries) / u128::from(total.entries.max(1));
        let tokens = tokens.try_into().unwrap_or(u64::MAX);
        let missing = Missing { entries, tokens, refilling: true };
        self.dispatcher.set_missing(&self.queue, missing).await?;
        (self.refill, self.cursor) = (Some(missing), None);
        tracing::info!(queue = %self.queue, missing = missing.entries, "refilling the dispatcher");
        match self.requeue(&heads).await {
            Err(WorkerError::Dispatch(DispatchError::Busy { .. })) => Ok(()),
            requeued => requeued,
        }
    }

    /// Requeues entries of this worker's queue, and counts the new ones.
    async fn requeue(&mut self, entries: &[Entry]) -> Result<(), WorkerError> {
        for chunk in entries.chunks(CHUNK) {
            let added = self.dispatcher.requeue(chunk).await?;
            self.metrics.add_re_enqueued(added);
            if let Some(missing) = &mut self.refill {
                let cost = chunk.iter().map(|entry| u64::from(entry.cost)).sum::<u64>();
                let new = cost * added as u64 / chunk.len() as u64;
                missing.entries = missing.entries.saturating_sub(added as u64);
                missing.tokens = missing.tokens.saturating_sub(new);
            }
        }
        Ok(())
    }

    /// Enqueues the next page of the scan; returns its length.
    async fn enqueue_page(&mut self, count: u32) -> Result<usize, WorkerError> {
        let entries = self.store.queued(&self.queue, self.cursor, count).await?;
        self.requeue(&entries).await?;
        // Only after success, so that a failed page is tried again.
        self.cursor = match entries.last() {
            Some(last) if entries.len() == count as usize => Some(last.id),
            _ => None,
        };
        Ok(entries.len())
    }
}

#[cfg(test)]
mod tests;
