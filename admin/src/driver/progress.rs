//! The second step: lines become jobs as there is room, and are counted as they end.

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
use crate::app::App;

/// Between two counts: grows from the first to the last while nothing changes, and is no less than
/// so many times what a count takes.
const COUNT_FIRST: Duration = Duration::from_millis(200);
const COUNT_LAST: Duration = Duration::from_secs(3);
const COUNT_SHARE: u32 = 20;
/// Longest wait for room in the queue.
const BUSY_LAST: Duration = Duration::from_secs(3);

/// Submits and counts until every line is answered, or time is up; then the batch is finalizing.
pub(super) async fn answer(app: &App, held: &mut BatchClaim) -> Result<(), Interrupted> {
    let mut feed = Feed::of(app, &held.batch);
    let (mut count_at, mut wait) = (Instant::now() + COUNT_FIRST, COUNT_FIRST);
    loop {
        let now = app.store().now().await?;
        if now >= held.batch.expires_at {
            app.store().cancel_batch_jobs(held.batch.id).await?;
            held.batch.overdue = true;
            held.batch.enter(BatchState::Finalizing, now);
            return save(app, held, BatchWrites::default()).await;
        }
        let fed = feed.submit(app, held).await?;
        if count_at <= Instant::now() {
            let started = Instant::now();
            let (is_over, changed) = count(app, held).await?;
            if is_over && matches!(fed, Fed::All) {
                held.batch.enter(BatchState::Finalizing, now);
                return save(app, held, BatchWrites::default()).await;
            }
            if changed {
                save(app, held, BatchWrites::default()).await?;
            }
            wait = if changed { COUNT_FIRST } else { (wait * 2).min(COUNT_LAST) };
            count_at = Instant::now() + wait.max(started.elapsed() * COUNT_SHARE);
        }
        match fed {
            Fed::More => {}
            Fed::Busy(retry) => sleep(retry.min(BUSY_LAST)).await,
            Fed::All => sleep(count_at.saturating_duration_since(Instant::now())).await,
        }
    }
}

/// Counts the batch's jobs: whether all that were submitted are over, and whether anything changed.
async fn count(app: &App, held: &mut BatchClaim) -> Result<(bool, bool), StoreError> {
    let progress = app.store().batch_progress(held.batch.id).await?;
    let unfinished = progress.scheduled + progress.queued + progress.running + progress.retrying;
    let failed = held.batch.refused + progress.failed + progress.expired + progress.cancelled;
    let changed = (held.batch.completed, held.batch.failed) != (progress.completed, failed);
    (held.batch.completed, held.batch.failed) = (progress.completed, failed);
    Ok((unfinished == 0, changed))
}

/// What became of the next jobs.
enum Fed {
    /// They were submitted.
    More,
    /// There is no room for them yet.
    Busy(Duration),
    /// There are none.
    All,
}

/// The lines that are to be submitted.
struct Feed {
    pages: mpsc::Receiver<Result<lines::Lines, StoreError>>,
    /// Read, not submitted, each with the place after its line, the next one last.
    waiting: Vec<(Job, FilePosition)>,
    /// Where the last line that was read ends.
    read: FilePosition,
    /// Jobs that are tried together: fewer when there is no room.
    together: usize,
}

/// Jobs of one transaction.
const TOGETHER: usize = 1000;

impl Feed {
    fn of(app: &App, batch: &Batch) -> Self {
        let pages = lines::read(app.store(), batch.input, batch.submitted);
        Self { pages, waiting: Vec::new(), read: batch.submitted, together: TOGETHER }
    }

    /// Submits the next jobs.
    async fn submit(&mut self, app: &App, held: &mut BatchClaim) -> Result<Fed, Interrupted> {
        if self.waiting.is_empty() {
            let Some(page) = self.pages.recv().await else { return Ok(Fed::All) };
            let page = page?;
            self.read = page.last().map_or(self.read, |line| line.after);
            self.waiting =
                page.into_iter().rev().filter_map(|line| job(&held.batch, line)).collect();
            if self.waiting.is_empty() {
                return Ok(Fed::More);
            }
        }
        let first = self.waiting.len().saturating_sub(self.together);
        let next: Vec<Job> =
            self.waiting[first..].iter().rev().map(|(job, _)| job.clone()).collect();
        match app.client().admit(&next).await {
            Ok(()) => {}
            Err(ClientError::Busy { .. }) if next.len() > 1 => {
                self.together = (next.len() / 8).max(1);
                return Ok(Fed::More);
            }
            Err(ClientError::Busy { retry_after, .. }) => return Ok(Fed::Busy(retry_after)),
            Err(ClientError::Store(error)) => return Err(error.into()),
            Err(other) => return Err(StoreError::Unavailable(Box::new(other)).into()),
        }
        self.together = (self.together * 2).min(TOGETHER);
        held.batch.submitted = match first {
            0 => self.read,
            _ => self.waiting[first].1,
        };
        save(app, held, BatchWrites { jobs: &next, ..BatchWrites::default() }).await?;
        self.waiting.truncate(first);
        app.client().announce(&next).await;
        tracing::debug!(batch = %held.batch.id, jobs = next.len(), "lines submitted");
        Ok(Fed::More)
    }
}

/// The job of a line, if it is one's.
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
