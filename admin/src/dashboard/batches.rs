//! Pages of batches: the list, and one batch with its files. Operators see the batches of all tenants, and the
//! files of their own.

use std::time::Duration;

use askama::Template;
use axum::{
    extract::{Path, Query},
    http::{HeaderValue, header::CONTENT_DISPOSITION},
};
use serde::Deserialize;
use tritmill_queue::{Tenant, Timestamp, store::Page};

use super::{
    Content, PageError, PageResult, Visit, filters, notices::NoticeRow, pager::Pager,
    percent_encoded,
};
use crate::{
    ApiError, App, Caller,
    batch_conditions::BatchConditions,
    openai::batches,
    operator::{batches as all_batches, metadata},
    store::{
        Batch, BatchId, BatchState, FileId, KeyRole, batch_changes::BatchChange,
        batches::BatchFilter, notices::NoticeFilter, step_state::BatchError,
    },
};

/// Batches per page.
const PAGE_SIZE: u32 = 25;
/// Most errors of a file that a page shows.
const ERRORS_MAX: usize = 50;
/// Most notices of a batch that its page shows.
const NOTICES_MAX: u32 = 20;

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
        100.0 * lines as f64 / self.batch.total_lines().max(1) as f64
    }

    /// Percentage of finished lines, rounded down.
    fn done(&self) -> u64 {
        (self.batch.completed + self.batch.failed) * 100 / self.batch.total_lines().max(1)
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
        matches!(
            self.batch.state,
            BatchState::Validating | BatchState::InProgress | BatchState::Paused
        )
    }

    /// Whether the batch can be paused.
    fn may_pause(&self) -> bool {
        matches!(self.batch.state, BatchState::Validating | BatchState::InProgress)
    }

    /// Whether the batch can go on.
    fn may_resume(&self) -> bool {
        matches!(self.batch.state, BatchState::Paused | BatchState::Cancelled)
    }

    /// Whether the batch takes lines, until it is sealed.
    fn may_seal(&self) -> bool {
        self.batch.is_open && !self.batch.state.is_terminal()
    }

    /// Whether lines of the batch can run again.
    fn may_retry(&self) -> bool {
        let batch = &self.batch;
        let is_open_or_ended = batch.state.is_terminal() || batch.state == BatchState::InProgress;
        batch.at.in_progress.is_some() && batch.failed > batch.refused && is_open_or_ended
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
        let rest = self.batch.total_lines().checked_sub(finished).filter(|rest| *rest > 0)?;
        let took = self.took(now).filter(|_| self.batch.state == BatchState::InProgress)?;
        (finished > 0).then(|| took.mul_f64(rest as f64 / finished as f64))
    }

    /// The states that the batch reached, and when.
    fn steps(&self) -> Vec<(&'static str, Timestamp)> {
        let at = &self.batch.at;
        let steps = [
            ("Created", Some(self.batch.created_at)),
            ("Lines made", self.batch.after.as_ref().and_then(|after| after.made_at)),
            ("Lines read", self.batch.input_url.as_ref().and_then(|input| input.fetched_at)),
            ("Lines checked", at.in_progress),
            ("Sealed", at.sealed),
            ("Paused", at.paused),
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

    /// The earlier batch, of a batch after another one.
    fn earlier(&self) -> Option<BatchId> {
        self.batch.after.as_ref().map(|after| after.batch)
    }

    /// Where its lines are read, if not from a file of the API.
    fn input_url(&self) -> Option<String> {
        self.batch.input_url.as_ref().map(|input| input.shown())
    }

    /// Where its answers are written when it ends, beside its files, and why they could not be.
    fn output_url(&self) -> Option<(String, Option<&str>)> {
        let output = self.batch.output_url.as_ref()?;
        Some((output.shown(), output.error.as_deref()))
    }

    /// Whether it waits for the earlier batch to end.
    fn waits(&self) -> bool {
        let has_begun = self.batch.after.as_ref().is_some_and(|after| after.began_at.is_some());
        self.batch.awaited().is_some() && !has_begun
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
            batch.has_input().then_some(("Input", batch.input, false)),
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
    pager: Pager,
    filter: FilterForm,
    states: [BatchState; 9],
    is_operator: bool,
    may_submit: bool,
    lines_max: u64,
    bytes_max: u64,
}

/// A filter, and the page, as in URLs; an empty field matches all batches. `tenant` is for operators.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(crate) struct FilterForm {
    tenant: String,
    state: String,
    metadata: String,
    model: String,
    search: String,
    archived: String,
    after: String,
}

impl FilterForm {
    fn is_set(&self) -> bool {
        self.fields().iter().any(|(_, value)| !value.is_empty())
    }

    fn fields(&self) -> [(&'static str, &str); 6] {
        [
            ("tenant", &self.tenant),
            ("state", &self.state),
            ("metadata", &self.metadata),
            ("model", &self.model),
            ("search", &self.search),
            ("archived", &self.archived),
        ]
    }

    /// URL of the batches after a batch, or of all.
    fn href(&self, after: Option<BatchId>) -> String {
        let after = after.map(|id| id.to_string()).unwrap_or_default();
        let set = self.fields().into_iter().filter(|(_, value)| !value.is_empty());
        let query: String =
            set.map(|(name, value)| format!("&{name}={}", percent_encoded(value))).collect();
        format!("/dashboard/batches?after={after}{query}")
    }

    fn batch_filter(&self, caller: &Caller) -> Result<BatchFilter, ApiError> {
        let given = |text: &str| Some(text.trim().to_owned()).filter(|text| !text.is_empty());
        let metadata = given(&self.metadata).map(|text| metadata::pair(&text)).transpose()?;
        let conditions = BatchConditions {
            tenant: match caller.may_operate() {
                true => given(&self.tenant).map(Tenant),
                false => Some(caller.tenant.clone()),
            },
            state: ("state", Some(&self.state)),
            metadata: metadata.into_iter().collect(),
            model: Some(&self.model),
            search: Some(&self.search),
            archived: Some(&self.archived),
            ..BatchConditions::default()
        };
        conditions.filter()
    }
}

/// Shows the batches of the visitor's tenant, or for an operator of all tenants, the latest first.
pub(crate) async fn list(visit: Visit, Query(form): Query<FilterForm>) -> PageResult {
    visit.show(move |app, caller| load(app, caller, form.clone())).await
}

async fn load(app: App, caller: Caller, form: FilterForm) -> Result<Content, PageError> {
    let after = match form.after.as_str() {
        "" => None,
        text => Some(text.parse().map_err(|_| ApiError::not_found("batch", text))?),
    };
    let page = Page { after, limit: PAGE_SIZE + 1, ascending: false };
    let mut found = app.store.find_batches(&form.batch_filter(&caller)?, page).await?;
    let has_more = found.len() > PAGE_SIZE as usize;
    found.truncate(PAGE_SIZE as usize);
    let limits = app.limits;
    let first = after.map(|_| form.href(None));
    let next = found.last().filter(|_| has_more).map(|batch| form.href(Some(batch.id)));
    let view = BatchesView {
        now: app.client.now().await?,
        pager: Pager::latest_first("batches", first, next),
        batches: found.into_iter().map(|batch| BatchRow { batch }).collect(),
        filter: form,
        states: BatchState::ALL,
        is_operator: caller.may_operate(),
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
    /// Whether the batch is of the visitor's tenant, whose files it may download.
    is_own: bool,
    /// Whether the visitor may change it.
    may_change: bool,
    /// Whether the visitor may archive and delete the batch.
    may_delete: bool,
    /// The latest notices of its events.
    notices: Vec<NoticeRow>,
    /// Whether the visitor may have them delivered again.
    may_redeliver: bool,
}

impl BatchView {
    /// URL of the list of jobs with a pair of metadata.
    fn metadata_href(name: &str, value: &serde_json::Value) -> String {
        let pair = format!("{name}={}", value.as_str().unwrap_or_default());
        format!("/dashboard/jobs?metadata={}", percent_encoded(&pair))
    }
}

/// Shows a batch.
pub(crate) async fn one(visit: Visit, Path(id): Path<String>) -> PageResult {
    visit.show(move |app, caller| load_one(app, caller, id.clone())).await
}

async fn load_one(app: App, caller: Caller, id: String) -> Result<Content, PageError> {
    let batch = match caller.may_operate() {
        true => all_batches::find(&app, &id).await?,
        false => batches::find(&app, &caller, &id).await?,
    };
    let (title, is_own) = (format!("Batch {}", batch.id), batch.tenant == caller.tenant);
    let (now, row) = (app.client.now().await?, BatchRow { batch });
    let may_change = caller.may_submit();
    let may_delete = may_change && is_own && row.batch.state.is_terminal();
    let filter = NoticeFilter { tenant: None, batch: Some(row.batch.id) };
    let page = Page { after: None, limit: NOTICES_MAX, ascending: false };
    let found = app.store.notices(&filter, page).await?;
    let notices = found.into_iter().map(|notice| NoticeRow { notice }).collect();
    let may_redeliver = caller.may_operate() || is_own && caller.role.includes(KeyRole::Manage);
    let view = BatchView { now, row, is_own, may_change, may_delete, notices, may_redeliver };
    Ok(Content::new(title, &view))
}

/// Cancels a batch.
pub(crate) async fn cancel(visit: Visit, Path(id): Path<String>) -> PageResult {
    let done = "The batch is cancelled. Its answers so far are kept.";
    change(visit, &id, BatchChange::Cancel, done).await
}

/// Pauses a batch; running lines go to their end.
pub(crate) async fn pause(visit: Visit, Path(id): Path<String>) -> PageResult {
    let done = "The batch is paused. Running lines go to their end.";
    change(visit, &id, BatchChange::Pause { now: false }, done).await
}

/// Lets a paused or cancelled batch go on.
pub(crate) async fn resume(visit: Visit, Path(id): Path<String>) -> PageResult {
    change(visit, &id, BatchChange::Resume, "The batch goes on.").await
}

/// Lets no more lines be added to an open batch.
pub(crate) async fn seal(visit: Visit, Path(id): Path<String>) -> PageResult {
    let done = "The batch is sealed. It ends when its lines have.";
    change(visit, &id, BatchChange::Seal, done).await
}

/// Runs all lines without an answer again.
pub(crate) async fn retry(visit: Visit, Path(id): Path<String>) -> PageResult {
    change(visit, &id, BatchChange::retry_all(), "The lines without an answer run again.").await
}

async fn change(visit: Visit, id: &str, change: BatchChange, done: &str) -> PageResult {
    let batch = match visit.caller.may_operate() {
        true => all_batches::change_batch(&visit.app, &visit.caller, id, change).await?,
        false => batches::change_own(&visit.app, &visit.caller, id, change).await?,
    };
    Ok(visit.done(&format!("/dashboard/batches/{}", batch.id), done))
}

/// Archives a batch of the visitor's tenant.
pub(crate) async fn archive(visit: Visit, Path(id): Path<String>) -> PageResult {
    let batch = batches::archive_batch(&visit.app, &visit.caller, &id, true).await?;
    let page = format!("/dashboard/batches/{}", batch.id);
    Ok(visit.done(&page, "The batch is archived: the list leaves it out."))
}

/// Takes a batch of the visitor's tenant back from the archive.
pub(crate) async fn unarchive(visit: Visit, Path(id): Path<String>) -> PageResult {
    let batch = batches::archive_batch(&visit.app, &visit.caller, &id, false).await?;
    let page = format!("/dashboard/batches/{}", batch.id);
    Ok(visit.done(&page, "The batch is listed again."))
}

/// Deletes a batch of the visitor's tenant.
pub(crate) async fn delete(visit: Visit, Path(id): Path<String>) -> PageResult {
    batches::delete_batch(&visit.app, &visit.caller, &id).await?;
    Ok(visit.done("/dashboard/batches", "The batch is deleted, with its files."))
}

/// Downloads the results of a batch of the visitor's tenant so far.
pub(crate) async fn results(visit: Visit, Path(id): Path<String>) -> PageResult {
    let batch = batches::find(&visit.app, &visit.caller, &id).await?;
    let name = format!("{}_results.jsonl", batch.id);
    let mut response = batches::results::so_far(&visit.app, batch)?;
    let disposition = format!("attachment; filename=\"{name}\"");
    let disposition = HeaderValue::try_from(disposition).expect("ids are visible ASCII");
    response.headers_mut().insert(CONTENT_DISPOSITION, disposition);
    Ok(response)
}
