//! [`Watch`]: detects changes in the service and publishes them to [`Changes`](crate::changes::Changes).
//!
//! One task per process runs every two seconds. It samples the queues, unless another process did so a
//! moment ago, and compares queues, workers, batches and jobs with their previous state.

use std::{collections::BTreeMap, time::Duration};

use serde_json::{Value, json};
use tokio::{
    sync::watch,
    time::{MissedTickBehavior, interval},
};
use tritmill_queue::{
    JobState,
    store::{JobFilter, Page},
};

use crate::{
    ApiError, App,
    operator::{jobs::JobView, queues, workers::WorkerView},
    store::batches::BatchFilter,
};

/// Pause between two comparisons.
const INTERVAL: Duration = Duration::from_secs(2);
/// Number of latest batches, and of latest jobs in each watched state, that are compared.
const WATCHED: u32 = 50;

/// Watches a service for changes.
pub struct Watch {
    app: App,
    /// Previous state by kind and name: the values of which a difference counts as a change.
    previous: BTreeMap<(&'static str, String), Value>,
}

impl Watch {
    /// A watch over a service. What exists at its first comparison does not count as a change.
    pub fn new(app: App) -> Self {
        Self { app, previous: BTreeMap::new() }
    }

    /// Runs until `stop` is true or its sender is dropped.
    pub async fn run(mut self, mut stop: watch::Receiver<bool>) {
        let mut ticks = interval(INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut is_first = true;
        loop {
            tokio::select! {
                _ = stop.wait_for(|stop| *stop) => return,
                _ = ticks.tick() => {}
            }
            match self.compare(is_first).await {
                Ok(()) => is_first = false,
                Err(error) => tracing::warn!(%error, "cannot look for changes, trying again"),
            }
        }
    }

    async fn compare(&mut self, is_first: bool) -> Result<(), ApiError> {
        self.app.store.sample().await?;
        let now = self.app.store.now().await?;
        let current = self.current().await?;
        let mut changed = Vec::new();
        let gone = self.previous.keys().filter(|key| !current.contains_key(*key));
        let gone = gone.filter(|(kind, _)| *kind == "worker");
        changed.extend(gone.map(|(kind, name)| (*kind, json!({ "worker": name, "gone": true }))));
        for (key, (compared, view)) in &current {
            if self.previous.get(key) != Some(compared) {
                changed.push((key.0, view.clone()));
            }
        }
        self.previous = current.into_iter().map(|(key, (compared, _))| (key, compared)).collect();
        if !is_first {
            self.app.changes.add(now.0, changed);
        }
        Ok(())
    }

    /// The current state by kind and name: the compared values, and the item as the API lists it.
    async fn current(&self) -> Result<BTreeMap<(&'static str, String), (Value, Value)>, ApiError> {
        let store = &self.app.store;
        let mut current = BTreeMap::new();
        for load in queues::loads(&self.app).await? {
            let (depth, settings) = (load.depth(), &load.settings);
            let ended = load.sampled.as_ref().map(|sampled| sampled.totals);
            let ended = ended.map(|all| [all.completed, all.failed, all.cancelled, all.expired]);
            let compared =
                json!([depth, ended, settings.paused, settings.limit_tokens, load.workers]);
            let name = settings.queue.to_string();
            current.insert(("queue", name), (compared, json!(queues::QueueView::from(load))));
        }
        for worker in store.workers().await? {
            let beat = &worker.heartbeat;
            let compared =
                json!([worker.is_alive(), beat.draining, beat.running, worker.drain_requested]);
            let name = beat.owner.clone();
            current.insert(("worker", name), (compared, json!(WorkerView::from(worker))));
        }
        let page = Page { after: None, limit: WATCHED, ascending: false };
        for batch in store.find_batches(&BatchFilter::default(), page).await? {
            let view = json!({
                "id": batch.id.to_string(),
                "tenant": batch.tenant,
                "status": batch.state.as_str(),
                "total": batch.total_lines(),
                "completed": batch.completed,
                "failed": batch.failed,
            });
            current.insert(("batch", batch.id.to_string()), (view.clone(), view));
        }
        for state in [JobState::Running, JobState::Failed] {
            let filter = JobFilter { state: Some(state), ..JobFilter::default() };
            let page = Page { after: None, limit: WATCHED, ascending: false };
            for job in store.jobs(&filter, page).await?.jobs {
                let compared = json!([job.state, job.attempts]);
                current.insert(("job", job.id.to_string()), (compared, json!(JobView::from(job))));
            }
        }
        Ok(current)
    }
}
