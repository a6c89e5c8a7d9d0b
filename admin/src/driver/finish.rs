//! The last steps: write answers to one file and errors to another, in the order of the input.
//!
//! A step writes the chunks of its lines in the transaction that saves its position, so what an interrupted
//! step wrote does not exist. The files become visible in the transaction that finishes the batch. Lines that ended without
//! a number get one with the line of their output. A batch with an `output_url` ends after its output is written there.

pub(super) mod export;
mod output;

use std::{collections::HashMap, time::Duration};

use tritmill_client::Request;
use tritmill_queue::{ErrorKind, JobError, JobState, Outcome, store::EndedJob};

use self::output::Output;
use super::{
    Budget, Interrupted, JobsChange, Next, appended::Placed, change_jobs, fail, lines, numbering,
    save,
};
use crate::{
    App,
    output_lines::{self, Asked},
    store::{
        BatchState,
        batch_ends::LineEnd,
        batch_steps::{BatchClaim, BatchWrites},
        batches::Batch,
        step_state::StepState,
    },
};

/// Lines whose results are read at once, at first and at most. Between them the number depends on the size of
/// the results, which should fit `SLICE_BYTES`.
const SLICE_FIRST: usize = 16;
const SLICE_MAX: usize = 1000;
const SLICE_BYTES: u64 = 1 << 20;

/// Cancels the remaining jobs of a cancelled batch; then writes the next lines. After the last one the batch is
/// finished.
pub(super) async fn step(
    app: &App,
    claim: &mut BatchClaim,
    mut budget: Budget,
) -> Result<Next, Interrupted> {
    if claim.batch.steps.exporting.is_some() {
        return export::step(app, claim, budget).await;
    }
    let is_begun = claim.batch.steps.assembly.is_some();
    if claim.batch.state == BatchState::Cancelling && !is_begun {
        if !change_jobs(app, claim.batch.id, JobsChange::Cancel, &mut budget).await? {
            return Ok(Next::Now);
        }
        if fail::is_failing(&claim.batch) {
            return fail::end(app, claim).await;
        }
    }
    let mut output = Output::open(&app.files, &claim.batch).await?;
    // A batch that was cancelled before its validation has no output.
    if claim.batch.at.in_progress.is_some() {
        let mut pages = lines::read(&app.files, &claim.batch, output.state.read);
        let mut slice = SLICE_FIRST;
        while let Some(page) = pages.recv().await {
            let mut page = page?;
            while !page.is_empty() {
                let next: lines::Lines = page.drain(..slice.min(page.len())).collect();
                let (lines, before) = (next.len(), output.written_bytes);
                write_slice(app, &claim.batch, next, &mut output).await?;
                let bytes = output.written_bytes - before;
                slice = match bytes {
                    large if large > SLICE_BYTES => (slice / 2).max(1),
                    small if small < SLICE_BYTES / 4 => (slice * 2).min(SLICE_MAX),
                    _ => slice,
                };
                budget.spend(lines, bytes);
                if budget.is_spent() {
                    let placed = output.place(&app.files).await?;
                    let chunks: Vec<_> = placed.iter().map(Placed::chunk).collect();
                    let ends = &output.ends;
                    claim.batch.steps.assembly = Some(output.state.clone());
                    claim.batch.last_end += ends.len() as u64;
                    save(
                        app,
                        claim,
                        BatchWrites { chunks: &chunks, ends, ..BatchWrites::default() },
                    )
                    .await?;
                    return Ok(Next::Now);
                }
            }
        }
    }
    conclude(app, claim, &output).await
}

/// Finishes a batch with its whole output.
async fn conclude(app: &App, claim: &mut BatchClaim, output: &Output) -> Result<Next, Interrupted> {
    let now = app.store.now().await?;
    let expires_at = claim.batch.output_expires_s.map(|s| now.after(Duration::from_secs(s)));
    let placed = output.place(&app.files).await?;
    let chunks: Vec<_> = placed.iter().map(Placed::chunk).collect();
    let (ends, state) = (&output.ends, &output.state);
    claim.batch.last_end += ends.len() as u64;
    let parts = [state.answers, state.errors].into_iter().flatten();
    let files: Vec<_> = parts.map(|part| (part.file, part.size_bytes, expires_at)).collect();
    // The files of a batch that was opened again have the earlier answers as well.
    let replaced: Vec<_> =
        [claim.batch.output.take(), claim.batch.error_file.take()].into_iter().flatten().collect();
    claim.batch.output = state.answers.map(|part| part.file);
    claim.batch.error_file = state.errors.map(|part| part.file);
    (claim.batch.completed, claim.batch.failed) = (state.completed, state.failed);
    claim.batch.usage = state.usage;
    claim.batch.cost.clone_from(&state.cost);
    let not_storable = std::mem::take(&mut claim.batch.steps.not_storable);
    let ends_as = match claim.batch.state {
        BatchState::Cancelling => BatchState::Cancelled,
        _ if claim.batch.overdue || state.overdue => BatchState::Expired,
        _ => BatchState::Completed,
    };
    let exporting = export::begin(&mut claim.batch, ends_as);
    let next = if exporting.is_some() { Next::Now } else { Next::Finished };
    claim.batch.steps = StepState { not_storable, exporting, ..StepState::default() };
    if claim.batch.steps.exporting.is_none() {
        claim.batch.enter(ends_as, now);
    }
    let writes = BatchWrites {
        chunks: &chunks,
        files: &files,
        replaced: &replaced,
        ends,
        ..BatchWrites::default()
    };
    save(app, claim, writes).await?;
    Ok(next)
}

async fn write_slice(
    app: &App,
    batch: &Batch,
    slice: lines::Lines,
    output: &mut Output,
) -> Result<(), Interrupted> {
    let number = |line: Option<&lines::Line>| {
        line.and_then(|line| u32::try_from(line.after.line).ok()).unwrap_or(u32::MAX)
    };
    let (first, last) = (number(slice.first()), number(slice.last()));
    let ends = app.store.ended_in_range(batch.id.jobs(first, last)).await?;
    let of_line = |end: EndedJob| batch.id.line(end.id).map(|line| (u64::from(line), end));
    let mut ends: HashMap<u64, EndedJob> = ends.into_iter().filter_map(of_line).collect();
    let mut written = Vec::with_capacity(slice.len());
    for line in slice {
        let number = number(Some(&line));
        let (state, ended_at, text) = match &line.parsed {
            Ok(request) => {
                let end = ends.remove(&request.number);
                let at = end.as_ref().and_then(|end| end.outcome.as_ref().map(|_| end.finished_at));
                let (state, text) = output_line(batch, request, end, output);
                (state, at, text)
            }
            Err(line) => (JobState::Failed, None, output_lines::refused(line)),
        };
        written.push(LineEnd {
            line: number,
            state,
            ended_at: ended_at.unwrap_or(batch.created_at),
            output: ended_at.is_none().then(|| text.clone()),
        });
        output.write_line(&app.store, batch, state == JobState::Completed, &text).await?;
        output.state.read = line.after;
    }
    output.ends.extend(numbering::unknown(app, batch, written).await?);
    Ok(())
}

/// Returns why the database refuses the job of a line, if it does.
fn not_storable(batch: &Batch, line: u64) -> Option<&str> {
    let line = u32::try_from(line).ok()?;
    batch.steps.not_storable.get(&line).map(String::as_str)
}

/// Returns the output line of a request, and the state of its job, or what that would be.
fn output_line(
    batch: &Batch,
    request: &Request,
    end: Option<EndedJob>,
    output: &mut Output,
) -> (JobState, String) {
    let Request { number, custom_id, key, endpoint, body } = request;
    let (shape, repeated) = (endpoint.shape(), &body.repeated);
    let asked = Asked { number: *number, custom_id, key, shape, repeated };
    let expired = || (JobState::Expired, asked.expired());
    let cancelled = || (JobState::Cancelled, asked.cancelled());
    let is_cancelled = batch.state == BatchState::Cancelling;
    // What was not chosen to run again stays as it was.
    let was_expired = !is_cancelled && batch.left_by == Some(BatchState::Expired);
    match end {
        Some(EndedJob { outcome: Some(outcome), state, finished_at, .. }) => {
            output.state.overdue |= outcome == Outcome::Expired;
            if let Outcome::Completed(answer) = &outcome {
                if let Some(usage) = &mut output.state.usage {
                    usage.add(answer.usage);
                }
                if let Some(charge) = &answer.charge {
                    charge.add_to(&mut output.state.cost);
                }
            }
            (state, asked.ended(outcome, finished_at))
        }
        // Cancelled when this batch expired, or by an operator.
        Some(EndedJob { outcome: None, .. }) if batch.overdue || was_expired => {
            output.state.overdue = true;
            expired()
        }
        Some(EndedJob { outcome: None, .. }) => cancelled(),
        // Never submitted.
        None if is_cancelled => cancelled(),
        None if batch.overdue => expired(),
        None if let Some(why) = not_storable(batch, *number) => {
            (JobState::Failed, asked.not_storable(batch, why))
        }
        None if was_expired => {
            output.state.overdue = true;
            expired()
        }
        None if batch.left_by.is_some() => cancelled(),
        None => {
            let message = "the job was deleted before its batch finished";
            let deleted = JobError::new(ErrorKind::Engine, "job_deleted", message);
            let text = asked.ended(Outcome::Error(deleted), batch.created_at);
            (JobState::Failed, text)
        }
    }
}
