//! Page of a worker: what it reports, the jobs that it runs, and its latest errors.

use askama::Template;
use axum::extract::{Path, Query};
use tritmill_queue::{
    JobState, Timestamp,
    store::{
        Page,
        history::Subject,
        job_queries::{AttemptFailure, JobFilter, JobSummary},
    },
};

use super::{
    Content, PageError, PageResult, Visit,
    chart::Chart,
    filters,
    history::{self, Range, RangeQuery, Span},
    percent_encoded,
    workers::WorkerRow,
};
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
    range: Range,
    charts: Vec<Chart>,
}

impl WorkerView {
    /// URL of the list of the jobs that it claimed last.
    fn jobs_href(&self) -> String {
        format!("/dashboard/jobs?worker={}", percent_encoded(&self.row.worker.heartbeat.owner))
    }
}

/// Shows a worker.
pub(crate) async fn one(
    visit: Visit,
    Path(owner): Path<String>,
    Query(query): Query<RangeQuery>,
) -> PageResult {
    let range = Range::parse(&query)?;
    visit.show(move |app, _| load(app, owner.clone(), range)).await
}

async fn load(app: App, owner: String, range: Range) -> Result<Content, PageError> {
    let mut workers = app.store.workers().await?.into_iter();
    let worker = workers.find(|worker| worker.heartbeat.owner == owner);
    let worker = worker.ok_or_else(|| ApiError::not_found("worker", &owner))?;
    let running = JobFilter {
        state: Some(JobState::Running),
        owner: Some(owner.clone()),
        ..JobFilter::default()
    };
    let page = Page { after: None, limit: JOBS_MAX, ascending: false };
    let now = app.client.now().await?;
    let subject = Subject::Worker(owner.clone());
    let view = WorkerView {
        now,
        range,
        charts: history::subject_charts(&app, &subject, range, now).await?,
        row: WorkerRow { worker },
        jobs: app.store.jobs(&running, page).await?.jobs,
        failures: app.store.worker_failures(&owner, FAILURES_MAX).await?,
    };
    Ok(Content::new(owner, &view))
}
