//! The steps of a batch after another one, before it has lines: wait for the earlier batch, then make a line of each of its lines.
//!
//! A line with an answer becomes the line that the template makes; one without an answer becomes a line with an error. A step writes
//! the chunks of its lines in the transaction that saves its position in the earlier file, so what an interrupted step wrote does not
//! exist. What follows reads the file as that of any other batch.
//!
//! Lines are made of an ended batch. Where that is opened again meanwhile, the step's work is dropped, and the rest is made when it
//! has ended again.

use std::{collections::HashMap, time::Duration};

use tritmill_queue::{Outcome, StoreError, store::EndedJob};

use super::{
    Budget, Interrupted, Next,
    appended::{Appended, NewFile},
    fail,
    lines::{self, Line, Wanted},
    save,
};
use crate::{
    App,
    line_template::{LineError, LineMaker, Previous},
    shown_errors::outcome_for_tenant,
    store::{
        Batch, BatchState,
        after::After,
        batch_steps::{BatchClaim, BatchWrites},
        files::FilePurpose,
        step_state::{BatchError, MakingState},
    },
    tenant_limits,
};

/// Pause between two looks at a batch that has not ended. Its end makes the next step due at once.
const WAIT: Duration = Duration::from_secs(60);
/// Lines of which the answers are read at once, at first and at most. Between them the number depends on the size of the answers,
/// which should fit `SLICE_BYTES`.
const SLICE_FIRST: usize = 16;
const SLICE_MAX: usize = 1000;
const SLICE_BYTES: usize = 1 << 20;

/// Makes the next lines. After the last one the lines are checked.
pub(super) async fn step(
    app: &App,
    claim: &mut BatchClaim,
    budget: Budget,
) -> Result<Next, Interrupted> {
    let Some(after) = claim.batch.after.as_deref().cloned() else { return Ok(Next::Now) };
    let found = app.store.batch(&claim.batch.tenant, after.batch).await?;
    let earlier = match found {
        Some(earlier) if !earlier.state.is_terminal() => return Ok(Next::After(WAIT)),
        Some(earlier) => earlier,
        None => return refuse(app, claim, Problem::NotFound).await,
    };
    if let Some(problem) = problem(app, &earlier).await? {
        return refuse(app, claim, problem).await;
    }
    let Ok(maker) = after.lines.compile("after.lines.") else {
        return refuse(app, claim, Problem::Template).await;
    };
    if after.began_at.is_none() {
        let now = app.store.now().await?;
        claim.batch.expires_at = now.after(claim.batch.window());
        let began = After { began_at: Some(now), ..after };
        claim.batch.after = Some(Box::new(began));
    }
    let mut work = Work::open(app, &claim.batch, &earlier, &maker).await?;
    let made = work.make(budget).await?;
    if !is_unchanged(app, &earlier).await? {
        return Ok(Next::Now);
    }
    let Work { state, appended, .. } = work;
    let mut placed = Vec::new();
    appended.place(&app.files, state.file, &mut placed).await?;
    let chunks: Vec<_> = placed.iter().map(|placed| placed.chunk()).collect();
    let writes = BatchWrites { chunks: &chunks, ..BatchWrites::default() };
    claim.batch.steps.making = Some(state);
    match made {
        Made::Some => save(app, claim, writes).await?,
        Made::TooLarge(why) => return refuse(app, claim, Problem::TooLarge(why)).await,
        Made::All if state.lines != earlier.total_lines() => {
            return refuse(app, claim, Problem::FileDeleted).await;
        }
        Made::All => {
            let Some(part) = state.file else { return refuse(app, claim, Problem::Empty).await };
            let now = app.store.now().await?;
            claim.batch.input = part.file;
            claim.batch.steps.making = None;
            if let Some(after) = &mut claim.batch.after {
                after.made_at = Some(now);
            }
            let files = [(part.file, part.size_bytes, None)];
            save(app, claim, BatchWrites { files: &files, ..writes }).await?;
            tracing::info!(batch = %claim.batch.id, lines = state.lines, "lines made of an earlier batch");
        }
    }
    Ok(Next::Now)
}

/// Why no lines can be made.
enum Problem {
    NotFound,
    /// The earlier batch was rejected, stopped, or cancelled before its lines were checked.
    NoAnswers(BatchState),
    FileDeleted,
    AnswersDeleted,
    Empty,
    /// A limit, in words.
    TooLarge(String),
    Template,
}

/// Returns why no lines can be made of an ended batch.
async fn problem(app: &App, earlier: &Batch) -> Result<Option<Problem>, StoreError> {
    if earlier.state == BatchState::Failed || earlier.at.in_progress.is_none() {
        return Ok(Some(Problem::NoAnswers(earlier.state)));
    }
    if app.store.chunk_objects(earlier.input).await?.is_none() {
        return Ok(Some(Problem::FileDeleted));
    }
    // The jobs of a batch have the same age, so they are deleted together.
    let has_answers = earlier.completed == 0 || app.store.has_ended(earlier.id.all_jobs()).await?;
    Ok((!has_answers).then_some(Problem::AnswersDeleted))
}

/// Whether the earlier batch is as it was, so that no answer was deleted since, to run its line again.
async fn is_unchanged(app: &App, earlier: &Batch) -> Result<bool, StoreError> {
    let now = app.store.batch(&earlier.tenant, earlier.id).await?;
    Ok(now.is_some_and(|now| now.state.is_terminal() && now.reopened == earlier.reopened))
}

/// Fails a batch that cannot have lines.
async fn refuse(app: &App, claim: &mut BatchClaim, why: Problem) -> Result<Next, Interrupted> {
    let earlier = claim.batch.after.as_ref().map(|after| after.batch.to_string());
    let earlier = earlier.unwrap_or_default();
    let (code, message) = match why {
        Problem::NotFound => {
            ("previous_batch_not_found", format!("the earlier batch {earlier} no longer exists"))
        }
        Problem::NoAnswers(BatchState::Failed) => {
            ("previous_batch_failed", format!("the earlier batch {earlier} failed"))
        }
        Problem::NoAnswers(state) => {
            let state = state.as_str();
            let message =
                format!("the earlier batch {earlier} was {state} before its lines were checked");
            ("previous_batch_failed", message)
        }
        Problem::FileDeleted => {
            let message = format!("the input file of the earlier batch {earlier} no longer exists");
            ("previous_file_not_found", message)
        }
        Problem::AnswersDeleted => {
            let message =
                format!("answers of the earlier batch {earlier} are no longer in the store");
            ("previous_answers_deleted", message)
        }
        Problem::Empty => {
            ("previous_batch_empty", format!("the earlier batch {earlier} has no lines"))
        }
        Problem::TooLarge(why) => {
            ("file_too_large", format!("the lines that the template makes are too many: {why}"))
        }
        Problem::Template => {
            ("invalid_template", "the template of the lines cannot be read".to_owned())
        }
    };
    let param = Some("after".to_owned());
    let error = BatchError { code: code.to_owned(), line: None, message, param };
    let part = claim.batch.steps.making.take().and_then(|state| state.file);
    fail::reject(app, claim, error, part).await
}

/// How far lines were made.
enum Made {
    /// The budget is spent.
    Some,
    All,
    /// The file would exceed a limit, in words.
    TooLarge(String),
}

/// The lines of a step.
struct Work<'a> {
    app: &'a App,
    batch: &'a Batch,
    earlier: &'a Batch,
    maker: &'a LineMaker,
    state: MakingState,
    appended: Appended,
}

impl<'a> Work<'a> {
    /// Continues the lines of a batch, or begins them. If their file was swept, because no step was done for a long time, they
    /// begin again.
    async fn open(
        app: &'a App,
        batch: &'a Batch,
        earlier: &'a Batch,
        maker: &'a LineMaker,
    ) -> Result<Self, StoreError> {
        let state = batch.steps.making.unwrap_or_default();
        let (state, appended) = match Appended::open(&app.files, state.file).await? {
            Some(appended) => (state, appended),
            None => {
                tracing::warn!(batch = %batch.id, "unfinished lines were swept, making them again");
                Default::default()
            }
        };
        Ok(Self { app, batch, earlier, maker, state, appended })
    }

    /// Makes lines until the budget is spent.
    async fn make(&mut self, mut budget: Budget) -> Result<Made, Interrupted> {
        let room = match tenant_limits::file_room(self.app, &self.batch.tenant).await {
            Ok(room) => room,
            Err(error) if error.status().is_server_error() => {
                return Err(StoreError::Unavailable(Box::new(error)).into());
            }
            Err(error) => return Ok(Made::TooLarge(error.message().to_owned())),
        };
        let wanted = if self.maker.reads_body() { Wanted::Bodies } else { Wanted::Requests };
        let from = self.state.read;
        let mut pages = lines::read_with(&self.app.files, self.earlier, from, wanted);
        let mut slice = SLICE_FIRST;
        while let Some(page) = pages.recv().await {
            let mut page = page?;
            while !page.is_empty() {
                let next: lines::Lines = page.drain(..slice.min(page.len())).collect();
                let mut answers = self.answers(&next).await?;
                let bytes: usize = answers.values().map(|answer| answer.text().len()).sum();
                slice = match bytes {
                    large if large > SLICE_BYTES => (slice / 2).max(1),
                    small if small < SLICE_BYTES / 4 => (slice * 2).min(SLICE_MAX),
                    _ => slice,
                };
                for line in &next {
                    let answer = answers.remove(&line.after.line);
                    let read = line.after.offset_bytes - self.state.read.offset_bytes;
                    let written = self.write(line, answer).await?;
                    budget.spend(1, read + written);
                    let size = self.state.file.map_or(0, |part| part.size_bytes);
                    if let Err(error) = room.check(size) {
                        return Ok(Made::TooLarge(error.message().to_owned()));
                    }
                    if budget.is_spent() {
                        return Ok(Made::Some);
                    }
                }
            }
        }
        Ok(Made::All)
    }

    /// Returns the answers and errors of lines, by line.
    async fn answers(&self, lines: &[Line]) -> Result<HashMap<u64, Answer>, StoreError> {
        let number = |line: Option<&Line>| {
            line.and_then(|line| u32::try_from(line.after.line).ok()).unwrap_or(u32::MAX)
        };
        let (id, range) = (self.earlier.id, (number(lines.first()), number(lines.last())));
        let ends = self.app.store.ended_in_range(id.jobs(range.0, range.1)).await?;
        let of_line = |end: EndedJob| {
            let line = id.line(end.id)?;
            Some((u64::from(line), Answer::of(end.outcome, self.earlier)))
        };
        Ok(ends.into_iter().filter_map(of_line).collect())
    }

    /// Writes the line that follows one; returns its bytes.
    async fn write(&mut self, line: &Line, answer: Option<Answer>) -> Result<u64, StoreError> {
        let made = self.line(line, answer);
        let new = NewFile { batch: self.batch, purpose: FilePurpose::Batch, kind: "lines" };
        let part = &mut self.state.file;
        let bytes = self.appended.write_line(&self.app.store, part, new, &made).await?;
        self.state.lines += 1;
        self.state.read = line.after;
        Ok(bytes)
    }

    fn line(&self, line: &Line, answer: Option<Answer>) -> String {
        let request = match &line.parsed {
            Ok(request) => request,
            Err(refused) => {
                let name = refused.custom_id.as_deref().unwrap_or_default();
                let refusal = &refused.refusal;
                let failed = failed(&refusal.code, &refusal.message);
                return self.maker.failed_line(name, &failed);
            }
        };
        let name = &request.custom_id;
        match answer.unwrap_or_else(|| self.without_job(request.number)) {
            Answer::Text(content) => {
                let body = line.body.as_ref().unwrap_or(&serde_json::Value::Null);
                let content = content.as_deref();
                self.maker.line(&Previous { custom_id: name, content, body })
            }
            Answer::Error(code, message) => self.maker.failed_line(name, &failed(&code, &message)),
        }
    }

    /// Returns the error of a line without a job.
    fn without_job(&self, line: u64) -> Answer {
        let refused = u32::try_from(line).ok();
        let refused = refused.and_then(|line| self.earlier.steps.not_storable.get(&line));
        match (refused, self.earlier.state) {
            (Some(why), _) => Answer::Error("not_storable".to_owned(), why.clone()),
            (None, BatchState::Completed) if self.earlier.left_by.is_none() => {
                let message = "the job was deleted before its batch finished";
                Answer::Error("job_deleted".to_owned(), message.to_owned())
            }
            (None, _) => Answer::unanswered(self.earlier),
        }
    }
}

/// How an earlier line ended.
#[derive(Debug, PartialEq, Eq)]
enum Answer {
    /// The text of its answer, if it has one.
    Text(Option<String>),
    /// The code and the message of its error.
    Error(String, String),
}

impl Answer {
    /// Returns how a job of a batch ended; `None` is a cancelled one.
    fn of(outcome: Option<Outcome>, earlier: &Batch) -> Self {
        match outcome.map(outcome_for_tenant) {
            Some(Outcome::Completed(completion)) => {
                let first = completion.choices.into_iter().next();
                // As in the answers: beside calls, an empty text does not count.
                let has_text =
                    |of: &tritmill_queue::Choice| !of.text.is_empty() || of.tool_calls.is_empty();
                Self::Text(first.filter(has_text).map(|choice| choice.text))
            }
            Some(Outcome::Error(error)) => Self::Error(error.code, error.message),
            Some(Outcome::Expired) => Self::expired(),
            None => Self::unanswered(earlier),
        }
    }

    /// Returns the error of a line of an ended batch that was not answered in time, or was cancelled.
    fn unanswered(earlier: &Batch) -> Self {
        let is_expired = earlier.state == BatchState::Expired
            || earlier.left_by == Some(BatchState::Expired)
                && earlier.state != BatchState::Cancelled;
        match is_expired {
            true => Self::expired(),
            false => {
                let message = "the request was cancelled";
                Self::Error("batch_cancelled".to_owned(), message.to_owned())
            }
        }
    }

    fn expired() -> Self {
        let message = "the batch expired before the request was answered";
        Self::Error("batch_expired".to_owned(), message.to_owned())
    }

    fn text(&self) -> &str {
        match self {
            Self::Text(text) => text.as_deref().unwrap_or_default(),
            Self::Error(_, message) => message,
        }
    }
}

/// Returns the error of a line that has no earlier answer.
fn failed(code: &str, message: &str) -> LineError {
    let message = format!("the earlier line has no answer ({code}): {message}");
    LineError { status: 424, code: "previous_line_failed", message, param: None }
}
