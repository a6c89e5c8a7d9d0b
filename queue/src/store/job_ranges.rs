//! Operations on all jobs with ids in a range, such as those of one batch.

use std::ops::RangeInclusive;

use async_trait::async_trait;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::{Progress, StoreError};
use crate::{
    job::{JobId, JobState, QueueName, Timestamp},
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
    /// The caller's name for its line of a batch.
    pub custom_id: Option<String>,
    /// The key of that line.
    pub line_key: Option<[u8; 32]>,
    /// The shape of the answer of its line, in a batch of lines for several endpoints.
    pub line_shape: Option<String>,
    /// What the answer of its line repeats of the request, if its shape is `response`.
    pub repeated: Map<String, Value>,
}

/// A place in the order in which jobs end, as the store sees it; the default is before all of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct EndMark {
    at: i64,
    id: JobId,
}

impl Default for EndMark {
    fn default() -> Self {
        Self::before_all_of(0)
    }
}

impl EndMark {
    /// The place before all jobs that ended `at`.
    pub(crate) fn before_all_of(at: i64) -> Self {
        Self { at, id: JobId::first_of(Timestamp(0)) }
    }

    /// The place of a job that ended `at`, which counts what the store orders ends by.
    pub(crate) const fn new(at: i64, id: JobId) -> Self {
        Self { at, id }
    }

    /// Returns what the store orders ends by, and the job among those that are equal in that.
    pub(crate) const fn parts(self) -> (i64, JobId) {
        (self.at, self.id)
    }
}

/// The end of a job, without its outcome.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct JobEnd {
    /// The job.
    pub id: JobId,
    /// Its terminal state.
    pub state: JobState,
    /// Time at which it finished.
    pub finished_at: Timestamp,
    /// Its place in the order of ends.
    pub mark: EndMark,
}

/// A page of [`ends_after`](JobRanges::ends_after).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JobEnds {
    /// Jobs in the order in which they ended.
    pub ends: Vec<JobEnd>,
    /// Where to begin at a later time: before what a transaction may add that is not committed yet.
    pub resume: EndMark,
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

    /// Moves up to `max` jobs of a range that wait in other queues to this one: those that run or are held stay. They are due
    /// now, without a checkpoint: the next [`reconcile`](super::Store::reconcile) queues them. A delivery from their old queue
    /// is not claimed ([`Claimant::queue`](super::Claimant::queue)).
    async fn move_range(
        &self,
        ids: RangeInclusive<JobId>,
        to: &QueueName,
        max: u32,
    ) -> Result<ChangedJobs, StoreError>;

    /// Returns those of the jobs that are in a terminal state, by ascending id.
    async fn ended(&self, ids: &[JobId]) -> Result<Vec<EndedJob>, StoreError>;

    /// Returns up to `max` jobs of a range that ended after a mark with an answer or an error, the first first. Cancelled jobs
    /// are left out. A transaction that takes long may add jobs before a mark that was returned.
    async fn ends_after(
        &self,
        ids: RangeInclusive<JobId>,
        mark: EndMark,
        max: u32,
    ) -> Result<JobEnds, StoreError>;

    /// Returns the ids of up to `max` jobs of a range in any state, the first first.
    async fn ids_in_range(
        &self,
        ids: RangeInclusive<JobId>,
        max: u32,
    ) -> Result<Vec<JobId>, StoreError>;
}
