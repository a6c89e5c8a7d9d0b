//! Acts on many jobs at once: whatever a filter finds, in chunks, so far and no further.
//!
//! Nothing here is one transaction: each chunk is done by itself, and [`BulkResult::next`] says where to go
//! on. Doing the same again is harmless to what was withdrawn or purged; a replay makes new jobs, so
//! whoever goes on goes on from there.

use std::time::Duration;

use super::{FrontStore, Page, StoreError, job_queries::JobFilter, operations::Pace};
use crate::job::{Job, JobId, JobState};

/// Jobs of one chunk.
const CHUNK: u32 = 500;
/// Pages of one call that may turn out to be empty.
const PAGES_MAX: u32 = 64;
/// Most jobs of one call.
pub const BULK_MAX: u64 = 10_000;

/// What one call did.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct BulkResult {
    /// Jobs that it changed.
    pub done: u64,
    /// Where to go on, if there may be more.
    pub next: Option<JobId>,
    /// New jobs, of replays: the caller hands them to the dispatcher.
    pub jobs: Vec<Job>,
}

/// What is to be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BulkAction {
    /// Withdraw what is not over.
    Cancel,
    /// Submit dead letters again.
    Replay {
        /// How many of a call may begin a second; the others wait. None: all at once.
        per_second: Option<u32>,
    },
    /// Delete dead letters.
    Purge,
}

/// Acts on up to `most` jobs that a filter finds, with ids below `after`, the latest first.
///
/// # Errors
/// [`StoreError`]; what was done until then stays done.
pub async fn apply(
    store: &dyn FrontStore,
    filter: &JobFilter,
    act: BulkAction,
    after: Option<JobId>,
    most: u64,
) -> Result<BulkResult, StoreError> {
    let filter = match act {
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
        match act {
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
