//! The second step: submits lines as the queue has room, and counts finished jobs.

use std::time::Duration;

use tokio::{
    sync::mpsc,
    time::{Instant, sleep},
};
use tritmill_client::ClientError;
use tritmill_queue::{
    Job, StoreError,
    store::{
        BatchState,
        batches::{Batch, BatchClaim, BatchWrites, FilePosition},
    },
};

use super::{Interrupted, lines, save};
use crate::App;

/// Pause between two counts; doubles from the first to the last while nothing changes. The share is its
/// minimum as a multiple of a count's duration.
const COUNT_FIRST: Duration = Duration::from_millis(200);
const COUNT_LAST: Duration = Duration::from_secs(3);
const COUNT_SHARE: u32 = 20;
/// Longest wait for room in the queue.
const BUSY_LAST: Duration = Duration::from_secs(3);

/// Submits and counts until every line is answered or the batch expires; then the batch is finalizing.
pub(super) async fn submit_and_count(app: &App, claim: &mut BatchClaim) -> Result<(), Interrupted> {
    let mut feed = Feed::new(app, &claim.batch);
    let (mut count_at, mut wait) = (Instant::now() + COUNT_FIRST, COUNT_FIRST);
    loop {
        let now = app.store.now().await?;
        if now >= claim.batch.expires_at {
            app.store.cancel_batch_jobs(claim.batch.id).await?;
            claim.batch.overdue = true;
            claim.batch.enter(BatchState::Finalizing, now);
            return save(app, claim, BatchWrites::default()).await;
        }
        let submitted = feed.submit(app, claim).await?;
        if count_at <= Instant::now() {
            let started = Instant::now();
            let (all_finished, changed) = count(app, claim).await?;
            if all_finished && matches!(submitted, Submitted::All) {
                claim.batch.enter(BatchState::Finalizing, now);
                return save(app, claim, BatchWrites::default()).await;
            }
            if changed {
                save(app, claim, BatchWrites::default()).await?;
            }
            wait = if changed { COUNT_FIRST } else { (wait * 2).min(COUNT_LAST) };
            count_at = Instant::now() + wait.max(started.elapsed() * COUNT_SHARE);
        }
        match submitted {
            Submitted::More => {}
            Submitted::Busy(retry) => sleep(retry.min(BUSY_LAST)).await,
            Submitted::All => sleep(count_at.saturating_duration_since(Instant::now())).await,
        }
    }
}

/// Counts the batch's jobs. Returns whether all submitted jobs are finished, and whether counts changed.
async fn count(app: &App, claim: &mut BatchClaim) -> Result<(bool, bool), StoreError> {
    let progress = app.store.batch_progress(claim.batch.id).await?;
    let unfinished = progress.scheduled + progress.queued + progress.running + progress.retrying;
    let failed = claim.batch.refused + progress.failed + progress.expired + progress.cancelled;
    let changed = (claim.batch.completed, claim.batch.failed) != (progress.completed, failed);
    (claim.batch.completed, claim.batch.failed) = (progress.completed, failed);
    Ok((unfinished == 0, changed))
}

/// Result of submitting the next jobs.
enum Submitted {
    /// They were submitted, or the page had no valid lines.
    More,
    /// The queue is full; try again after this time.
    Busy(Duration),
    /// No lines are left.
    All,
}

/// The lines to submit.
struct Feed {
    pages: mpsc::Receiver<Result<lines::Lines, StoreError>>,
    /// Jobs read but not submitted, each with the position after its line; the next job comes last.
    pending: Vec<(Job, FilePosition)>,
    /// Position after the last line that was read.
    read: FilePosition,
    /// Jobs to submit in the next transaction; fewer when the queue is nearly full.
    chunk: usize,
}

/// Most jobs of one transaction.
const CHUNK_MAX: usize = 1000;

impl Feed {
    fn new(app: &App, batch: &Batch) -> Self {
        let pages = lines::read(&app.store, batch.input, batch.submitted);
        Self { pages, pending: Vec::new(), read: batch.submitted, chunk: CHUNK_MAX }
    }

    /// Submits the next jobs.
    async fn submit(
        &mut self,
        app: &App,
        claim: &mut BatchClaim,
    ) -> Result<Submitted, Interrupted> {
        if self.pending.is_empty() {
            let Some(page) = self.pages.recv().await else { return Ok(Submitted::All) };
            let page = page?;
            self.read = page.last().map_or(self.read, |line| line.after);
            self.pending =
                page.into_iter().rev().filter_map(|line| job(&claim.batch, line)).collect();
            if self.pending.is_empty() {
                return Ok(Submitted::More);
            }
        }
        let first = self.pending.len().saturating_sub(self.chunk);
        let next: Vec<Job> =
            self.pending[first..].iter().rev().map(|(job, _)| job.clone()).collect();
        match app.client.admit(&next).await {
            Ok(()) => {}
            Err(ClientError::Busy { .. }) if next.len() > 1 => {
                self.chunk = (next.len() / 8).max(1);
                return Ok(Submitted::More);
            }
            Err(ClientError::Busy { retry_after, .. }) => return Ok(Submitted::Busy(retry_after)),
            Err(ClientError::Store(error)) => return Err(error.into()),
            Err(other) => return Err(StoreError::Unavailable(Box::new(other)).into()),
        }
        self.chunk = (self.chunk * 2).min(CHUNK_MAX);
        claim.batch.submitted = match first {
            0 => self.read,
            _ => self.pending[first].1,
        };
        save(app, claim, BatchWrites { jobs: &next, ..BatchWrites::default() }).await?;
        self.pending.truncate(first);
        app.client.announce(&next).await;
        tracing::debug!(batch = %claim.batch.id, jobs = next.len(), "lines submitted");
        Ok(Submitted::More)
    }
}

/// Returns the job of a valid line.
fn job(batch: &Batch, line: lines::Line) -> Option<(Job, FilePosition)> {
    let request = line.parsed.ok()?;
    let number = u32::try_from(request.number).ok()?;
    let queue = batch.queue.clone()?;
    let job = Job {
        tenant: batch.tenant.clone(),
        priority: batch.priority,
        expires_at: Some(batch.expires_at),
        ..request.job(batch.id.job(number), queue)
    };
    Some((job, line.after))
}
