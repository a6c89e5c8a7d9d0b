//! What was put right, or kept from going wrong: counters that tell whether promises were at stake.

use askama::Template;
use axum::response::Response;
use tritmill_queue::store::workers::Integrity;

use super::{
    filters,
    page::{PageError, View, Visit},
    workers::Shown,
};
use crate::app::App;

/// Names and meanings, in the order of [`Integrity::named`].
const MEANINGS: [(&str, &str); 6] = [
    (
        "Leases reclaimed",
        "Jobs whose worker fell silent: queued again, or failed when their attempts were used up.",
    ),
    (
        "Leases lost",
        "Jobs that a worker stopped because somebody else had them, or they were cancelled.",
    ),
    (
        "Results fenced",
        "Results discarded because the claim they came from was gone. Nothing was written twice.",
    ),
    (
        "Duplicates suppressed",
        "Deliveries of jobs that were over, withdrawn or somebody else's. None was run.",
    ),
    (
        "Queues the dispatcher lost",
        "Times that Redis came back without a queue (NOGROUP), and it was made again.",
    ),
    (
        "Jobs fed again",
        "Queued jobs that the dispatcher did not know: the difference between store and dispatcher, mended.",
    ),
];

#[derive(Template)]
#[template(path = "integrity.html")]
struct Counters {
    all: Integrity,
    workers: Vec<Shown>,
}

impl Counters {
    /// What each counter is called, means and counts.
    fn counters(&self) -> Vec<(&'static str, &'static str, u64)> {
        let counts = self.all.named().into_iter().map(|(_, count)| count);
        MEANINGS.into_iter().zip(counts).map(|((name, what), count)| (name, what, count)).collect()
    }
}

impl View for Counters {
    fn title(&self) -> String {
        "Integrity".to_owned()
    }
}

/// All counters.
pub(crate) async fn show(visit: Visit) -> Result<Response, PageError> {
    visit.show(|app, _| look(app)).await
}

async fn look(app: App) -> Result<Counters, PageError> {
    let workers = app.store().workers().await?;
    let all = app.store().integrity().await?;
    let workers = workers.into_iter().map(|worker| Shown { worker }).collect();
    Ok(Counters { all, workers })
}
