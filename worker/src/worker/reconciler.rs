//! Brings the dispatcher back to the store's truth: what became due, what a lost lease left behind,
//! and what a dispatcher that came back empty no longer knows.
//!
//! What has just been queued is fed at once, by name. For everything else there is a slow round over
//! all queued jobs, which feeds them again and so finds those that got lost; when the depth says that
//! most of a page was news, the dispatcher has lost much, and the next page follows without a wait.
//!
//! Every worker runs one; all of it may happen twice.

use std::{collections::HashMap, sync::Arc, time::Duration};

use tokio::time::{MissedTickBehavior, interval};
use tritmill_queue::{Dispatcher, JobId, QueueName, Store, dispatch::Entry, store::RECONCILED_MAX};

use super::{Worker, WorkerError};
use crate::metrics::Metrics;

const INTERVAL: Duration = Duration::from_secs(1);
/// Entries looked at in a tick while the dispatcher has enough: a slow round over everything queued.
const SCAN_COUNT: u32 = 512;
/// Entries fed at a time to a dispatcher that has run low or lost much.
const FEED_COUNT: u32 = 4096;

/// The task's state.
pub(super) struct Reconciler {
    store: Arc<dyn Store>,
    dispatcher: Arc<dyn Dispatcher>,
    metrics: Arc<Metrics>,
    queue: QueueName,
    /// Fewer waiting entries than this are few.
    low: usize,
    /// How far the round over the queued jobs has come.
    cursor: Option<JobId>,
    /// Queued by time and not fed yet, by queue.
    due: HashMap<QueueName, Vec<Entry>>,
}

impl Reconciler {
    pub fn of(worker: &Worker) -> Self {
        Self {
            store: Arc::clone(&worker.store),
            dispatcher: Arc::clone(&worker.dispatcher),
            metrics: Arc::clone(&worker.metrics),
            queue: worker.config.queue.clone(),
            low: worker.config.slots.saturating_mul(4),
            cursor: None,
            due: HashMap::new(),
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
        self.metrics.reclaimed(moved.lapsed);
        for entry in moved.queued {
            let due = self.due.entry(entry.queue.clone()).or_default();
            // What a dispatcher does not take for long is left to the round over everything.
            if due.len() < RECONCILED_MAX {
                due.push(entry);
            }
        }
        self.feed_due().await;
        let mut depth = self.dispatcher.depth(&self.queue).await?;
        let mut count = if depth < self.low { FEED_COUNT } else { SCAN_COUNT };
        loop {
            self.metrics.queue_depth(depth);
            let fed = self.feed_page(count).await?;
            let before = std::mem::replace(&mut depth, self.dispatcher.depth(&self.queue).await?);
            let news = depth.saturating_sub(before);
            if fed < count as usize || news < fed / 2 {
                return Ok(());
            }
            count = FEED_COUNT;
        }
    }

    /// Feeds what time has queued, each queue by itself: one may be full. What is not taken is
    /// tried again with the next tick.
    async fn feed_due(&mut self) {
        for (queue, entries) in std::mem::take(&mut self.due) {
            if let Err(error) = self.dispatcher.enqueue(&entries).await {
                tracing::warn!(%queue, %error, "due jobs not fed, trying again");
                self.due.insert(queue, entries);
            }
        }
    }

    /// Feeds the next page of the round; how many that were.
    async fn feed_page(&mut self, count: u32) -> Result<usize, WorkerError> {
        let entries = self.store.queued(&self.queue, self.cursor, count).await?;
        if !entries.is_empty() {
            self.metrics.fed_again(self.dispatcher.enqueue(&entries).await?);
        }
        // Only now: what could not be fed is tried again.
        self.cursor = match entries.last() {
            Some(last) if entries.len() == count as usize => Some(last.id),
            _ => None,
        };
        Ok(entries.len())
    }
}

#[cfg(test)]
mod tests {
    use tritmill_queue::{
        ClaimRef, Claimant, Job, Priority, Prompt, Sampling, Tenant,
        dispatch::{MemoryDispatcher, Pull},
        store::SqliteStore,
    };

    use super::*;

    fn job() -> Job {
        Job {
            id: JobId::generate(),
            tenant: Tenant::default(),
            queue: QueueName { model: "tiny".into(), format: "i2_s".into() },
            priority: Priority::Normal,
            prompt: Prompt::Text("once".into()),
            sampling: Sampling::default(),
            seed: 1,
            attempts_max: 3,
            run_at: None,
            expires_at: None,
            stream: false,
            traceparent: None,
            custom_id: None,
        }
    }

    async fn over(store: Arc<SqliteStore>, bound: usize) -> (Reconciler, Arc<MemoryDispatcher>) {
        let dispatcher = Arc::new(MemoryDispatcher::new(bound));
        let reconciler = Reconciler {
            store,
            dispatcher: dispatcher.clone(),
            metrics: Arc::default(),
            queue: job().queue,
            low: 4,
            cursor: None,
            due: HashMap::new(),
        };
        (reconciler, dispatcher)
    }

    async fn store(folder: &tempfile::TempDir, jobs: &[Job]) -> Arc<SqliteStore> {
        let store = SqliteStore::open(&folder.path().join("jobs")).await.expect("opens");
        store.submit(jobs).await.expect("submits");
        Arc::new(store)
    }

    #[tokio::test]
    async fn a_dispatcher_that_is_empty_is_fed_everything_in_one_round() {
        let folder = tempfile::tempdir().expect("a folder");
        let jobs: Vec<Job> = (0..3 * FEED_COUNT).map(|_| job()).collect();
        let store = store(&folder, &jobs).await;
        let (mut reconciler, dispatcher) = over(store, 1_000_000).await;
        // Some others may be there, so that it is not low.
        let others: Vec<Entry> = (0..100).map(|_| job().entry()).collect();
        dispatcher.enqueue(&others).await.expect("room");
        reconciler.round().await.expect("a round");
        let depth = dispatcher.depth(&reconciler.queue).await.expect("a depth");
        assert_eq!(depth, jobs.len() + others.len());
        // Now that nothing is news, the round is slow again.
        reconciler.round().await.expect("a round");
        assert_eq!(reconciler.cursor, Some(jobs[SCAN_COUNT as usize - 1].id));
    }

    #[tokio::test]
    async fn a_lost_lease_is_fed_at_once_though_the_round_is_elsewhere() {
        let folder = tempfile::tempdir().expect("a folder");
        let jobs: Vec<Job> = (0..2000).map(|_| job()).collect();
        let store = store(&folder, &jobs).await;
        let (mut reconciler, dispatcher) = over(store.clone(), 2000).await;
        let queue = reconciler.queue.clone();
        reconciler.round().await.expect("a round");
        let pull = || Pull { queue: &queue, consumer: "w", max: 1, wait: Duration::ZERO };
        let taken = dispatcher.pull(pull()).await.expect("one");
        let by = Claimant { owner: "w", lease: Duration::ZERO };
        let claims = store.claim(&[taken[0].id], by).await.expect("claims");
        assert_eq!(claims[0].claim_ref(), ClaimRef { id: jobs[0].id, epoch: 1 });
        dispatcher.acknowledge("w", &taken).await.expect("acknowledges");
        // Far behind it, and at the bound: not taken, and not forgotten.
        reconciler.cursor = Some(jobs[600].id);
        dispatcher.enqueue(&[job().entry()]).await.expect("room for one");
        reconciler.round().await.expect("a round");
        assert_eq!(dispatcher.depth(&queue).await.expect("a depth"), 2000);
        let first = dispatcher.pull(pull()).await.expect("one");
        dispatcher.acknowledge("w", &first).await.expect("acknowledges");
        let due: Vec<JobId> = reconciler.due[&queue].iter().map(|entry| entry.id).collect();
        assert_eq!(due, [jobs[0].id]);
        reconciler.cursor = Some(jobs[600].id);
        reconciler.round().await.expect("a round");
        assert!(reconciler.due.is_empty());
        assert_eq!(dispatcher.depth(&queue).await.expect("a depth"), 2000);
    }
}
