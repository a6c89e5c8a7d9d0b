//! [`chosen_lines`]: the lines of a batch that a retry names.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

use tritmill_queue::{JobState, StoreError, store::RangedJob};

use crate::{
    driver::lines,
    file_contents::FileContents,
    store::{
        Batch, FrontStore,
        step_state::{FilePosition, RerunLines, line_ranges},
    },
};

/// Most names of one retry.
pub const NAMES_MAX: usize = 10_000;
/// Names that are looked up at once.
const CHUNK: usize = 1000;

/// Why a named line does not run again.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("custom_ids[{index}]: '{custom_id}' {problem}")]
pub struct ChoiceError {
    /// Position of the name in the list.
    pub index: usize,
    /// The name.
    pub custom_id: String,
    /// What is wrong with it.
    pub problem: Problem,
}

/// What is wrong with a name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Problem {
    /// No line has it.
    #[error("is not in the batch")]
    Unknown,
    /// Its line waits or runs.
    #[error("has not ended: it is {0}")]
    Open(&'static str),
    /// Its line has an answer.
    #[error("has an answer: it runs again only with \"force\": true")]
    Answered,
    /// Its line is not a valid request.
    #[error("was refused, and would be again: {0}")]
    Refused(String),
}

/// Why a retry is not possible.
#[derive(Debug, thiserror::Error)]
pub enum ChosenLinesError {
    /// A name is wrong.
    #[error(transparent)]
    Choice(#[from] ChoiceError),
    /// Answers of the batch were deleted, because they are older than the installation keeps jobs: a new output would
    /// lack them.
    #[error("answers of the batch are no longer in the store, so it cannot be opened again")]
    AnswersDeleted,
    /// The file with the lines is gone.
    #[error("the input file no longer exists, so the batch cannot be opened again")]
    NoInput,
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Checks that the lines of a batch can run again: its file and its answers are still there.
///
/// # Errors
/// What is missing.
pub async fn check_complete(
    store: &Arc<dyn FrontStore>,
    batch: &Batch,
) -> Result<(), ChosenLinesError> {
    // Without lines there is nothing to lose.
    if batch.has_input() && store.file(&batch.tenant, batch.input).await?.is_none() {
        return Err(ChosenLinesError::NoInput);
    }
    // The jobs of a batch have the same age, so they are deleted together.
    let had_answers = batch.state.is_terminal() && batch.completed > 0;
    match had_answers && !store.has_ended(batch.id.all_jobs()).await? {
        true => Err(ChosenLinesError::AnswersDeleted),
        false => Ok(()),
    }
}

/// Returns the lines with these names; with `answered`, also those that have an answer.
///
/// # Errors
/// Names the first that cannot run again.
pub async fn chosen_lines(
    files: &FileContents,
    batch: &Batch,
    names: &[String],
    answered: bool,
) -> Result<RerunLines, ChosenLinesError> {
    let store = files.store();
    let mut found: HashMap<String, Found> = HashMap::new();
    for names in names.chunks(CHUNK) {
        for job in store.named_in_range(batch.id.all_jobs(), names).await? {
            let line = batch.id.line(job.id).unwrap_or_default();
            found.extend(job.custom_id.clone().map(|name| (name, Found::Job(line, job))));
        }
    }
    if names.iter().any(|name| !found.contains_key(name))
        && has_lines_without_job(store, batch).await?
    {
        find_in_file(files, batch, names, &mut found).await?;
    }
    let mut lines = Vec::with_capacity(names.len());
    for (index, name) in names.iter().enumerate() {
        let line = match found.get(name) {
            Some(found) => found.line(batch, answered),
            None => Err(Problem::Unknown),
        };
        let error = |problem| ChoiceError { index, custom_id: name.clone(), problem };
        lines.push(line.map_err(error)?);
    }
    Ok(RerunLines::Chosen { ranges: line_ranges(lines), answered })
}

/// A line with a name.
enum Found {
    Job(u32, RangedJob),
    /// A valid line without a job.
    New(u32),
    /// Why a line is invalid.
    Refused(String),
}

impl Found {
    fn line(&self, batch: &Batch, answered: bool) -> Result<u32, Problem> {
        match self {
            Self::Refused(why) => Err(Problem::Refused(why.clone())),
            Self::New(line) => match batch.steps.not_storable.get(line) {
                Some(why) => Err(Problem::Refused(why.clone())),
                None if batch.state.is_terminal() => Ok(*line),
                None => Err(Problem::Open("waiting for its turn")),
            },
            Self::Job(_, job) if !job.state.is_terminal() => Err(Problem::Open(job.state.as_str())),
            Self::Job(_, job) if job.state == JobState::Completed && !answered => {
                Err(Problem::Answered)
            }
            Self::Job(line, _) => Ok(*line),
        }
    }
}

async fn has_lines_without_job(
    store: &Arc<dyn FrontStore>,
    batch: &Batch,
) -> Result<bool, StoreError> {
    let counts = store.range_progress(batch.id.all_jobs()).await?;
    let open = counts.scheduled + counts.queued + counts.running + counts.retrying;
    let ended = counts.completed + counts.failed + counts.cancelled + counts.expired;
    Ok(open + ended < batch.total_lines())
}

/// Adds the lines of the file that have one of the names and no job.
async fn find_in_file(
    files: &FileContents,
    batch: &Batch,
    names: &[String],
    found: &mut HashMap<String, Found>,
) -> Result<(), StoreError> {
    let mut missing: HashSet<&str> = names.iter().map(String::as_str).collect();
    missing.retain(|name| !found.contains_key(*name));
    let mut pages = lines::read(files, batch, FilePosition::default());
    while let Some(page) = pages.recv().await {
        for line in page? {
            let (name, line) = match line.parsed {
                Ok(request) => {
                    let number = u32::try_from(request.number).unwrap_or(u32::MAX);
                    (request.custom_id, Found::New(number))
                }
                Err(refused) => {
                    let Some(name) = refused.custom_id else { continue };
                    (name, Found::Refused(refused.refusal.message))
                }
            };
            if missing.remove(name.as_str()) {
                found.insert(name, line);
            }
        }
        if missing.is_empty() {
            break;
        }
    }
    Ok(())
}
