//! Brings the dispatcher back to the store's truth: what became due, what a lost lease left behind,
//! and what a dispatcher that came back empty no longer knows.
//!
//! Every worker runs one; all of it may happen twice.

use std::{sync::Arc, time::Duration};

use tokio::time::{MissedTickBehavior, interval};
use tritmill_queue::{Dispatcher, JobId, QueueName, Store};

use super::{Worker, WorkerError};
use crate::vitals::Vitals;

const INTERVAL: Duration = Duration::from_secs(1);
/// Entries looked at in a tick while the dispatcher has enough: a slow round over everything queued.
const SCAN_COUNT: u32 = 512;
/// Entries fed in a tick to a dispatcher that has run low though the store has not.
const FEED_COUNT: u32 = 4096;

/// The task's state.
pub(super) struct Reconciler {
    store: Arc<dyn Store>,
    dispatcher: Arc<dyn Dispatcher>,
    vitals: Arc<Vitals>,
    queue: QueueName,
    /// Fewer waiting entries than this are few.
    low: usize,
    /// How far the round over the queued jobs has come.
    cursor: Option<JobId>,
}

impl Reconciler {
    pub fn of(worker: &Worker) -> Self {
        Self {
            store: Arc::clone(&worker.store),
            dispatcher: Arc::clone(&worker.dispatcher),
            vitals: Arc::clone(&worker.vitals),
            queue: worker.config.queue.clone(),
            low: worker.config.slots.saturating_mul(4),
            cursor: None,
        }
    }

    /// Never ends.
    pub async fn run(mut self) {
        let mut ticks = interval(INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            if let Err(error) = self.round().await {
                tracing::warn!(%error, "queue not reconciled, trying again");
            }
        }
    }

    async fn round(&mut self) -> Result<(), WorkerError> {
        let moved = self.store.reconcile().await?;
        let depth = self.dispatcher.depth(&self.queue).await?;
        self.vitals.queue_depth(depth);
        let is_low = depth < self.low;
        // What has just been queued again may lie before the cursor.
        if moved > 0 && is_low {
            self.cursor = None;
        }
        let count = if is_low { FEED_COUNT } else { SCAN_COUNT };
        let entries = self.store.queued(&self.queue, self.cursor, count).await?;
        if !entries.is_empty() {
            self.dispatcher.enqueue(&entries).await?;
        }
        // Only now: what could not be fed is tried again.
        self.cursor = match entries.last() {
            Some(last) if entries.len() == count as usize => Some(last.id),
            _ => None,
        };
        Ok(())
    }
}
