//! The last steps of a batch with an `output_url`: its files are complete, and are written there.
//!
//! The writing is a task of this process, at which the steps look: it is bounded in memory, not in time. A step of another process, or
//! of this one after a restart, begins it anew; an object is there when it is whole, so that does no harm. What fails for good, or for
//! too long, is shown in the batch, which ends in either case.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use tokio::{
    runtime::Handle,
    sync::OwnedSemaphorePermit,
    task::{JoinHandle, spawn_blocking},
    time::timeout,
};
use tritmill_data::{DataError, Sink};

use super::super::{Budget, Interrupted, Next, retries::WAIT, save};
use crate::{
    App,
    data_urls::said,
    driver::stored_answers::StoredAnswers,
    store::{
        Batch, BatchState, FileId,
        batch_steps::{BatchClaim, BatchWrites},
        step_state::{ExportState, StepState, Tries},
    },
};

/// Outputs that a process writes at once.
pub(crate) const EXPORTS_MAX: usize = 4;

/// The files of a batch at one of its ends.
type Files = (FileId, Option<FileId>, Option<FileId>);

fn files(batch: &Batch) -> Files {
    (batch.input, batch.output, batch.error_file)
}

/// An output that is being written. It stops when this is dropped.
pub(crate) struct Export {
    of: Files,
    task: JoinHandle<Result<(), DataError>>,
    is_dropped: Arc<AtomicBool>,
}

impl Export {
    fn open(app: &App, batch: &Batch, sink: Sink, slot: OwnedSemaphorePermit) -> Self {
        let is_dropped = Arc::<AtomicBool>::default();
        let (input, answers, errors) = files(batch);
        let answers = StoredAnswers {
            files: app.files.clone(),
            input,
            answers,
            errors,
            stop: Arc::clone(&is_dropped),
        };
        let runtime = Handle::current();
        let task = spawn_blocking(move || {
            let _slot = slot;
            sink.write_remote(&answers, &runtime)
        });
        Self { of: files(batch), task, is_dropped }
    }
}

impl Drop for Export {
    fn drop(&mut self) {
        self.is_dropped.store(true, Ordering::Relaxed);
    }
}

/// Returns what is left to do for a batch with complete files before it ends, if there is something.
pub(super) fn begin(batch: &mut Batch, ends_as: BatchState) -> Option<ExportState> {
    let has_files = batch.output.is_some() || batch.error_file.is_some();
    let output = batch.output_url.as_mut().filter(|_| has_files)?;
    output.error = None;
    Some(ExportState { ends_as, tries: Tries::default() })
}

/// Looks at the task, which it begins if nothing runs.
pub(super) async fn step(
    app: &App,
    claim: &mut BatchClaim,
    budget: Budget,
) -> Result<Next, Interrupted> {
    let Some(output) = claim.batch.output_url.as_deref().cloned() else {
        return end(app, claim, None).await;
    };
    let sink = output.check_allowed(&app.urls, &claim.batch.tenant).and_then(|()| output.sink());
    let sink = match sink {
        Ok(sink) => sink,
        Err(error) => return end(app, claim, Some(error.message())).await,
    };
    let (id, of) = (claim.batch.id, files(&claim.batch));
    let left = app.exports.take(id).filter(|export| export.of == of);
    let mut export = match (left, app.exports.slot()) {
        (Some(export), _) => export,
        (None, Some(slot)) => Export::open(app, &claim.batch, sink, slot),
        (None, None) => return Ok(Next::After(WAIT)),
    };
    let Ok(ended) = timeout(budget.time_left(), &mut export.task).await else {
        app.exports.put(id, export);
        return Ok(Next::Now);
    };
    let error = match ended {
        Ok(Ok(())) => {
            tracing::info!(batch = %id, "output written to the output_url of a batch");
            return end(app, claim, None).await;
        }
        Ok(Err(error)) => error,
        Err(_) => {
            let message = "output_url cannot be written: what writes it failed".to_owned();
            return end(app, claim, Some(message)).await;
        }
    };
    let message = format!("output_url cannot be written: {}", said(&error));
    let now = app.store.now().await?;
    let state = claim.batch.steps.exporting.as_mut().filter(|_| error.is_transient());
    let Some(pause) = state.and_then(|state| state.tries.again(now)) else {
        return end(app, claim, Some(message)).await;
    };
    tracing::info!(batch = %id, %error, "an output_url of a batch failed, trying again");
    save(app, claim, BatchWrites::default()).await?;
    Ok(Next::After(pause))
}

/// Ends a batch with its files; `error` says why its output is not at its `output_url`.
pub(in crate::driver) async fn end(
    app: &App,
    claim: &mut BatchClaim,
    error: Option<String>,
) -> Result<Next, Interrupted> {
    if let Some(error) = &error {
        tracing::warn!(batch = %claim.batch.id, error, "the batch ends without its output_url");
    }
    let ends_as = claim.batch.steps.exporting.take().map(|state| state.ends_as);
    if let Some(output) = &mut claim.batch.output_url {
        output.error = error;
    }
    let not_storable = std::mem::take(&mut claim.batch.steps.not_storable);
    claim.batch.steps = StepState { not_storable, ..StepState::default() };
    claim.batch.enter(ends_as.unwrap_or(BatchState::Completed), app.store.now().await?);
    save(app, claim, BatchWrites::default()).await?;
    Ok(Next::Finished)
}
