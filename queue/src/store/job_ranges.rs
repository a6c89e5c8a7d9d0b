//! Operations on all jobs with ids in a range, such as those of one batch.

use std::ops::RangeInclusive;

use async_trait::async_trait;

use super::{Progress, StoreError};
use crate::{
    job::{JobId, JobState, Timestamp},
    outcome::Outcome,
};

/// A job of a range in a terminal state.
#[derive(Debug, Clone, PartialEq)]
pub struct EndedJob {
    /// The job.
    pub id: JobId,
    /// Its terminal state.
    pub state: JobState,
    /// The answer or the last error; `None` for a cancelled job.
    pub outcome: Option<Outcome>,
    /// Time at which it finished.
    pub finished_at: Timestamp,
}

/// Result of [`cancel_range`](JobRanges::cancel_range).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CancelledJobs {
    /// Number of cancelled jobs.
    pub jobs: u64,
    /// Whether there may be more unfinished jobs.
    pub more: bool,
}

/// Jobs of a range of ids.
#[async_trait]
pub trait JobRanges: Send + Sync {
    /// Counts the jobs of a range by state; tokens are not counted.
    async fn range_progress(&self, ids: RangeInclusive<JobId>) -> Result<Progress, StoreError>;

    /// Cancels up to `max` unfinished jobs of a range.
    async fn cancel_range(
        &self,
        ids: RangeInclusive<JobId>,
        max: u32,
    ) -> Result<CancelledJobs, StoreError>;

    /// Returns the jobs of a range that are in a terminal state, by ascending id.
    async fn ended_in_range(&self, ids: RangeInclusive<JobId>)
    -> Result<Vec<EndedJob>, StoreError>;
}
