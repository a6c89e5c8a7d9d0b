//! Actions on all jobs that a filter matches, in chunks and with an upper limit.
//!
//! There is no transaction over the whole: each chunk is done by itself, and [`BulkResult::next`] says
//! where to continue. Repeating a cancel or a purge is harmless; a replay makes new jobs, so continue
//! from `next`.

use std::time::Duration;

use super::{JobStore, Page, StoreError, dead_letters::Pace, job_queries::JobFilter};
use crate::job::{Job, JobId, JobState};

/// Jobs of one chunk.
const CHUNK: u32 = 500;
/// Maximum number of pages that one call reads.
const PAGES_MAX: u32 = 64;
/// Maximum number of jobs that one call changes.
pub const BULK_MAX: u64 = 10_000;

/// Result of one call.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct BulkResult {
    /// Number of jobs changed.
    pub done: u64,
    /// Id at which to continue if there may be more jobs.
    pub next: Option<JobId>,
    /// New jobs of a replay; the caller adds their entries to the dispatcher.
    pub jobs: Vec<Job>,
}

/// An action on jobs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BulkAction {
    /// Cancel unfinished jobs.
    Cancel,
    /// Submit dead letters again.
    Replay {
        /// Jobs that become due per second; `None`: all at once.
        per_second: Option<u32>,
    },
    /// Delete dead letters.
    Purge,
}

/// Applies an action to up to `most` jobs that match a filter and have ids below `after`, the newest
/// first. Changes made before an error remain.
pub async fn apply(
    store: &(impl JobStore + ?Sized),
    filter: &JobFilter,
    action: BulkAction,
    after: Option<JobId>,
    most: u64,
) -> Result<BulkResult, StoreError> {
    let filter = match action {
        BulkAction::Cancel => filter.clone(),
        BulkAction::Replay { .. } | BulkAction::Purge => {
            JobFilter { state: Some(JobState::Failed), ..filter.clone() }
        }
    };
    let most = most.min(BULK_MAX);
    let now = store.now().await?;
    let mut bulk = BulkResult { next: after, ..BulkResult::default() };
    for _ in 0..PAGES_MAX {
        let left = u32::try_from(most - bulk.done).unwrap_or(CHUNK).min(CHUNK);
        if left == 0 {
            return Ok(bulk);
        }
        let page = Page { after: bulk.next, limit: left, ascending: false };
        let found = store.jobs(&filter, page).await?;
        let ids: Vec<JobId> = found.jobs.iter().map(|job| job.id).collect();
        bulk.next = found.next;
        match action {
            _ if ids.is_empty() => {}
            BulkAction::Cancel => bulk.done += store.cancel(&ids).await?.len() as u64,
            BulkAction::Purge => bulk.done += store.purge(&ids).await?,
            BulkAction::Replay { per_second } => {
                let pace = per_second.map(|rate| {
                    let every = Duration::from_secs(1) / rate.max(1);
                    let before = u32::try_from(bulk.done).unwrap_or(u32::MAX);
                    Pace { from: now.after(every.saturating_mul(before)), every }
                });
                let replays = store.replay(&ids, pace).await?;
                bulk.done += replays.len() as u64;
                bulk.jobs.extend(replays.into_iter().map(|replay| replay.job));
            }
        }
        if bulk.next.is_none() {
            return Ok(bulk);
        }
    }
    Ok(bulk)
}
