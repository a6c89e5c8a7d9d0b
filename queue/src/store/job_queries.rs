//! What operators look at: the [`JobQueries`] trait.
//!
//! Everything here is bounded, however many jobs there are. A list looks at no more than [`SCAN_MAX`]
//! jobs a page, along one index, and says where it stopped; a count says when it stopped counting;
//! what a queue holds is as it was when somebody sampled it last (see [`history`](super::history)).

use std::time::Duration;

use async_trait::async_trait;

use super::{
    Batch, BatchId, Page, StoreError,
    history::{Period, Point, Snapshot},
    operations::Integrity,
};
use crate::{
    job::{JobId, JobState, Priority, QueueName, Tenant, Timestamp},
    outcome::JobError,
    store::JobRecord,
};

/// Jobs that one page or count looks at.
pub const SCAN_MAX: u32 = 10_000;

/// Which jobs; everything that is set must hold.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct JobFilter {
    /// Whose.
    pub tenant: Option<Tenant>,
    /// Of this model.
    pub model: Option<String>,
    /// In this format.
    pub format: Option<String>,
    /// In this state.
    pub state: Option<JobState>,
    /// Dead letters with this code.
    pub error_code: Option<String>,
    /// Dead letters whose error reads so, numbers and ids aside.
    pub error_signature: Option<String>,
    /// The lines of batches that are called so.
    pub custom_id: Option<String>,
    /// Of this batch.
    pub batch: Option<BatchId>,
    /// Named at this time or later. A batch's jobs are named when it is made.
    pub from: Option<Timestamp>,
    /// Named before this time.
    pub to: Option<Timestamp>,
}

impl JobFilter {
    /// Dead letters of a queue, or of all.
    pub fn dead_letters(queue: Option<&QueueName>) -> Self {
        Self {
            state: Some(JobState::Failed),
            model: queue.map(|queue| queue.model.clone()),
            format: queue.map(|queue| queue.format.clone()),
            ..Self::default()
        }
    }
}

/// A job in a list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JobSummary {
    /// The job.
    pub id: JobId,
    /// Whose it is.
    pub tenant: Tenant,
    /// Where it waits or waited.
    pub queue: QueueName,
    /// How urgent it is.
    pub priority: Priority,
    /// Where it is.
    pub state: JobState,
    /// Attempts that ended in an error or a lost lease.
    pub attempts: u32,
    /// Its name in its batch.
    pub custom_id: Option<String>,
    /// Who claimed it last.
    pub owner: Option<String>,
    /// What its latest attempt ended in, if that was an error.
    pub error_code: Option<String>,
    /// When it came.
    pub submitted_at: Timestamp,
    /// When it was claimed first.
    pub started_at: Option<Timestamp>,
    /// When it ended.
    pub finished_at: Option<Timestamp>,
    /// Tokens of its prompt and its answer, once it is answered.
    pub prompt_tokens: u64,
    /// Tokens of its answer.
    pub completion_tokens: u64,
}

/// Some jobs of a list.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct JobPage {
    /// Those that were found, the latest first.
    pub jobs: Vec<JobSummary>,
    /// Where to look on, if there may be more: also when nothing was found so far.
    pub next: Option<JobId>,
}

/// How many, as far as was counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Count {
    /// So many were found.
    pub jobs: u64,
    /// There may be more: [`SCAN_MAX`] jobs were looked at.
    pub or_more: bool,
}

/// A job from its submission to its end.
#[derive(Debug, Clone, PartialEq)]
pub struct JobHistory {
    /// The job, its state and its outcome.
    pub record: JobRecord,
    /// The dead letter that it repeats.
    pub replay_of: Option<JobId>,
    /// When it came.
    pub submitted_at: Timestamp,
    /// When it was claimed first.
    pub started_at: Option<Timestamp>,
    /// From when on it may run, if it is to wait.
    pub run_at: Option<Timestamp>,
    /// When the present lease ends.
    pub lease_until: Option<Timestamp>,
    /// Every attempt that ended and the one that runs, the oldest first. Claims that were handed back
    /// are none.
    pub attempts: Vec<Attempt>,
}

/// One claim of a job that ended, or runs.
#[derive(Debug, Clone, PartialEq)]
pub struct Attempt {
    /// The claim's.
    pub epoch: i64,
    /// Which process; unknown of attempts that an earlier release recorded.
    pub owner: Option<String>,
    /// When it was claimed.
    pub claimed_at: Option<Timestamp>,
    /// From the claim to its first token.
    pub first_token: Option<Duration>,
    /// When it ended; none while it runs.
    pub ended_at: Option<Timestamp>,
    /// How.
    pub end: AttemptEnd,
}

/// How an attempt ended.
#[derive(Debug, Clone, PartialEq)]
pub enum AttemptEnd {
    /// It runs.
    Running,
    /// In an answer.
    Completed,
    /// In an error, or a lost lease.
    Error(JobError),
    /// With the job's deadline.
    Expired,
}

/// Dead letters of one queue that failed alike.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeadLetterGroup {
    /// The queue.
    pub queue: QueueName,
    /// The errors' code; `unknown` for what an earlier release recorded.
    pub error_code: String,
    /// Their message, numbers and ids aside.
    pub error_signature: String,
    /// How many.
    pub jobs: u64,
    /// The oldest.
    pub first: JobId,
    /// The latest.
    pub last: JobId,
}

/// Dead letters by what they failed with.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct DeadLetterGroups {
    /// The largest first.
    pub groups: Vec<DeadLetterGroup>,
    /// There are more dead letters: the latest [`SCAN_MAX`] were looked at.
    pub or_more: bool,
}

impl DeadLetterGroups {
    pub(super) fn of(groups: Vec<DeadLetterGroup>) -> Self {
        let seen: u64 = groups.iter().map(|group| group.jobs).sum();
        Self { groups, or_more: seen >= u64::from(SCAN_MAX) }
    }
}

/// Reads for operators.
#[async_trait]
pub trait JobQueries: Send + Sync {
    /// Jobs with ids below `page.after`, the latest first (`page.ascending` has no effect).
    ///
    /// # Errors
    /// [`StoreError`].
    async fn jobs(&self, filter: &JobFilter, page: Page<JobId>) -> Result<JobPage, StoreError>;

    /// How many jobs there are, as far as [`SCAN_MAX`] of them tell.
    ///
    /// # Errors
    /// [`StoreError`].
    async fn count_jobs(&self, filter: &JobFilter) -> Result<Count, StoreError>;

    /// All that is known of a job.
    ///
    /// # Errors
    /// [`StoreError`].
    async fn job_history(&self, id: JobId) -> Result<Option<JobHistory>, StoreError>;

    /// The latest dead letters, of one queue or all, by what they failed with.
    ///
    /// # Errors
    /// [`StoreError`].
    async fn dead_letter_groups(
        &self,
        queue: Option<&QueueName>,
    ) -> Result<DeadLetterGroups, StoreError>;

    /// How the queues were when they were sampled last; none before the first time.
    ///
    /// # Errors
    /// [`StoreError`].
    async fn snapshot(&self) -> Result<Option<Snapshot>, StoreError>;

    /// Samples of a queue, or of all together, of the periods that begin in `from..to`, in order.
    ///
    /// # Errors
    /// [`StoreError`].
    async fn samples(
        &self,
        queue: Option<&QueueName>,
        period: Period,
        from: Timestamp,
        to: Timestamp,
    ) -> Result<Vec<Point>, StoreError>;

    /// The latest batches of all tenants, the latest first.
    ///
    /// # Errors
    /// [`StoreError`].
    async fn latest_batches(&self, limit: u32) -> Result<Vec<Batch>, StoreError>;

    /// What all workers counted, those that are gone included.
    ///
    /// # Errors
    /// [`StoreError`].
    async fn integrity(&self) -> Result<Integrity, StoreError>;
}
