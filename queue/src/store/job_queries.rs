//! Queries of operators about jobs: the [`JobQueries`] trait.
//!
//! The cost of each query is bounded, however many jobs there are. A list scans at most [`SCAN_MAX`] jobs
//! per page along one index and returns where it stopped; a count says whether it stopped early.

use std::{ops::RangeInclusive, time::Duration};

use async_trait::async_trait;

use super::{Page, StoreError};
use crate::{
    job::{JobId, JobState, Priority, QueueName, Tenant, Timestamp},
    outcome::JobError,
    store::JobRecord,
};

/// Maximum number of jobs that one page or count scans.
pub const SCAN_MAX: u32 = 10_000;

/// Maximum number of batches that a search by metadata looks into.
pub const RANGES_MAX: usize = 20;

/// A pair of a job's metadata, or of its batch's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MetadataFilter {
    /// Name of the pair.
    pub name: String,
    /// Its value.
    pub value: String,
    /// Ids of the jobs of batches with this pair, which need not have it themselves. At most [`RANGES_MAX`] are used.
    pub batches: Vec<RangeInclusive<JobId>>,
}

/// Conditions on jobs. A job matches if it meets every condition that is set.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct JobFilter {
    /// The tenant.
    pub tenant: Option<Tenant>,
    /// The model.
    pub model: Option<String>,
    /// The format.
    pub format: Option<String>,
    /// The state.
    pub state: Option<JobState>,
    /// Code of a dead letter's error.
    pub error_code: Option<String>,
    /// Signature of a dead letter's error: its message without numbers and ids.
    pub error_signature: Option<String>,
    /// The caller's name for a line of a batch.
    pub custom_id: Option<String>,
    /// The beginning of that name. No index answers it: each page tests the jobs that it scans.
    pub custom_id_prefix: Option<String>,
    /// A pair of the caller's metadata.
    pub metadata: Option<MetadataFilter>,
    /// The worker that claimed the job last.
    pub owner: Option<String>,
    /// Ids in a range, such as those of a batch.
    pub ids: Option<RangeInclusive<JobId>>,
    /// Earliest time of the id. The ids of a batch's jobs have the time of the batch.
    pub from: Option<Timestamp>,
    /// End of the range of id times; excluded.
    pub to: Option<Timestamp>,
}

impl JobFilter {
    /// Creates a filter for the dead letters of a queue, or of all queues.
    pub fn dead_letters(queue: Option<&QueueName>) -> Self {
        Self {
            state: Some(JobState::Failed),
            model: queue.map(|queue| queue.model.clone()),
            format: queue.map(|queue| queue.format.clone()),
            ..Self::default()
        }
    }

    /// Limits the ids to a range, beside the one that the filter has.
    #[must_use]
    pub fn within(mut self, ids: Option<RangeInclusive<JobId>>) -> Self {
        self.ids = match (self.ids, ids) {
            (Some(one), Some(other)) => {
                Some(*one.start().max(other.start())..=*one.end().min(other.end()))
            }
            (one, other) => one.or(other),
        };
        self
    }

    /// Returns the state of all jobs that match, if there is only one: a search by error finds dead
    /// letters.
    pub(super) fn queried_state(&self) -> Option<JobState> {
        let of_errors = self.error_code.is_some() || self.error_signature.is_some();
        self.state.or(of_errors.then_some(JobState::Failed))
    }
}

/// A job in a list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JobSummary {
    /// The job.
    pub id: JobId,
    /// Its tenant.
    pub tenant: Tenant,
    /// Its queue.
    pub queue: QueueName,
    /// Its priority.
    pub priority: Priority,
    /// Its state.
    pub state: JobState,
    /// Attempts that ended in an error or a lost lease.
    pub attempts: u32,
    /// The caller's name for the job in its batch.
    pub custom_id: Option<String>,
    /// The worker that claimed it last.
    pub owner: Option<String>,
    /// Error code of its latest attempt, if that ended in an error.
    pub error_code: Option<String>,
    /// Submission time.
    pub submitted_at: Timestamp,
    /// Time of the first claim.
    pub started_at: Option<Timestamp>,
    /// Time at which it reached its terminal state.
    pub finished_at: Option<Timestamp>,
    /// Tokens of its prompt, once it is completed.
    pub prompt_tokens: u64,
    /// Tokens of its answer, once it is completed.
    pub completion_tokens: u64,
}

/// A page of a list of jobs.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct JobPage {
    /// The jobs found, the newest first.
    pub jobs: Vec<JobSummary>,
    /// Id at which to continue if there may be more jobs; may be set although no job was found.
    pub next: Option<JobId>,
}

/// A number of jobs, possibly incomplete.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Count {
    /// Jobs counted.
    pub jobs: u64,
    /// There may be more: the count stopped after [`SCAN_MAX`] jobs.
    pub or_more: bool,
}

/// A job's attempts and errors, from its submission to its end.
#[derive(Debug, Clone, PartialEq)]
pub struct JobHistory {
    /// The job, its state and its outcome.
    pub record: JobRecord,
    /// The dead letter that the job replays.
    pub replay_of: Option<JobId>,
    /// Submission time.
    pub submitted_at: Timestamp,
    /// Time of the first claim.
    pub started_at: Option<Timestamp>,
    /// Time at which it is due, if it is scheduled or retrying.
    pub run_at: Option<Timestamp>,
    /// End of the current lease.
    pub lease_until: Option<Timestamp>,
    /// The ended attempts and the running one, oldest first. Claims that were handed back are not
    /// attempts.
    pub attempts: Vec<Attempt>,
}

/// One attempt at a job, ended or running.
#[derive(Debug, Clone, PartialEq)]
pub struct Attempt {
    /// Epoch of its claim.
    pub epoch: i64,
    /// Worker of the attempt, if recorded.
    pub owner: Option<String>,
    /// Time of the claim.
    pub claimed_at: Option<Timestamp>,
    /// Time from the claim to the first token.
    pub first_token: Option<Duration>,
    /// Time of its end; `None` while it runs.
    pub ended_at: Option<Timestamp>,
    /// How the attempt ended.
    pub end: AttemptEnd,
}

/// How an attempt ended.
#[derive(Debug, Clone, PartialEq)]
pub enum AttemptEnd {
    /// The attempt is still running.
    Running,
    /// The attempt ended with an answer.
    Completed,
    /// The attempt ended with an error or a lost lease.
    Error(JobError),
    /// The attempt ended at the job's deadline.
    Expired,
}

/// An attempt that ended in an error.
#[derive(Debug, Clone, PartialEq)]
pub struct AttemptFailure {
    /// The job.
    pub id: JobId,
    /// Time of the error.
    pub at: Timestamp,
    /// The error.
    pub error: JobError,
}

/// Dead letters of one queue with the same error.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeadLetterGroup {
    /// The queue.
    pub queue: QueueName,
    /// Code of the error; `unknown` if none was recorded.
    pub error_code: String,
    /// Message of the error without numbers and ids.
    pub error_signature: String,
    /// Number of dead letters.
    pub jobs: u64,
    /// The oldest dead letter.
    pub first: JobId,
    /// The newest dead letter.
    pub last: JobId,
}

/// Dead letters grouped by error.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct DeadLetterGroups {
    /// The groups, the largest first.
    pub groups: Vec<DeadLetterGroup>,
    /// There may be more dead letters: only the newest [`SCAN_MAX`] were scanned.
    pub or_more: bool,
}

impl DeadLetterGroups {
    pub(super) fn from_groups(groups: Vec<DeadLetterGroup>) -> Self {
        let seen: u64 = groups.iter().map(|group| group.jobs).sum();
        Self { groups, or_more: seen >= u64::from(SCAN_MAX) }
    }
}

/// Queries of operators about jobs.
#[async_trait]
pub trait JobQueries: Send + Sync {
    /// Returns jobs with ids below `page.after`, the newest first (`page.ascending` has no effect).
    async fn jobs(&self, filter: &JobFilter, page: Page<JobId>) -> Result<JobPage, StoreError>;

    /// Counts jobs, scanning at most [`SCAN_MAX`].
    async fn count_jobs(&self, filter: &JobFilter) -> Result<Count, StoreError>;

    /// Returns a job with its attempts and errors.
    async fn job_history(&self, id: JobId) -> Result<Option<JobHistory>, StoreError>;

    /// Groups the newest dead letters of one queue, or of all, by error.
    async fn dead_letter_groups(
        &self,
        queue: Option<&QueueName>,
    ) -> Result<DeadLetterGroups, StoreError>;

    /// Returns up to `limit` attempts of a worker that ended in an error, those of the newest jobs first. Scans the
    /// latest [`SCAN_MAX`] errors of all workers.
    async fn worker_failures(
        &self,
        owner: &str,
        limit: u32,
    ) -> Result<Vec<AttemptFailure>, StoreError>;

    /// Returns up to `limit` tenants with jobs, by name, from the one that follows `after`. Its cost depends on the
    /// number of tenants returned, not of jobs.
    async fn job_tenants(
        &self,
        after: Option<&Tenant>,
        limit: u32,
    ) -> Result<Vec<Tenant>, StoreError>;
}
