//! The durable truth: the [`Store`] trait.
//!
//! A claim raises a job's epoch and sets its lease; every later write names (id, epoch) and does
//! nothing when the epoch has moved on, so a worker that lost its lease cannot write. All times are
//! on the store's clock. Every operation is bulk: one statement or one transaction per call.
//!
//! | operation | moves |
//! | --- | --- |
//! | `submit` | nothing → queued or scheduled |
//! | `claim` | queued, or running with its lease over → running, epoch + 1 |
//! | `renew` | lease of running jobs |
//! | `checkpoint` | what running jobs have saved |
//! | `finish` | running → completed, failed, retrying, expired |
//! | `hand_back` | running → queued, epoch + 1, no attempt counted |
//! | `cancel` | any unfinished → cancelled, epoch + 1 |
//! | `reconcile` | due scheduled and retrying → queued; lease over → queued or failed; deadline over → expired |

mod attempts;
pub mod audit;
pub mod batches;
pub mod bulk;
pub mod classes;
pub mod files;
pub mod history;
pub mod job_queries;
mod job_query;
pub mod keys;
pub mod operations;
mod postgres;
mod redis;
mod sampler;
pub mod sessions;
mod sqlite;
pub mod webhooks;

use std::time::Duration;

use async_trait::async_trait;
pub use audit::Audit;
pub use batches::{Batch, BatchId, BatchState, Batches};
pub use files::{FileId, Files, Page};
pub use job_queries::{JobFilter, JobQueries};
pub use keys::{ApiKey, KeyRole, Keys};
pub use operations::Operations;
pub use postgres::{
    Conflict, Maintained, PostgresOptions, PostgresStore, RETENTION_DEFAULT, SchemaError,
    Submission, SubmitError,
};
pub use redis::{AcceptError, FAST_RETENTION, RedisConfigError, RedisStore};
pub use sessions::Sessions;
pub use sqlite::{AnsweredLine, Clock, IngestCounts, IngestedLine, RejectedLine, SqliteStore};

use crate::{
    dispatch::Entry,
    job::{Job, JobId, JobState, QueueName, Timestamp},
    outcome::{JobError, Outcome},
};

/// Who claims, and for how long.
#[derive(Debug, Clone)]
pub struct Claimant<'a> {
    /// Name of the process incarnation; for people, fencing goes by epoch.
    pub owner: &'a str,
    /// From now on the store's clock.
    pub lease: Duration,
}

/// A job somebody holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ClaimRef {
    /// The job.
    pub id: JobId,
    /// The epoch of the claim.
    pub epoch: i64,
}

/// A claimed job.
#[derive(Debug, Clone, PartialEq)]
pub struct Claim {
    /// The job as submitted.
    pub job: Job,
    /// The epoch of this claim.
    pub epoch: i64,
    /// Attempts that ended before this claim.
    pub attempts: u32,
    /// What the job's deadline leaves, if it has one.
    pub expires_in: Option<Duration>,
    /// What the claim before this one saved, if its lease was lost or it was handed back.
    pub checkpoint: Option<Vec<u8>>,
}

impl Claim {
    /// The claim's id and epoch.
    pub fn claim_ref(&self) -> ClaimRef {
        ClaimRef { id: self.job.id, epoch: self.epoch }
    }
}

/// An attempt that ended.
#[derive(Debug, Clone, PartialEq)]
pub struct FinishedAttempt {
    /// Under which claim.
    pub claim: ClaimRef,
    /// How.
    pub outcome: Outcome,
    /// From the claim to its first token, if it got so far.
    pub first_token: Option<Duration>,
}

/// Where a finished attempt left its job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Settled {
    /// The job.
    pub id: JobId,
    /// Its state now: terminal, or retrying.
    pub state: JobState,
}

/// A job that is over.
#[derive(Debug, Clone, PartialEq)]
pub struct FinishedJob {
    /// The job.
    pub id: JobId,
    /// A terminal state.
    pub state: JobState,
    /// The answer or the last error; none for a cancelled job.
    pub outcome: Option<Outcome>,
}

/// A job as the store knows it.
#[derive(Debug, Clone, PartialEq)]
pub struct JobRecord {
    /// As submitted.
    pub job: Job,
    /// Where it is.
    pub state: JobState,
    /// Claims, cancels and hand-backs so far.
    pub epoch: i64,
    /// Attempts that ended in an error or a lost lease.
    pub attempts: u32,
    /// The terminal outcome of a completed, failed or expired job.
    pub outcome: Option<Outcome>,
    /// When it ended.
    pub finished_at: Option<Timestamp>,
    /// Every error of every attempt, oldest first.
    pub errors: Vec<JobError>,
}

/// Most jobs that [`Reconciled`] names.
pub const RECONCILED_MAX: usize = 8192;

/// What time has moved.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Reconciled {
    /// Jobs that changed their state.
    pub moved: u64,
    /// Those of them whose lease was over.
    pub lapsed: u64,
    /// Those that are queued now, of any queue, no more than [`RECONCILED_MAX`]: a dispatcher may
    /// not know them, and the rest is found by [`Store::queued`].
    pub queued: Vec<Entry>,
}

impl Reconciled {
    /// Adds what another statement moved.
    fn extend(&mut self, moved: u64, queued: impl IntoIterator<Item = Entry>) {
        self.moved += moved;
        let room = RECONCILED_MAX.saturating_sub(self.queued.len());
        self.queued.extend(queued.into_iter().take(room));
    }
}

/// Counts of jobs by state, and tokens of the completed ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Progress {
    /// Waiting for their time.
    pub scheduled: u64,
    /// Ready.
    pub queued: u64,
    /// Under a lease.
    pub running: u64,
    /// Waiting for another attempt.
    pub retrying: u64,
    /// Answered.
    pub completed: u64,
    /// Dead letters.
    pub failed: u64,
    /// Withdrawn.
    pub cancelled: u64,
    /// Too late.
    pub expired: u64,
    /// Prompt tokens of completed jobs.
    pub prompt_tokens: u64,
    /// Generated tokens of completed jobs.
    pub completion_tokens: u64,
}

impl Progress {
    /// The counter of a state.
    pub fn counter(&mut self, state: JobState) -> &mut u64 {
        match state {
            JobState::Scheduled => &mut self.scheduled,
            JobState::Queued => &mut self.queued,
            JobState::Running => &mut self.running,
            JobState::Retrying => &mut self.retrying,
            JobState::Completed => &mut self.completed,
            JobState::Failed => &mut self.failed,
            JobState::Cancelled => &mut self.cancelled,
            JobState::Expired => &mut self.expired,
        }
    }
}

/// A store that did not do as told. Nothing of the call was written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The database refused or cannot be reached; the call may be repeated.
    #[error("store unavailable: {0}")]
    Unavailable(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The database's schema cannot be brought up to date.
    #[error("store cannot be migrated: {0}")]
    Migrate(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// A job of another queue than the store keeps.
    #[error("job {job} is not of queue {queue}, whose jobs are kept here")]
    OtherQueue {
        /// The job.
        job: JobId,
        /// The store's queue.
        queue: QueueName,
    },
    /// A value that the store cannot hold: the call may not be repeated as it is.
    #[error("{what} cannot be stored: {problem}")]
    InvalidValue {
        /// Which field.
        what: &'static str,
        /// Why not.
        problem: String,
    },
    /// A row that this program did not write.
    #[error("stored {what} is damaged: {detail}")]
    Damaged {
        /// Which column.
        what: &'static str,
        /// What was found.
        detail: String,
    },
}

/// The durable truth about jobs.
#[async_trait]
pub trait Store: Send + Sync {
    /// Records jobs, in one transaction. A job whose id is known already stays as it is.
    ///
    /// # Errors
    /// [`StoreError`]; then none was recorded.
    async fn submit(&self, jobs: &[Job]) -> Result<(), StoreError>;

    /// Claims those of `ids` that are queued or whose lease is over, each with a new epoch and a
    /// lease. Ids that do not come back are over, waiting, unknown or under a live lease: the
    /// caller acknowledges and forgets them.
    ///
    /// # Errors
    /// [`StoreError`]; then none was claimed.
    async fn claim(&self, ids: &[JobId], by: Claimant<'_>) -> Result<Vec<Claim>, StoreError>;

    /// Extends leases to `lease` from now and returns the claims that hold no more: their work
    /// must stop.
    ///
    /// # Errors
    /// [`StoreError`]; then the old leases run on.
    async fn renew(&self, held: &[ClaimRef], lease: Duration) -> Result<Vec<ClaimRef>, StoreError>;

    /// Saves what running attempts have generated so far, in bytes of the caller's; each replaces
    /// what the job had. The next claim brings it back, unless the attempt ends by `finish`, which
    /// clears it. Returns the claims that hold no more: their work must stop.
    ///
    /// # Errors
    /// [`StoreError`]; then nothing was saved.
    async fn checkpoint(&self, saved: &[(ClaimRef, Vec<u8>)]) -> Result<Vec<ClaimRef>, StoreError>;

    /// Records how attempts ended, in one transaction. Only those whose epoch still matches a
    /// running job are written and returned; the others were fenced out and must be discarded.
    ///
    /// # Errors
    /// [`StoreError`]; then none was written, and the call may be repeated.
    async fn finish(&self, finished: &[FinishedAttempt]) -> Result<Vec<Settled>, StoreError>;

    /// Gives claims back without counting an attempt; returns those that were still held.
    ///
    /// # Errors
    /// [`StoreError`].
    async fn hand_back(&self, held: &[ClaimRef]) -> Result<Vec<JobId>, StoreError>;

    /// Withdraws jobs that are not over; returns those it withdrew.
    ///
    /// # Errors
    /// [`StoreError`].
    async fn cancel(&self, ids: &[JobId]) -> Result<Vec<JobId>, StoreError>;

    /// Moves what time has moved (see the module's table), of every queue, and says what: the
    /// caller hands what was queued to the dispatcher. A lost lease counts as an attempt here.
    ///
    /// # Errors
    /// [`StoreError`]; what was moved until then is found by [`Store::queued`].
    async fn reconcile(&self) -> Result<Reconciled, StoreError>;

    /// Up to `limit` queued jobs of a queue with an id above `after`, in order of id: what a
    /// dispatcher that came back empty must be fed.
    ///
    /// # Errors
    /// [`StoreError`].
    async fn queued(
        &self,
        queue: &QueueName,
        after: Option<JobId>,
        limit: u32,
    ) -> Result<Vec<Entry>, StoreError>;

    /// The time, on the clock that leases and deadlines go by.
    ///
    /// # Errors
    /// [`StoreError`].
    async fn now(&self) -> Result<Timestamp, StoreError>;

    /// A job's whole story.
    ///
    /// # Errors
    /// [`StoreError`].
    async fn job(&self, id: JobId) -> Result<Option<JobRecord>, StoreError>;

    /// Those of `ids` that are over, and how.
    ///
    /// # Errors
    /// [`StoreError`].
    async fn finished(&self, ids: &[JobId]) -> Result<Vec<FinishedJob>, StoreError>;

    /// How many jobs of a queue are not over.
    ///
    /// # Errors
    /// [`StoreError`].
    async fn unfinished(&self, queue: &QueueName) -> Result<u64, StoreError>;

    /// Counts over one queue, or over everything.
    ///
    /// # Errors
    /// [`StoreError`].
    async fn progress(&self, queue: Option<&QueueName>) -> Result<Progress, StoreError>;
}

/// A store that HTTP clients can be served from, and operators.
pub trait FrontStore:
    Store + Keys + Sessions + Files + Batches + Operations + JobQueries + Audit
{
}

impl<S: Store + Keys + Sessions + Files + Batches + Operations + JobQueries + Audit> FrontStore
    for S
{
}
