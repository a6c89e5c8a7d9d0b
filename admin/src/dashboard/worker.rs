//! Page of a worker: what it reports, the jobs that it runs, and its latest errors.

use askama::Template;
use axum::extract::Path;
use tritmill_queue::{
    JobState, Timestamp,
    store::{
        Page,
        job_queries::{AttemptFailure, JobFilter, JobSummary},
    },
};

use super::{Content, PageError, PageResult, Visit, filters, percent_encoded, workers::WorkerRow};
use crate::{ApiError, App};

/// Most running jobs and most errors that the page shows.
const JOBS_MAX: u32 = 100;
const FAILURES_MAX: u32 = 20;

#[derive(Template)]
#[template(path = "worker.html")]
struct WorkerView {
    now: Timestamp,
    row: WorkerRow,
    jobs: Vec<JobSummary>,
    failures: Vec<AttemptFailure>,
}

impl WorkerView {
    /// URL of the list of the jobs that it claimed last.
    fn jobs_href(&self) -> String {
        format!("/dashboard/jobs?worker={}", percent_encoded(&self.row.worker.heartbeat.owner))
    }
}

/// Shows a worker.
pub(crate) async fn one(visit: Visit, Path(owner): Path<String>) -> PageResult {
    visit.show(move |app, _| load(app, owner.clone())).await
}

async fn load(app: App, owner: String) -> Result<Content, PageError> {
    let mut workers = app.store.workers().await?.into_iter();
    let worker = workers.find(|worker| worker.heartbeat.owner == owner);
    let worker = worker.ok_or_else(|| ApiError::not_found("worker", &owner))?;
    let running = JobFilter {
        state: Some(JobState::Running),
        owner: Some(owner.clone()),
        ..JobFilter::default()
    };
    let page = Page { after: None, limit: JOBS_MAX, ascending: false };
    let view = WorkerView {
        now: app.client.now().await?,
        row: WorkerRow { worker },
        jobs: app.store.jobs(&running, page).await?.jobs,
        failures: app.store.worker_failures(&owner, FAILURES_MAX).await?,
    };
    Ok(Content::new(owner, &view))
}
