//! The steps of a batch in progress: submit lines as the queue has room, and count finished jobs.

use std::{collections::HashSet, time::Duration};

use tokio::time::Instant;
use tritmill_client::{ClientError, Endpoint};
use tritmill_queue::{Billing, Job, JobId, JobState, StoreError};

use super::{
    Budget, Interrupted, JobsChange, Next, change_jobs, front::Front, lines, numbering,
    rerun::Pass, save,
};
use crate::{
    App, output_lines,
    refusals::Limit,
    store::{
        BatchState,
        batch_ends::LineEnd,
        batch_steps::{BatchClaim, BatchWrites},
        batches::Batch,
        step_state::FilePosition,
    },
};

/// Shortest and longest pause between two counts. In between it is a share of the time since the last change.
/// It is also a multiple of a count's duration, so that counting takes a small part of the store's time.
const COUNT_FIRST: Duration = Duration::from_millis(200);
const COUNT_LAST: Duration = Duration::from_secs(15);
const COUNT_PER_IDLE: u32 = 8;
const COUNT_SHARE: u32 = 20;
/// Pause between two counts while lines are being submitted.
const COUNT_SUBMITTING: Duration = Duration::from_secs(3);
/// Longest pause of an open batch: lines that are added during a step wait for the next one.
const COUNT_OPEN: Duration = Duration::from_secs(2);
/// Shortest and longest wait for room in the queue.
const BUSY_FIRST: Duration = Duration::from_millis(500);
const BUSY_LAST: Duration = Duration::from_secs(15);
/// Refusals of one batch by the database that are kept in words.
const NOT_STORABLE_MAX: usize = 1000;
/// Most jobs of one transaction.
const CHUNK_MAX: usize = 1000;

/// Submits the next lines and counts. The batch is finalizing when every line is answered, or when it has
/// expired and its jobs are cancelled.
pub(super) async fn step(
    app: &App,
    claim: &mut BatchClaim,
    mut budget: Budget,
) -> Result<Next, Interrupted> {
    let now = app.store.now().await?;
    if now >= claim.batch.expires_at {
        if change_jobs(app, claim.batch.id, JobsChange::Cancel, &mut budget).await? {
            claim.batch.overdue = true;
            claim.batch.seal(now);
            claim.batch.enter(BatchState::Finalizing, now);
            save(app, claim, BatchWrites::default()).await?;
        }
        return Ok(Next::Now);
    }
    if claim.batch.steps.is_held {
        let release = JobsChange::Release { expires_at: claim.batch.expires_at };
        if change_jobs(app, claim.batch.id, release, &mut budget).await? {
            claim.batch.steps.is_held = false;
            save(app, claim, BatchWrites::default()).await?;
        }
        return Ok(Next::Now);
    }
    let is_count_due = claim.batch.steps.count_at.is_none_or(|at| at <= now);
    claim.batch.steps.is_escalated = claim.batch.escalates_at().is_some_and(|at| at <= now);
    if is_count_due && let Some(escalation) = claim.batch.escalated() {
        // Also jobs that wait again since the last count, after an attempt or when their worker died.
        let change = JobsChange::Move { to: &escalation.queue };
        if !change_jobs(app, claim.batch.id, change, &mut budget).await? {
            return Ok(Next::Now);
        }
    }
    if is_count_due {
        // Saved with the jobs of this step.
        claim.batch.steps.count_at = Some(now.after(COUNT_SUBMITTING));
    }
    let submitted = submit(app, claim, &mut budget).await?;
    match submitted {
        Submitted::More if !is_count_due => return Ok(Next::Now),
        Submitted::Busy(retry) if !is_count_due => return Ok(Next::After(busy(retry))),
        _ => {}
    }
    let started = Instant::now();
    let Counted { open, changed, ended, .. } = count(app, claim).await?;
    let counting = started.elapsed() * COUNT_SHARE;
    if is_count_due {
        claim.batch.steps.count_at = Some(now.after(COUNT_SUBMITTING.max(counting)));
    }
    // While lines are left to submit, they would take the whole budget, and no result could be read.
    numbering::number(app, claim, ended, &mut Budget::new()).await?;
    if open == 0 && matches!(submitted, Submitted::All) && !claim.batch.is_open {
        claim.batch.enter(BatchState::Finalizing, now);
        save(app, claim, BatchWrites::default()).await?;
        return Ok(Next::Now);
    }
    if changed {
        claim.batch.steps.changed_at = Some(now);
    }
    if changed || is_count_due {
        save(app, claim, BatchWrites::default()).await?;
    }
    let changed_at = claim.batch.steps.changed_at.or(claim.batch.at.in_progress).unwrap_or(now);
    let longest = if claim.batch.is_open { COUNT_OPEN } else { COUNT_LAST };
    let wait = (now.since(changed_at) / COUNT_PER_IDLE).clamp(COUNT_FIRST, longest);
    Ok(match submitted {
        Submitted::More => Next::Now,
        // The queue may run dry before the next count.
        Submitted::Busy(retry) => Next::After(busy(retry)),
        Submitted::All => Next::After(wait.max(counting)),
    })
}

fn busy(retry: Duration) -> Duration {
    retry.clamp(BUSY_FIRST, BUSY_LAST)
}

/// Counts of the batch's jobs.
pub(super) struct Counted {
    /// Jobs that have not ended.
    pub open: u64,
    /// Those of them that wait for no time.
    pub active: u64,
    /// Whether the numbers of the batch changed.
    pub changed: bool,
    /// Jobs that ended with an answer or an error.
    pub ended: u64,
}

/// Counts the batch's jobs.
pub(super) async fn count(app: &App, claim: &mut BatchClaim) -> Result<Counted, StoreError> {
    let progress = app.store.range_progress(claim.batch.id.all_jobs()).await?;
    let active = progress.queued + progress.running + progress.retrying;
    let failed = claim.batch.refused + progress.failed + progress.expired + progress.cancelled;
    let changed = (claim.batch.completed, claim.batch.failed) != (progress.completed, failed);
    (claim.batch.completed, claim.batch.failed) = (progress.completed, failed);
    let ended = progress.completed + progress.failed + progress.expired;
    Ok(Counted { open: progress.scheduled + active, active, changed, ended })
}

/// Result of submitting the next jobs.
enum Submitted {
    /// The budget is spent; there may be more lines.
    More,
    /// The queue is full; try again after this time.
    Busy(Duration),
    /// No lines are left.
    All,
}

/// Submits lines until none is left, the queue is full, or the budget is spent. When lines run again, each pass over
/// the file is followed by the next.
async fn submit(
    app: &App,
    claim: &mut BatchClaim,
    budget: &mut Budget,
) -> Result<Submitted, Interrupted> {
    loop {
        if let Some(rerun) = claim.batch.steps.reruns.first_mut().filter(|it| it.reached.is_none())
        {
            rerun.reached = Some(claim.batch.submitted.line);
            claim.batch.submitted = FilePosition::default();
            claim.batch.steps.ahead = None;
            save(app, claim, BatchWrites::default()).await?;
        }
        let submitted = submit_rest(app, claim, budget).await?;
        if !matches!(submitted, Submitted::All) || claim.batch.steps.reruns.is_empty() {
            return Ok(submitted);
        }
        claim.batch.steps.reruns.remove(0);
        save(app, claim, BatchWrites::default()).await?;
    }
}

/// Submits the lines from the position on. Those of a queue that is full do not keep others waiting.
async fn submit_rest(
    app: &App,
    claim: &mut BatchClaim,
    budget: &mut Budget,
) -> Result<Submitted, Interrupted> {
    let from = claim.batch.submitted;
    let mut pages = lines::read(&app.files, &claim.batch, from);
    // Fewer jobs at once when the queue is nearly full.
    let (mut chunk, mut front) = (CHUNK_MAX, Front::default());
    // Where this step is in the file, which may be ahead of the batch's position.
    let mut at = from;
    while let Some(page) = pages.recv().await {
        let page = page?;
        let Some(read) = page.last().map(|line| line.after) else { continue };
        let (lines, start) = (page.len(), at.offset_bytes);
        at = read;
        let pass = Pass::of(app, &claim.batch, &page).await?;
        number_refused(app, claim, &page).await?;
        let mut pending: Vec<(Job, FilePosition)> =
            page.into_iter().rev().filter_map(|line| job(&claim.batch, &pass, line)).collect();
        pending.retain(|(job, at)| front.is_next(&claim.batch, &job.queue, at.line));
        let again = pass.again();
        let jobs = PageJobs { pending, read, again };
        if let Some(retry) = submit_page(app, claim, jobs, (&mut chunk, &mut front)).await? {
            return Ok(Submitted::Busy(retry));
        }
        let before = (claim.batch.submitted, claim.batch.steps.ahead.clone());
        front.reach(&mut claim.batch, read);
        if (claim.batch.submitted, &claim.batch.steps.ahead) != (before.0, &before.1) {
            // The page ends with refused lines, or has no others.
            save(app, claim, BatchWrites::default()).await?;
        }
        budget.spend(lines, read.offset_bytes.saturating_sub(start));
        if let Some(retry) = front.is_far(read) {
            return Ok(Submitted::Busy(retry));
        }
        if budget.is_spent() {
            return Ok(Submitted::More);
        }
    }
    Ok(front.retry().map_or(Submitted::All, Submitted::Busy))
}

/// The jobs of a page of lines.
struct PageJobs {
    /// The next job comes last.
    pending: Vec<(Job, FilePosition)>,
    /// The position behind the page.
    read: FilePosition,
    /// Jobs that may be there already.
    again: HashSet<JobId>,
}

/// Submits the jobs of a page, at most `chunk` at once. Returns the time to wait if no queue of the batch has room.
async fn submit_page(
    app: &App,
    claim: &mut BatchClaim,
    PageJobs { mut pending, read, again }: PageJobs,
    (chunk, front): (&mut usize, &mut Front),
) -> Result<Option<Duration>, Interrupted> {
    while !pending.is_empty() {
        let first = pending.len().saturating_sub(*chunk);
        let next: Vec<Job> = pending[first..].iter().rev().map(|(job, _)| job.clone()).collect();
        match app.client.admit(&next).await {
            Ok(()) => {}
            Err(ClientError::Busy { .. }) if next.len() > 1 => {
                *chunk = (next.len() / 8).max(1);
                continue;
            }
            Err(ClientError::Busy { retry_after, limit, cause, .. }) => {
                app.metrics.refusals.count(Limit::Queue(limit, cause), &claim.batch.tenant);
                let (job, at) = &pending[first];
                let (queue, line) = (job.queue.clone(), at.line);
                if !front.wait(&mut claim.batch, (&queue, line), retry_after) {
                    return Ok(Some(front.retry().unwrap_or(retry_after)));
                }
                pending.retain(|(job, _)| job.queue != queue);
                *chunk = CHUNK_MAX;
                continue;
            }
            Err(ClientError::Store(error)) => return Err(error.into()),
            Err(other) => return Err(StoreError::Unavailable(Box::new(other)).into()),
        }
        let before = (claim.batch.submitted, claim.batch.steps.ahead.clone());
        let reached = match first {
            0 => read,
            _ => pending[first].1,
        };
        front.reach(&mut claim.batch, reached);
        let again: Vec<JobId> =
            next.iter().map(|job| job.id).filter(|id| again.contains(id)).collect();
        let writes = BatchWrites { jobs: &next, again: &again, ..BatchWrites::default() };
        match save(app, claim, writes).await {
            Ok(()) => {}
            Err(Interrupted::Store(StoreError::InvalidValue { .. })) if next.len() > 1 => {
                // To find the refused one.
                (claim.batch.submitted, claim.batch.steps.ahead) = before;
                *chunk = (next.len() / 8).max(1);
                continue;
            }
            Err(Interrupted::Store(error @ StoreError::InvalidValue { .. })) => {
                refuse(app, claim, &next, &error).await?;
                pending.truncate(first);
                continue;
            }
            Err(error) => return Err(error),
        }
        *chunk = (*chunk * 2).min(CHUNK_MAX);
        pending.truncate(first);
        app.client.announce(&next).await;
        tracing::debug!(batch = %claim.batch.id, jobs = next.len(), "lines submitted");
    }
    Ok(None)
}

/// Numbers the refused lines of a page, before the jobs behind them are submitted.
async fn number_refused(
    app: &App,
    claim: &mut BatchClaim,
    page: &lines::Lines,
) -> Result<(), Interrupted> {
    let created_at = claim.batch.created_at;
    let ends = page.iter().filter_map(|line| {
        let refused = line.parsed.as_ref().err()?;
        let line = u32::try_from(line.after.line).ok()?;
        let output = Some(output_lines::refused(refused));
        Some(LineEnd { line, state: JobState::Failed, ended_at: created_at, output })
    });
    let ends = numbering::unknown(app, &claim.batch, ends.collect()).await?;
    if !ends.is_empty() {
        claim.batch.last_end += ends.len() as u64;
        save(app, claim, BatchWrites { ends: &ends, ..BatchWrites::default() }).await?;
    }
    Ok(())
}

/// Records that the database refuses the job of a line, which gets an error in the output.
async fn refuse(
    app: &App,
    claim: &mut BatchClaim,
    jobs: &[Job],
    error: &StoreError,
) -> Result<(), Interrupted> {
    tracing::error!(batch = %claim.batch.id, %error, "a line is refused by the database");
    let mut ends = Vec::with_capacity(jobs.len());
    for job in jobs {
        let line = claim.batch.id.line(job.id).unwrap_or_default();
        claim.batch.refused += 1;
        let known = &mut claim.batch.steps.not_storable;
        if known.len() < NOT_STORABLE_MAX {
            known.insert(line, error.to_string());
        }
        let output = Some(output_lines::not_storable(&claim.batch, job, &error.to_string()));
        let ended_at = claim.batch.created_at;
        ends.push(LineEnd { line, state: JobState::Failed, ended_at, output });
    }
    claim.batch.last_end += ends.len() as u64;
    save(app, claim, BatchWrites { ends: &ends, ..BatchWrites::default() }).await
}

/// Returns the job of a valid line that runs now.
fn job(batch: &Batch, pass: &Pass, line: lines::Line) -> Option<(Job, FilePosition)> {
    let request = line.parsed.ok()?;
    let number = u32::try_from(request.number).ok().filter(|number| pass.runs(*number))?;
    let queue = batch.queue_of(&request)?.clone();
    // A line's own tier decides before the batch's.
    let (priority, tier) = match request.body.tier {
        Some(tier) => (tier.priority(), tier),
        None => (batch.priority, batch.tier()),
    };
    // The answers of other endpoints need nothing of their jobs.
    let has_shape = batch.is_mixed() || request.endpoint == Endpoint::Responses;
    let job = Job {
        tenant: batch.tenant.clone(),
        priority,
        billing: Billing { tier, key: batch.key },
        expires_at: Some(batch.expires_at),
        line_key: Some(request.key),
        line_shape: has_shape.then(|| request.endpoint.shape()),
        ..request.job(batch.id.job(number), queue)
    };
    Some((job, line.after))
}
