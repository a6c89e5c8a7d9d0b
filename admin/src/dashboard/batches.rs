//! Pages of batches: the list, and one batch with its files.

use std::time::Duration;

use askama::Template;
use axum::{
    extract::{Path, Query},
    http::{HeaderValue, header::CONTENT_DISPOSITION},
};
use tritmill_queue::{
    Timestamp,
    store::{Batch, BatchId, BatchState, FileId, Page, batches::BatchError, files::StoredFile},
};

use super::{Content, PageError, PageResult, Visit, audit::PageQuery, filters, percent_encoded};
use crate::{
    ApiError, App, Caller,
    openai::{batches, files},
};

/// Batches per page.
const PAGE_SIZE: u32 = 25;
/// Most errors of a file that a page shows.
const ERRORS_MAX: usize = 50;

/// A batch on a page.
struct BatchRow {
    batch: Batch,
}

impl BatchRow {
    /// Percentage of lines that are answered.
    fn answered(&self) -> f64 {
        self.percent(self.batch.completed)
    }

    /// Percentage of lines that failed.
    fn failed(&self) -> f64 {
        self.percent(self.batch.failed)
    }

    fn percent(&self, lines: u64) -> f64 {
        100.0 * lines as f64 / self.batch.lines.max(1) as f64
    }

    /// Percentage of finished lines, rounded down.
    fn done(&self) -> u64 {
        (self.batch.completed + self.batch.failed) * 100 / self.batch.lines.max(1)
    }

    fn state(&self) -> &'static str {
        self.batch.state.as_str()
    }

    /// The state as words.
    fn words(&self) -> String {
        self.state().replace('_', " ")
    }

    /// Whether the batch can be cancelled.
    fn may_cancel(&self) -> bool {
        matches!(self.batch.state, BatchState::Validating | BatchState::InProgress)
    }

    fn started(&self) -> Option<Timestamp> {
        self.batch.at.in_progress
    }

    /// Time when the batch finished.
    fn finished(&self) -> Option<Timestamp> {
        let at = &self.batch.at;
        at.completed.or(at.failed).or(at.expired).or(at.cancelled)
    }

    /// Time since the first line was submitted, until the end of the batch.
    fn took(&self, now: &Timestamp) -> Option<Duration> {
        self.started().map(|started| self.finished().unwrap_or(*now).since(started))
    }

    /// Estimated time for the remaining lines of a running batch.
    fn left(&self, now: &Timestamp) -> Option<Duration> {
        let finished = self.batch.completed + self.batch.failed;
        let rest = self.batch.lines.checked_sub(finished).filter(|rest| *rest > 0)?;
        let took = self.took(now).filter(|_| self.batch.state == BatchState::InProgress)?;
        (finished > 0).then(|| took.mul_f64(rest as f64 / finished as f64))
    }

    /// The states that the batch reached, and when.
    fn steps(&self) -> Vec<(&'static str, Timestamp)> {
        let at = &self.batch.at;
        let steps = [
            ("Created", Some(self.batch.created_at)),
            ("Lines checked", at.in_progress),
            ("Cancel requested", at.cancelling),
            ("Writing output", at.finalizing),
            ("Completed", at.completed),
            ("Rejected", at.failed),
            ("Expired", at.expired),
            ("Cancelled", at.cancelled),
        ];
        let mut steps: Vec<_> =
            steps.into_iter().filter_map(|(name, at)| at.map(|at| (name, at))).collect();
        steps.sort_by_key(|(_, at)| *at);
        steps
    }

    /// Files to download: name, id, and whether it is the main output.
    fn files(&self) -> Vec<(&'static str, FileId, bool)> {
        let (batch, is_finished) = (&self.batch, self.batch.state.is_terminal());
        let output = |name, file: Option<FileId>, is_main| {
            file.filter(|_| is_finished).map(|file| (name, file, is_main))
        };
        let files = [
            output("Answers", batch.output, true),
            output("Errors", batch.error_file, false),
            Some(("Input", batch.input, false)),
        ];
        files.into_iter().flatten().collect()
    }

    fn errors(&self) -> &[BatchError] {
        &self.batch.errors[..self.batch.errors.len().min(ERRORS_MAX)]
    }
}

#[derive(Template)]
#[template(path = "batches.html")]
struct BatchesView {
    now: Timestamp,
    batches: Vec<BatchRow>,
    /// Last batch of the page, if there are more.
    next: Option<BatchId>,
    is_first: bool,
    may_submit: bool,
    lines_max: u64,
    bytes_max: u64,
}

/// Shows the batches of the visitor's tenant, the latest first.
pub(crate) async fn list(visit: Visit, Query(PageQuery { after }): Query<PageQuery>) -> PageResult {
    let after = match after.map(|after| after.parse::<BatchId>()) {
        None => None,
        Some(Ok(after)) => Some(after),
        Some(Err(error)) => return Err(ApiError::not_found("batch", &error.word).into()),
    };
    visit.show(move |app, caller| load(app, caller, after)).await
}

async fn load(app: App, caller: Caller, after: Option<BatchId>) -> Result<Content, PageError> {
    let page = Page { after, limit: PAGE_SIZE + 1, ascending: false };
    let mut found = app.store.batches(&caller.tenant, page).await?;
    let has_more = found.len() > PAGE_SIZE as usize;
    found.truncate(PAGE_SIZE as usize);
    let limits = app.limits;
    let view = BatchesView {
        now: app.client.now().await?,
        next: found.last().map(|batch| batch.id).filter(|_| has_more),
        batches: found.into_iter().map(|batch| BatchRow { batch }).collect(),
        is_first: after.is_none(),
        may_submit: caller.may_submit(),
        lines_max: limits.batch_lines_max,
        bytes_max: limits.file_bytes_max,
    };
    Ok(Content::new("Batches", &view))
}

#[derive(Template)]
#[template(path = "batch.html")]
struct BatchView {
    now: Timestamp,
    row: BatchRow,
    may_submit: bool,
}

/// Shows a batch.
pub(crate) async fn one(visit: Visit, Path(id): Path<String>) -> PageResult {
    visit.show(move |app, caller| load_one(app, caller, id.clone())).await
}

async fn load_one(app: App, caller: Caller, id: String) -> Result<Content, PageError> {
    let batch = batches::find(&app, &caller, &id).await?;
    let title = format!("Batch {}", batch.id);
    let (now, may_submit) = (app.client.now().await?, caller.may_submit());
    Ok(Content::new(title, &BatchView { now, row: BatchRow { batch }, may_submit }))
}

/// Cancels a batch.
pub(crate) async fn cancel(visit: Visit, Path(id): Path<String>) -> PageResult {
    let batch = batches::cancel_batch(&visit.app, &visit.caller, &id).await?;
    let page = format!("/dashboard/batches/{}", batch.id);
    Ok(visit.done(&page, "The batch is cancelled. Its answers so far are kept."))
}

/// Downloads a file.
pub(crate) async fn download(visit: Visit, Path(id): Path<String>) -> PageResult {
    let file = files::find(&visit.app, &visit.caller.tenant, &id).await?;
    let mut response = files::download(&visit.app, &file);
    response.headers_mut().insert(CONTENT_DISPOSITION, disposition(&file));
    Ok(response)
}

/// Tells the browser to save the file under its name.
fn disposition(file: &StoredFile) -> HeaderValue {
    let name = percent_encoded(&file.filename);
    HeaderValue::try_from(format!("attachment; filename*=UTF-8''{name}"))
        .expect("a percent-encoded name is visible ASCII")
}
