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

/// The state of a job of a range.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RangedJob {
    /// The job.
    pub id: JobId,
    /// The caller's name for it.
    pub custom_id: Option<String>,
    /// Its state.
    pub state: JobState,
    /// Time at which it finished.
    pub finished_at: Option<Timestamp>,
}

/// Result of a change of some jobs of a range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChangedJobs {
    /// Number of changed jobs.
    pub jobs: u64,
    /// Whether there may be more jobs to change.
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
    ) -> Result<ChangedJobs, StoreError>;

    /// Returns the jobs of a range that are in a terminal state, by ascending id.
    async fn ended_in_range(&self, ids: RangeInclusive<JobId>)
    -> Result<Vec<EndedJob>, StoreError>;

    /// Returns whether a range has a job in a terminal state.
    async fn has_ended(&self, ids: RangeInclusive<JobId>) -> Result<bool, StoreError>;

    /// Returns the jobs of a range in any state, by ascending id.
    async fn states_in_range(
        &self,
        ids: RangeInclusive<JobId>,
    ) -> Result<Vec<RangedJob>, StoreError>;

    /// Returns the jobs of a range that have one of these names.
    async fn named_in_range(
        &self,
        ids: RangeInclusive<JobId>,
        custom_ids: &[String],
    ) -> Result<Vec<RangedJob>, StoreError>;

    /// Holds up to `max` unfinished jobs of a range: no worker can claim them, and they have no deadline. They keep
    /// their checkpoints. With `running`, the claims of running jobs end as well, and these jobs are held; without it
    /// they go on, and lose their deadline in the store. Held jobs are scheduled, without a time.
    async fn hold_range(
        &self,
        ids: RangeInclusive<JobId>,
        running: bool,
        max: u32,
    ) -> Result<ChangedJobs, StoreError>;

    /// Gives up to `max` unfinished jobs of a range this deadline. Held ones are due now: the next
    /// [`reconcile`](super::Store::reconcile) queues them.
    async fn release_range(
        &self,
        ids: RangeInclusive<JobId>,
        expires_at: Timestamp,
        max: u32,
    ) -> Result<ChangedJobs, StoreError>;
}
