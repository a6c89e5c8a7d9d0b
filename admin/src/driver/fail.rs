//! Fails a batch that twice took its driver down, or did not end a step, at the same place.

use super::{Interrupted, Next, finish::export, save};
use crate::{
    App,
    store::{
        BatchState,
        batch_steps::{BatchClaim, BatchWrites},
        batches::Batch,
        step_state::{BatchError, OutputPart},
    },
};

/// Ends a batch with an error that says where it failed. A batch that has submitted jobs cancels them first.
pub(super) async fn fail(app: &App, claim: &mut BatchClaim) -> Result<Next, Interrupted> {
    let (is_again, error) = (is_failing(&claim.batch), error(&claim.batch, claim.failures));
    tracing::error!(batch = %claim.batch.id, message = error.message, "the batch failed");
    if claim.batch.steps.exporting.is_some() {
        // Its files are complete.
        return export::end(app, claim, Some(error.message)).await;
    }
    if !is_again {
        claim.batch.errors.push(error);
    }
    if matches!(claim.batch.state, BatchState::InProgress | BatchState::Paused) {
        let now = app.store.now().await?;
        claim.batch.enter(BatchState::Cancelling, now);
        save(app, claim, BatchWrites::default()).await?;
        return Ok(Next::Now);
    }
    end(app, claim).await
}

/// Fails a batch that cannot have lines, and drops what was written of them.
pub(super) async fn reject(
    app: &App,
    claim: &mut BatchClaim,
    error: BatchError,
    part: Option<OutputPart>,
) -> Result<Next, Interrupted> {
    claim.batch.errors.push(error);
    claim.batch.steps = Default::default();
    claim.batch.enter(BatchState::Failed, app.store.now().await?);
    save(app, claim, BatchWrites::default()).await?;
    abandon(app, part).await;
    Ok(Next::Finished)
}

/// Deletes an unfinished file.
pub(super) async fn abandon(app: &App, part: Option<OutputPart>) {
    if let Some(part) = part
        && let Err(error) = app.store.abandon_file(part.file).await
    {
        tracing::debug!(%error, "an unfinished file is left to the sweep");
    }
}

/// Whether a batch was failed and cancels its jobs.
pub(super) fn is_failing(batch: &Batch) -> bool {
    batch.state == BatchState::Cancelling && !batch.errors.is_empty()
}

/// Enters the terminal state, without output.
pub(super) async fn end(app: &App, claim: &mut BatchClaim) -> Result<Next, Interrupted> {
    let now = app.store.now().await?;
    let parts = claim.batch.steps.assembly.take().map(|output| [output.answers, output.errors]);
    claim.batch.steps = Default::default();
    claim.batch.enter(BatchState::Failed, now);
    save(app, claim, BatchWrites::default()).await?;
    for part in parts.into_iter().flatten() {
        abandon(app, part).await;
    }
    Ok(Next::Finished)
}

fn error(batch: &Batch, failures: u64) -> BatchError {
    let steps = &batch.steps;
    let (work, line) = match batch.state {
        BatchState::Validating if !batch.has_input() && batch.input_url.is_some() => {
            ("reading its input_url", steps.fetching.as_ref().map(|done| done.lines))
        }
        BatchState::Validating if !batch.has_input() => {
            ("making its lines", steps.making.as_ref().map(|done| done.read.line))
        }
        BatchState::Validating => {
            ("validating", steps.validation.as_ref().map(|done| done.read.line))
        }
        BatchState::InProgress => ("submitting", Some(batch.submitted.line)),
        _ if steps.exporting.is_some() => ("writing its output_url", None),
        _ => ("writing its output", steps.assembly.as_ref().map(|done| done.read.line)),
    };
    let line = line.unwrap_or_default() + 1;
    let message = format!(
        "the service failed {failures} times while it was {work} from line {line} on, so it stopped the batch"
    );
    BatchError { code: "batch_stopped".to_owned(), line: Some(line), message, param: None }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_says_which_work_failed_and_where() {
        let batch = serde_json::json!({
            "id": uuid::Uuid::nil(), "tenant": "t", "state": "finalizing", "endpoint": "/v1/completions",
            "input": uuid::Uuid::nil(), "completion_window": "1h", "priority": "normal",
            "metadata": null, "output_expires_s": null, "created_at": 0, "expires_at": 0,
            "submitted": { "line": 9, "offset_bytes": 99 },
        });
        let mut batch: Batch = serde_json::from_value(batch).expect("fields of a batch");
        let found = error(&batch, 2);
        assert_eq!(found.line, Some(1));
        assert!(
            found.message.contains("failed 2 times while it was writing its output from line 1")
        );
        batch.state = BatchState::InProgress;
        assert_eq!(error(&batch, 2).line, Some(10));
    }
}
