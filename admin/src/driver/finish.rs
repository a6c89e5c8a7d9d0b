//! The last step: writes answers to one file and errors to another, in the order of the input.
//!
//! Every attempt writes new files. They become visible in the transaction that finishes the batch; files
//! of an interrupted attempt are swept.

use std::{collections::HashMap, sync::Arc, time::Duration};

use tritmill_client::{RefusedLine, Request, answer};
use tritmill_queue::{
    ErrorKind, JobError, Outcome, Timestamp,
    store::{
        AnsweredLine, BatchState, FileId,
        batches::{Batch, BatchClaim, BatchWrites, FilePosition, FinishedLine},
        files::{FilePurpose, StoredFile},
    },
};

use super::{Interrupted, lines, save};
use crate::{App, FileWriter};

/// Cancels the remaining jobs of a cancelled batch, writes the output files and finishes the batch.
pub(super) async fn finish(app: &App, claim: &mut BatchClaim) -> Result<(), Interrupted> {
    if claim.batch.state == BatchState::Cancelling {
        app.store.cancel_batch_jobs(claim.batch.id).await?;
    }
    let mut output = Output::default();
    // A batch that was cancelled before its validation has no output.
    if claim.batch.at.in_progress.is_some() {
        let mut pages = lines::read(&app.store, claim.batch.input, FilePosition::default());
        while let Some(page) = pages.recv().await {
            write_page(app, &claim.batch, page?, &mut output).await?;
        }
    }
    let now = app.store.now().await?;
    let expires_at = claim.batch.output_expires_s.map(|s| now.after(Duration::from_secs(s)));
    let Output { answers, errors, completed, failed, overdue, .. } = output;
    let mut files = Vec::new();
    for (writer, place) in
        [(answers, &mut claim.batch.output), (errors, &mut claim.batch.error_file)]
    {
        if let Some(writer) = writer {
            let file = writer.finish().await?;
            files.push((file.id, file.size_bytes, expires_at));
            *place = Some(file.id);
        }
    }
    (claim.batch.completed, claim.batch.failed) = (completed, failed);
    claim.batch.enter(
        match claim.batch.state {
            BatchState::Cancelling => BatchState::Cancelled,
            _ if claim.batch.overdue || overdue => BatchState::Expired,
            _ => BatchState::Completed,
        },
        now,
    );
    save(app, claim, BatchWrites { files: &files, ..BatchWrites::default() }).await
}

/// The two output files and their counts.
#[derive(Default)]
struct Output {
    answers: Option<FileWriter>,
    errors: Option<FileWriter>,
    completed: u64,
    failed: u64,
    /// Whether a line expired.
    overdue: bool,
}

impl Output {
    async fn write_line(
        &mut self,
        app: &App,
        batch: &Batch,
        is_answer: bool,
        mut line: String,
    ) -> Result<(), Interrupted> {
        let (writer, count, kind) = match is_answer {
            true => (&mut self.answers, &mut self.completed, "output"),
            false => (&mut self.errors, &mut self.failed, "error"),
        };
        let writer = match writer {
            Some(writer) => writer,
            None => {
                let file = StoredFile {
                    id: FileId::generate(),
                    tenant: batch.tenant.clone(),
                    purpose: FilePurpose::BatchOutput,
                    filename: format!("{}_{kind}.jsonl", batch.id),
                    size_bytes: 0,
                    created_at: Timestamp::default(),
                    expires_at: None,
                };
                writer.insert(FileWriter::begin(Arc::clone(&app.store), &file).await?)
            }
        };
        line.push('\n');
        *count += 1;
        Ok(writer.write(line.as_bytes()).await?)
    }
}

async fn write_page(
    app: &App,
    batch: &Batch,
    page: lines::Lines,
    output: &mut Output,
) -> Result<(), Interrupted> {
    let number = |line: Option<&lines::Line>| {
        line.and_then(|line| u32::try_from(line.after.line).ok()).unwrap_or(u32::MAX)
    };
    let (first, last) = (number(page.first()), number(page.last()));
    let ends = app.store.finished_lines(batch.id, first, last).await?;
    let mut ends: HashMap<u64, FinishedLine> =
        ends.into_iter().map(|end| (u64::from(end.line), end)).collect();
    for line in page {
        let (is_answer, line) = match line.parsed {
            Ok(request) => output_line(batch, &request, ends.remove(&request.number), output),
            Err(line) => {
                let RefusedLine { key, custom_id, refusal } = *line;
                (false, answer::refusal_line(&key, custom_id.as_deref(), &refusal))
            }
        };
        output.write_line(app, batch, is_answer, line).await?;
    }
    Ok(())
}

/// Returns the output line of a request, and whether it is an answer.
fn output_line(
    batch: &Batch,
    request: &Request,
    end: Option<FinishedLine>,
    output: &mut Output,
) -> (bool, String) {
    let unanswered = |code: &str, message: &str| {
        (false, answer::unanswered_line(&request.key, &request.custom_id, code, message))
    };
    let cancelled = || unanswered("batch_cancelled", "the request was cancelled");
    let expired =
        || unanswered("batch_expired", "the batch expired before the request was answered");
    let is_cancelled = batch.state == BatchState::Cancelling;
    let (outcome, finished_at) = match end {
        Some(FinishedLine { outcome: Some(Outcome::Expired), .. }) => {
            output.overdue = true;
            return expired();
        }
        Some(FinishedLine { outcome: Some(outcome), finished_at, .. }) => (outcome, finished_at),
        // Cancelled when this batch expired, or by an operator.
        Some(FinishedLine { outcome: None, .. }) if batch.overdue => return expired(),
        Some(FinishedLine { outcome: None, .. }) => return cancelled(),
        // Never submitted.
        None if is_cancelled => return cancelled(),
        None if batch.overdue => return expired(),
        None => {
            let message = "the job was deleted before its batch finished";
            let deleted = JobError::new(ErrorKind::Engine, "job_deleted", message);
            (Outcome::Error(deleted), batch.created_at)
        }
    };
    let is_answer = matches!(outcome, Outcome::Completed(_));
    let line = answer::line(&AnsweredLine {
        seq: 0,
        number: request.number,
        custom_id: Some(request.custom_id.clone()),
        key: request.key.to_vec(),
        shape: request.endpoint.shape().to_owned(),
        outcome: Some(outcome),
        finished_at,
    });
    (is_answer, line)
}
