//! Batches: the caller's, and one with its files.

use std::time::Duration;

use askama::Template;
use axum::{
    extract::{Path, Query, State},
    http::{HeaderValue, header::CONTENT_DISPOSITION},
    response::Response,
};
use serde::Deserialize;
use tritmill_queue::{
    Timestamp,
    store::{Batch, BatchId, BatchState, FileId, KeyRole, Page, files::StoredFile},
};

use super::{
    filters,
    page::{PageError, View, Visit},
    session::percent_encoded,
};
use crate::{
    access::Caller,
    app::App,
    error::ApiError,
    openai::{batches, files},
};

/// Batches of a page.
const PAGE: u32 = 25;
/// Problems of a file that a page shows.
const PROBLEMS_MAX: usize = 50;

/// A batch as a page shows it.
struct Shown {
    batch: Batch,
}

impl Shown {
    /// Percent of the lines that are answered, to be drawn.
    fn answered(&self) -> f64 {
        self.percent(self.batch.completed)
    }

    /// Percent of the lines that failed.
    fn failed(&self) -> f64 {
        self.percent(self.batch.failed)
    }

    fn percent(&self, lines: u64) -> f64 {
        100.0 * lines as f64 / self.batch.lines.max(1) as f64
    }

    /// Whole percent of the lines that are over; all of them only when all are.
    fn done(&self) -> u64 {
        (self.batch.completed + self.batch.failed) * 100 / self.batch.lines.max(1)
    }

    fn state(&self) -> &'static str {
        self.batch.state.as_str()
    }

    /// The state in words.
    fn words(&self) -> String {
        self.state().replace('_', " ")
    }

    /// Whether it can be withdrawn.
    fn is_open(&self) -> bool {
        matches!(self.batch.state, BatchState::Validating | BatchState::InProgress)
    }

    fn started(&self) -> Option<Timestamp> {
        self.batch.at.in_progress
    }

    /// When it was over.
    fn ended(&self) -> Option<Timestamp> {
        let at = &self.batch.at;
        at.completed.or(at.failed).or(at.expired).or(at.cancelled)
    }

    /// How long its lines were answered, until now or its end.
    fn took(&self, now: &Timestamp) -> Option<Duration> {
        self.started().map(|started| self.ended().unwrap_or(*now).since(started))
    }

    /// How long the rest takes at the rate so far, while it runs.
    fn left(&self, now: &Timestamp) -> Option<Duration> {
        let over = self.batch.completed + self.batch.failed;
        let rest = self.batch.lines.checked_sub(over).filter(|rest| *rest > 0)?;
        let took = self.took(now).filter(|_| self.batch.state == BatchState::InProgress)?;
        (over > 0).then(|| took.mul_f64(rest as f64 / over as f64))
    }

    /// The steps of its life that it came to, and when.
    fn steps(&self) -> Vec<(&'static str, Timestamp)> {
        let at = &self.batch.at;
        let steps = [
            ("Created", Some(self.batch.created_at)),
            ("Lines checked", at.in_progress),
            ("Cancelled by its owner", at.cancelling),
            ("Writing the output", at.finalizing),
            ("Completed", at.completed),
            ("Refused", at.failed),
            ("Time was up", at.expired),
            ("Cancelled", at.cancelled),
        ];
        let mut steps: Vec<_> =
            steps.into_iter().filter_map(|(name, at)| at.map(|at| (name, at))).collect();
        steps.sort_by_key(|(_, at)| *at);
        steps
    }

    /// What there is to fetch: a name for it, the file, whether it is what was asked for.
    fn files(&self) -> Vec<(&'static str, FileId, bool)> {
        let (batch, over) = (&self.batch, self.batch.state.is_terminal());
        let made =
            |name, file: Option<FileId>, main| file.filter(|_| over).map(|file| (name, file, main));
        let files = [
            made("Answers", batch.output, true),
            made("Errors", batch.error_file, false),
            Some(("Input", batch.input, false)),
        ];
        files.into_iter().flatten().collect()
    }

    fn problems(&self) -> &[tritmill_queue::store::batches::BatchError] {
        &self.batch.errors[..self.batch.errors.len().min(PROBLEMS_MAX)]
    }
}

#[derive(Template)]
#[template(path = "batches.html")]
struct List {
    now: Timestamp,
    batches: Vec<Shown>,
    /// The last of the page, if there are more.
    more: Option<BatchId>,
    is_first: bool,
    may_submit: bool,
    lines_max: u64,
    bytes_max: u64,
}

impl View for List {
    fn title(&self) -> String {
        "Batches".to_owned()
    }
}

/// Which page of the list.
#[derive(Deserialize)]
pub(crate) struct After {
    after: Option<String>,
}

/// The caller's batches, the latest first.
pub(crate) async fn list(
    visit: Visit,
    Query(After { after }): Query<After>,
) -> Result<Response, PageError> {
    let after = match after.map(|after| after.parse::<BatchId>()) {
        None => None,
        Some(Ok(after)) => Some(after),
        Some(Err(error)) => return Err(ApiError::not_found("batch", &error.word).into()),
    };
    visit.show(move |app, caller| look(app, caller, after)).await
}

async fn look(app: App, caller: Caller, after: Option<BatchId>) -> Result<List, PageError> {
    let page = Page { after, limit: PAGE + 1, ascending: false };
    let mut found = app.store().batches(&caller.tenant, page).await?;
    let has_more = found.len() > PAGE as usize;
    found.truncate(PAGE as usize);
    let limits = app.limits();
    Ok(List {
        now: app.client().now().await?,
        more: found.last().map(|batch| batch.id).filter(|_| has_more),
        batches: found.into_iter().map(|batch| Shown { batch }).collect(),
        is_first: after.is_none(),
        may_submit: caller.role >= KeyRole::Submit,
        lines_max: limits.batch_lines_max,
        bytes_max: limits.file_bytes_max,
    })
}

#[derive(Template)]
#[template(path = "batch.html")]
struct One {
    now: Timestamp,
    shown: Shown,
    may_submit: bool,
}

impl View for One {
    fn title(&self) -> String {
        format!("Batch {}", self.shown.batch.id)
    }
}

/// A batch.
pub(crate) async fn one(visit: Visit, Path(id): Path<String>) -> Result<Response, PageError> {
    visit
        .show(move |app, caller| {
            let id = id.clone();
            async move {
                let batch = batches::find(&app, &caller, &id).await?;
                let now = app.client().now().await?;
                let may_submit = caller.role >= KeyRole::Submit;
                Ok(One { now, shown: Shown { batch }, may_submit })
            }
        })
        .await
}

/// Withdraws a batch.
pub(crate) async fn cancel(visit: Visit, Path(id): Path<String>) -> Result<Response, PageError> {
    let batch = batches::withdraw(&visit.app, &visit.caller, &id).await?;
    let there = format!("/dashboard/batches/{}", batch.id);
    Ok(visit.done(&there, "The batch is cancelled. What was answered is kept."))
}

/// A file, to be kept.
pub(crate) async fn download(
    visit: Visit,
    State(app): State<App>,
    Path(id): Path<String>,
) -> Result<Response, PageError> {
    let file = files::find(&app, &visit.caller.tenant, &id).await?;
    let mut response = files::whole(&app, &file);
    response.headers_mut().insert(CONTENT_DISPOSITION, disposition(&file));
    Ok(response)
}

/// Tells a browser to keep it under its name.
fn disposition(file: &StoredFile) -> HeaderValue {
    let name = percent_encoded(&file.filename);
    HeaderValue::try_from(format!("attachment; filename*=UTF-8''{name}"))
        .expect("a percent-encoded name is visible ASCII")
}
