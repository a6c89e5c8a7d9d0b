//! [`Watch`]: what changes, as events for operators.
//!
//! One task a process looks every two seconds: it samples the queues, if nobody did so a moment ago,
//! and compares queues, workers, batches and jobs with how they were. What it finds goes into a ring
//! that subscribers read from where they are; whoever comes back within its length misses nothing.
//! Events are named by the store's time of the look, so that a subscriber may come back to another
//! admin. They are hints about what to read again, no record.

use std::{
    collections::{BTreeMap, VecDeque},
    fmt,
    str::FromStr,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

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
    app::App,
    error::ApiError,
    operator::{jobs::JobView, queues, workers::WorkerView},
};

/// Between two looks.
const LOOK: Duration = Duration::from_secs(2);
/// Changes that are kept.
const KEPT: usize = 4096;
/// Batches, and jobs of a state, that are watched: the latest.
const WATCHED: u32 = 50;

/// Names a change. Those of one look count up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub(crate) struct ChangeId {
    ms: i64,
    number: u32,
}

impl fmt::Display for ChangeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.ms, self.number)
    }
}

impl FromStr for ChangeId {
    type Err = std::num::ParseIntError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (ms, number) = text.split_once('-').unwrap_or((text, "0"));
        Ok(Self { ms: ms.parse()?, number: number.parse()? })
    }
}

/// Something that changed.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Change {
    pub id: ChangeId,
    /// `queue`, `worker`, `batch` or `job`.
    pub kind: &'static str,
    /// As lists of the API have it.
    pub data: Value,
}

/// The latest changes.
pub(crate) struct Changes {
    ring: Mutex<VecDeque<Arc<Change>>>,
    /// The name of the last one.
    last: watch::Sender<ChangeId>,
}

impl Default for Changes {
    fn default() -> Self {
        Self { ring: Mutex::default(), last: watch::Sender::new(ChangeId::default()) }
    }
}

impl Changes {
    /// Told of every change.
    pub fn subscribe(&self) -> watch::Receiver<ChangeId> {
        self.last.subscribe()
    }

    /// Those after one; and whether some between may have been forgotten.
    pub fn after(&self, id: ChangeId) -> (Vec<Arc<Change>>, bool) {
        let ring = self.ring.lock().unwrap_or_else(PoisonError::into_inner);
        let missed = ring.front().is_none_or(|first| first.id > id) && id < *self.last.borrow();
        (ring.iter().filter(|change| change.id > id).cloned().collect(), missed)
    }

    fn add(&self, ms: i64, changed: Vec<(&'static str, Value)>) {
        let mut ring = self.ring.lock().unwrap_or_else(PoisonError::into_inner);
        for ((kind, data), number) in changed.into_iter().zip(1..) {
            ring.push_back(Arc::new(Change { id: ChangeId { ms, number }, kind, data }));
        }
        let excess = ring.len().saturating_sub(KEPT);
        ring.drain(..excess);
        if let Some(last) = ring.back() {
            self.last.send_replace(last.id);
        }
    }
}

/// Watches a service.
pub struct Watch {
    app: App,
    /// How things were: by kind and name, what counts as a change, and what is told of it.
    seen: BTreeMap<(&'static str, String), Value>,
}

impl Watch {
    /// A watch over a service; nothing of what is there already is a change.
    pub fn new(app: App) -> Self {
        Self { app, seen: BTreeMap::new() }
    }

    /// Looks until `stop` says so, or nobody can say so any more.
    pub async fn run(mut self, mut stop: watch::Receiver<bool>) {
        let mut ticks = interval(LOOK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut is_first = true;
        loop {
            tokio::select! {
                _ = stop.wait_for(|stop| *stop) => return,
                _ = ticks.tick() => {}
            }
            match self.look(is_first).await {
                Ok(()) => is_first = false,
                Err(error) => tracing::warn!(%error, "queues not looked at, trying again"),
            }
        }
    }

    async fn look(&mut self, is_first: bool) -> Result<(), ApiError> {
        let store = self.app.store().clone();
        store.sample().await?;
        let now = store.now().await?;
        let mut there: BTreeMap<(&'static str, String), (Value, Value)> = BTreeMap::new();
        for load in queues::loads(&self.app).await? {
            let (depth, settings) = (load.depth(), &load.settings);
            let ended = load.sampled.as_ref().map(|sampled| sampled.totals);
            let ended = ended.map(|all| [all.completed, all.failed, all.cancelled, all.expired]);
            let mark = json!([depth, ended, settings.paused, settings.limit_tokens, load.workers]);
            let name = settings.queue.to_string();
            there.insert(("queue", name), (mark, json!(queues::QueueView::from(load))));
        }
        for worker in store.workers().await? {
            let beat = &worker.heartbeat;
            let mark =
                json!([worker.is_alive(), beat.draining, beat.running, worker.drain_requested]);
            let name = beat.owner.clone();
            there.insert(("worker", name), (mark, json!(WorkerView::from(worker))));
        }
        for batch in store.latest_batches(WATCHED).await? {
            let shown = json!({
                "id": batch.id.to_string(),
                "tenant": batch.tenant,
                "status": batch.state.as_str(),
                "total": batch.lines,
                "completed": batch.completed,
                "failed": batch.failed,
            });
            there.insert(("batch", batch.id.to_string()), (shown.clone(), shown));
        }
        for state in [JobState::Running, JobState::Failed] {
            let filter = JobFilter { state: Some(state), ..JobFilter::default() };
            let page = Page { after: None, limit: WATCHED, ascending: false };
            for job in store.jobs(&filter, page).await?.jobs {
                let mark = json!([job.state, job.attempts]);
                there.insert(("job", job.id.to_string()), (mark, json!(JobView::from(job))));
            }
        }
        let mut changed = Vec::new();
        let gone = self.seen.keys().filter(|key| !there.contains_key(*key) && key.0 == "worker");
        changed.extend(gone.map(|(kind, name)| (*kind, json!({ "worker": name, "gone": true }))));
        for (key, (mark, shown)) in &there {
            if self.seen.get(key) != Some(mark) {
                changed.push((key.0, shown.clone()));
            }
        }
        self.seen = there.into_iter().map(|(key, (mark, _))| (key, mark)).collect();
        if !is_first {
            self.app.changes().add(now.0, changed);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_subscriber_reads_on_from_where_it_was_and_hears_when_it_missed_some() {
        let changes = Changes::default();
        let start = ChangeId::default();
        assert_eq!(changes.after(start), (Vec::new(), false));
        changes.add(1000, vec![("queue", json!(1)), ("job", json!(2))]);
        let told = *changes.subscribe().borrow();
        assert_eq!(told.to_string().parse::<ChangeId>().expect("its own text"), told);
        let first: ChangeId = "1000-1".parse().expect("an id");
        let (rest, missed) = changes.after(first);
        assert_eq!((rest.len(), rest[0].kind, missed), (1, "job", false));
        for ms in 0..KEPT as i64 {
            changes.add(2000 + ms, vec![("queue", json!(ms))]);
        }
        let (rest, missed) = changes.after(first);
        assert_eq!((rest.len(), missed), (KEPT, true));
        assert_eq!(changes.after(*changes.subscribe().borrow()), (Vec::new(), false));
        assert!("soon".parse::<ChangeId>().is_err());
    }
}
