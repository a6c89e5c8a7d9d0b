//! Keeps the dispatcher consistent with the store: enqueues jobs that became due or lost their lease, and
//! jobs that a restarted dispatcher no longer has.
//!
//! Jobs that were just queued are enqueued at once. All others are covered by a slow scan over all queued
//! jobs, which enqueues them again and so restores lost entries. When the depth shows that most of a page
//! was new, the dispatcher has lost many entries, and the next page follows at once.
//!
//! Every worker runs a reconciler; all its work may be done twice.

use std::{collections::HashMap, sync::Arc, time::Duration};

use tokio::time::{MissedTickBehavior, interval};
use tritmill_queue::{Dispatcher, JobId, QueueName, Store, dispatch::Entry, store::RECONCILED_MAX};

use super::{Worker, WorkerError};
use crate::metrics::Metrics;

const INTERVAL: Duration = Duration::from_secs(1);
/// Entries scanned per tick while the dispatcher has enough.
const SCAN_COUNT: u32 = 512;
/// Entries enqueued at a time when the dispatcher has run low or lost much.
const FEED_COUNT: u32 = 4096;

/// The task's state.
pub(super) struct Reconciler {
    store: Arc<dyn Store>,
    dispatcher: Arc<dyn Dispatcher>,
    metrics: Arc<Metrics>,
    queue: QueueName,
    /// A dispatcher with fewer entries than this has run low.
    low: usize,
    /// Position of the scan over the queued jobs.
    cursor: Option<JobId>,
    /// Jobs that became due and are not enqueued yet, by queue.
    due: HashMap<QueueName, Vec<Entry>>,
}

impl Reconciler {
    pub fn new(worker: &Worker) -> Self {
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

    /// Runs until it is aborted.
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
        self.metrics.add_reclaimed(moved.lapsed);
        for entry in moved.queued {
            let due = self.due.entry(entry.queue.clone()).or_default();
            // If the dispatcher is full for long, the rest is left to the scan.
            if due.len() < RECONCILED_MAX {
                due.push(entry);
            }
        }
        self.enqueue_due().await;
        let mut depth = self.dispatcher.depth(&self.queue).await?;
        let mut count = if depth < self.low { FEED_COUNT } else { SCAN_COUNT };
        loop {
            self.metrics.set_queue_depth(depth);
            let scanned = self.enqueue_page(count).await?;
            let before = std::mem::replace(&mut depth, self.dispatcher.depth(&self.queue).await?);
            let new = depth.saturating_sub(before);
            if scanned < count as usize || new < scanned / 2 {
                return Ok(());
            }
            count = FEED_COUNT;
        }
    }

    /// Enqueues due jobs, each queue by itself since one may be full. Failures are retried in the next
    /// tick.
    async fn enqueue_due(&mut self) {
        for (queue, entries) in std::mem::take(&mut self.due) {
            if let Err(error) = self.dispatcher.enqueue(&entries).await {
                tracing::warn!(%queue, %error, "due jobs not enqueued, trying again");
                self.due.insert(queue, entries);
            }
        }
    }

    /// Enqueues the next page of the scan; returns its length.
    async fn enqueue_page(&mut self, count: u32) -> Result<usize, WorkerError> {
        let entries = self.store.queued(&self.queue, self.cursor, count).await?;
        if !entries.is_empty() {
            self.metrics.add_re_enqueued(self.dispatcher.enqueue(&entries).await?);
        }
        // Only after success, so that a failed page is tried again.
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
        Claimant, Job, Priority, Prompt, Sampling, Tenant,
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

    async fn reconciler(
        store: Arc<SqliteStore>,
        bound: usize,
    ) -> (Reconciler, Arc<MemoryDispatcher>) {
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
    async fn empty_dispatcher_gets_everything_in_one_round() {
        let folder = tempfile::tempdir().expect("a folder");
        let jobs: Vec<Job> = (0..3 * FEED_COUNT).map(|_| job()).collect();
        let store = store(&folder, &jobs).await;
        let (mut reconciler, dispatcher) = reconciler(store, 1_000_000).await;
        // Enough other entries that the dispatcher has not run low.
        let others: Vec<Entry> = (0..100).map(|_| job().entry()).collect();
        dispatcher.enqueue(&others).await.expect("room");
        reconciler.round().await.expect("a round");
        let depth = dispatcher.depth(&reconciler.queue).await.expect("a depth");
        assert_eq!(depth, jobs.len() + others.len());
        // The dispatcher now has every entry, so the scan is slow again.
        reconciler.round().await.expect("a round");
        assert_eq!(reconciler.cursor, Some(jobs[SCAN_COUNT as usize - 1].id));
    }

    #[tokio::test]
    async fn job_with_lost_lease_is_enqueued_at_once_wherever_the_scan_is() {
        let folder = tempfile::tempdir().expect("a folder");
        let jobs: Vec<Job> = (0..2000).map(|_| job()).collect();
        let store = store(&folder, &jobs).await;
        let (mut reconciler, dispatcher) = reconciler(store.clone(), 2000).await;
        let queue = reconciler.queue.clone();
        reconciler.round().await.expect("a round");
        let pull = || Pull { queue: &queue, consumer: "w", max: 1, wait: Duration::ZERO };
        let taken = dispatcher.pull(pull()).await.expect("one");
        let by = Claimant::new("w", Duration::ZERO);
        let claims = store.claim(&[taken[0].id], by).await.expect("claims");
        assert_eq!((claims[0].job.id, claims[0].epoch), (jobs[0].id, 1));
        dispatcher.acknowledge("w", &taken).await.expect("acknowledges");
        // The scan is past this job and the dispatcher is full: the job is not enqueued, and not
        // forgotten.
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
