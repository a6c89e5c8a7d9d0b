//! The steps of a batch of which the lines are read elsewhere, before it has them.
//!
//! A step takes some pages of the source and writes them to the batch's own file, in the transaction that saves its state, so what an
//! interrupted step wrote does not exist. What follows reads the file as that of any other batch.
//!
//! Between steps the reader waits in this process ([`Kept`](super::kept::Kept)). Where the next step finds none, because another process
//! had the batch or this one is new, it reads the source from its begin and passes over the pages that are in the file; their hash tells
//! whether they are the same. Those of a source that has changed are dropped. A network or a server that fails is tried again for a
//! while; any other failure fails the batch.

mod reader;

use std::io;

use tokio::time::timeout;
use tritmill_client::FieldError;
use tritmill_data::{DataError, Ended, RemoteSource};
use tritmill_queue::StoreError;

pub(crate) use self::reader::SourceReader;
use self::reader::{Piece, chained};
use super::{
    Budget, Interrupted, Next,
    appended::{Appended, NewFile},
    fail,
    retries::WAIT,
    save,
};
use crate::{
    App,
    data_urls::{InputUrl, said},
    store::{
        Batch,
        batch_steps::{BatchClaim, BatchWrites},
        files::FilePurpose,
        step_state::{BatchError, FetchState, Tries},
    },
    tenant_limits::{self, FileRoom},
};

/// Sources that a process reads at once.
pub(crate) const SOURCES_MAX: usize = 8;
/// How often a source may have changed while it was read.
const CHANGES_MAX: u32 = 5;

/// Reads the next pages. After the last one the lines are checked.
pub(super) async fn step(
    app: &App,
    claim: &mut BatchClaim,
    budget: Budget,
) -> Result<Next, Interrupted> {
    let Some(input) = claim.batch.input_url.as_deref().cloned() else { return Ok(Next::Now) };
    let (source, room) = match permitted(app, &claim.batch, &input).await? {
        Ok(permitted) => permitted,
        Err(why) => return refuse(app, claim, why).await,
    };
    let id = claim.batch.id;
    let (state, appended) = continued(app, &claim.batch).await?;
    let size = state.file.map_or(0, |part| part.size_bytes);
    let left = app.sources.take(id).filter(|reader| reader.bytes <= size);
    let reader = match (left, app.sources.slot()) {
        (Some(reader), _) => reader,
        (None, Some(slot)) => SourceReader::open(source, slot),
        (None, None) => return Ok(Next::After(WAIT)),
    };
    let passed = reader.bytes;
    let mut work = Work { app, batch: &claim.batch, reader, state, appended, room };
    let fetched = work.fetch(budget).await?;
    let Work { reader, mut state, appended, .. } = work;
    let has_more = state.file.map_or(0, |part| part.size_bytes) > size;
    if has_more {
        state.tries = Tries::default();
    }
    let mut placed = Vec::new();
    appended.place(&app.files, state.file, &mut placed).await?;
    let chunks: Vec<_> = placed.iter().map(|placed| placed.chunk()).collect();
    let writes = BatchWrites { chunks: &chunks, ..BatchWrites::default() };
    match fetched {
        Fetched::Some => {
            if has_more {
                claim.batch.steps.fetching = Some(state);
                save(app, claim, writes).await?;
            }
            let next = if reader.bytes > passed { Next::Now } else { Next::After(WAIT) };
            app.sources.put(id, reader);
            Ok(next)
        }
        Fetched::All => end(app, claim, (input, state), writes).await,
        Fetched::Changed => begin_again(app, claim, state).await,
        Fetched::TooLarge(why) => refuse(app, claim, too_large(&why)).await,
        Fetched::Failed(error, _) if error.is_transient() => {
            try_again(app, claim, (state, &error), writes).await
        }
        Fetched::Failed(error, lines) => refuse(app, claim, of_source(&error, lines)).await,
    }
}

/// Returns the source of a batch and how much of it the batch may have, or why it may not be read.
async fn permitted(
    app: &App,
    batch: &Batch,
    input: &InputUrl,
) -> Result<Result<(RemoteSource, FileRoom), BatchError>, StoreError> {
    let allowed = input.check_allowed(&app.urls, &batch.tenant);
    let source = allowed.and_then(|()| input.source(&batch.endpoint, app.limits.file_bytes_max));
    let source = match source {
        Ok(source) => source,
        Err(error) => return Ok(Err(of_field(&error))),
    };
    match tenant_limits::file_room(app, &batch.tenant).await {
        Ok(room) => Ok(Ok((source, room))),
        Err(error) if error.status().is_server_error() => {
            Err(StoreError::Unavailable(Box::new(error)))
        }
        Err(error) => Ok(Err(too_large(error.message()))),
    }
}

/// Returns what earlier steps read. If its file was swept, because no step was done for a long time, it begins again.
async fn continued(app: &App, batch: &Batch) -> Result<(FetchState, Appended), StoreError> {
    let state = batch.steps.fetching.clone().unwrap_or_default();
    match Appended::open(&app.files, state.file).await? {
        Some(appended) => Ok((state, appended)),
        None => {
            tracing::warn!(batch = %batch.id, "unfinished lines were swept, reading them again");
            Ok(Default::default())
        }
    }
}

/// How far a source was read.
enum Fetched {
    /// The budget is spent.
    Some,
    All,
    /// It is not the source of which there are pages.
    Changed,
    /// The file would exceed a limit, in words.
    TooLarge(String),
    /// It cannot be read on after so many lines.
    Failed(DataError, u64),
}

/// The pages of a step.
struct Work<'a> {
    app: &'a App,
    batch: &'a Batch,
    reader: SourceReader,
    state: FetchState,
    appended: Appended,
    room: FileRoom,
}

impl Work<'_> {
    /// Takes pages until the budget is spent.
    async fn fetch(&mut self, mut budget: Budget) -> Result<Fetched, Interrupted> {
        while !budget.is_spent() {
            let Ok(piece) = timeout(budget.time_left(), self.reader.next()).await else { break };
            let size = self.state.file.map_or(0, |part| part.size_bytes);
            let page = match piece {
                Some(Piece::Page(page)) => page,
                Some(Piece::Ended(Ended { error: Some(error), lines })) => {
                    return Ok(Fetched::Failed(error, lines));
                }
                Some(Piece::Ended(_)) if self.reader.bytes < size => return Ok(Fetched::Changed),
                Some(Piece::Ended(_)) => return Ok(Fetched::All),
                None => {
                    let source = io::Error::other("what reads it failed");
                    let error = DataError::Read { name: "it".to_owned(), source };
                    return Ok(Fetched::Failed(error, self.state.lines));
                }
            };
            let bytes = page.bytes.len() as u64;
            if self.reader.bytes <= size {
                // It is in the file.
                if self.reader.bytes == size && self.reader.hash != self.state.hash {
                    return Ok(Fetched::Changed);
                }
                continue;
            }
            if self.reader.bytes - bytes != size {
                return Ok(Fetched::Changed);
            }
            if let Err(error) = self.room.check(self.reader.bytes) {
                return Ok(Fetched::TooLarge(error.message().to_owned()));
            }
            let new = NewFile { batch: self.batch, purpose: FilePurpose::Batch, kind: "lines" };
            let state = &mut self.state;
            self.appended.write(&self.app.store, &mut state.file, new, &page.bytes).await?;
            state.hash = chained(&state.hash, &page.bytes);
            state.lines += page.lines;
            budget.spend(0, bytes);
        }
        Ok(Fetched::Some)
    }
}

/// Completes the file.
async fn end(
    app: &App,
    claim: &mut BatchClaim,
    (input, state): (InputUrl, FetchState),
    writes: BatchWrites<'_>,
) -> Result<Next, Interrupted> {
    let Some(part) = state.file else {
        let message = "input_url has no lines".to_owned();
        return refuse(app, claim, error("empty_file", None, message)).await;
    };
    let now = app.store.now().await?;
    claim.batch.input = part.file;
    claim.batch.steps.fetching = None;
    claim.batch.input_url = Some(Box::new(InputUrl { fetched_at: Some(now), ..input }));
    let files = [(part.file, part.size_bytes, None)];
    save(app, claim, BatchWrites { files: &files, ..writes }).await?;
    tracing::info!(batch = %claim.batch.id, lines = state.lines, "lines read of a source");
    Ok(Next::Now)
}

/// Keeps what was read of a source that fails, and lets it rest, unless it has failed for long.
async fn try_again(
    app: &App,
    claim: &mut BatchClaim,
    (mut state, error): (FetchState, &DataError),
    writes: BatchWrites<'_>,
) -> Result<Next, Interrupted> {
    let now = app.store.now().await?;
    let Some(pause) = state.tries.again(now) else {
        return refuse(app, claim, of_source(error, state.lines)).await;
    };
    tracing::info!(batch = %claim.batch.id, %error, "a source of a batch failed, trying again");
    claim.batch.steps.fetching = Some(state);
    save(app, claim, writes).await?;
    Ok(Next::After(pause))
}

/// Drops what was read of a source that has changed.
async fn begin_again(
    app: &App,
    claim: &mut BatchClaim,
    state: FetchState,
) -> Result<Next, Interrupted> {
    let changes = state.changes + 1;
    if changes > CHANGES_MAX {
        let message = "input_url changes again and again while it is read".to_owned();
        return refuse(app, claim, error("input_changed", None, message)).await;
    }
    tracing::info!(batch = %claim.batch.id, "a source of a batch has changed, reading it again");
    claim.batch.steps.fetching = Some(FetchState { changes, ..FetchState::default() });
    save(app, claim, BatchWrites::default()).await?;
    fail::abandon(app, state.file).await;
    Ok(Next::Now)
}

/// Fails a batch of which the lines cannot be read.
async fn refuse(app: &App, claim: &mut BatchClaim, why: BatchError) -> Result<Next, Interrupted> {
    let part = claim.batch.steps.fetching.take().and_then(|state| state.file);
    fail::reject(app, claim, why, part).await
}

fn error(code: &str, line: Option<u64>, message: String) -> BatchError {
    let param = Some("input_url".to_owned());
    BatchError { code: code.to_owned(), line, message, param }
}

fn too_large(why: &str) -> BatchError {
    error("file_too_large", None, format!("input_url has too much: {why}"))
}

fn of_field(refused: &FieldError) -> BatchError {
    error(refused.code, None, refused.message())
}

/// Returns why a source cannot be read on after so many lines.
fn of_source(source: &DataError, lines: u64) -> BatchError {
    let code = match source {
        DataError::NotFound { .. } | DataError::NoBucket { .. } | DataError::EmptyFolder { .. } => {
            "input_not_found"
        }
        DataError::Denied { .. } => "input_denied",
        DataError::NoColumn { .. } => "input_without_column",
        DataError::NoEndpoint { .. } => "invalid_url",
        DataError::TooLarge { .. } => "file_too_large",
        _ => "input_unreadable",
    };
    let line = (lines > 0).then_some(lines + 1);
    let place = line.map_or_else(String::new, |line| format!(" from line {line} on"));
    error(code, line, format!("input_url cannot be read{place}: {}", said(source)))
}
