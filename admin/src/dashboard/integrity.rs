//! Page of integrity counters: faults that workers detected and corrected.

use askama::Template;
use tritmill_queue::store::workers::Integrity;

use super::{Content, PageError, PageResult, Visit, filters, workers::WorkerRow};
use crate::App;

/// Names and meanings, in the order of [`Integrity::named`].
const MEANINGS: [(&str, &str); 6] = [
    (
        "Leases reclaimed",
        "Jobs of workers that stopped responding. They were queued again, or failed if no attempts were left.",
    ),
    (
        "Leases lost",
        "Jobs that a worker stopped because they were cancelled or claimed by another worker.",
    ),
    (
        "Results fenced",
        "Results that were discarded because their claim was no longer valid. Nothing was written twice.",
    ),
    (
        "Duplicates suppressed",
        "Deliveries of jobs that were already finished, cancelled or claimed. None was run.",
    ),
    (
        "Queues lost by Redis",
        "Times that Redis came back without a queue (NOGROUP), which was then created again.",
    ),
    ("Jobs announced again", "Queued jobs that Redis had lost. They were announced to it again."),
];

#[derive(Template)]
#[template(path = "integrity.html")]
struct IntegrityView {
    all: Integrity,
    workers: Vec<WorkerRow>,
}

impl IntegrityView {
    /// Name, meaning and count of each counter.
    fn counters(&self) -> Vec<(&'static str, &'static str, u64)> {
        let counts = self.all.named().into_iter().map(|(_, count)| count);
        let named = MEANINGS.into_iter().zip(counts);
        named.map(|((name, meaning), count)| (name, meaning, count)).collect()
    }
}

/// Shows all counters.
pub(crate) async fn show(visit: Visit) -> PageResult {
    visit.show(|app, _| load(app)).await
}

async fn load(app: App) -> Result<Content, PageError> {
    let workers = app.store.workers().await?;
    let all = app.store.integrity().await?;
    let workers = workers.into_iter().map(|worker| WorkerRow { worker }).collect();
    Ok(Content::new("Integrity", &IntegrityView { all, workers }))
}
