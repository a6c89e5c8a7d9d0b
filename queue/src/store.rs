//! The durable state of jobs: the [`Store`] trait and the stores that implement it.
//!
//! A claim raises a job's epoch, notes a random claim id and sets a lease; every later write names both
//! and does nothing when another claim has come since, so a worker that lost its job cannot write. All times are on
//! the store's clock. Every operation is bulk: one statement or one transaction per call. An operation
//! that returns an error has written nothing, unless its documentation says otherwise.
//!
//! | operation | changes |
//! | --- | --- |
//! | `submit` | nothing → queued or scheduled |
//! | `claim` | queued → running, epoch + 1 |
//! | `renew` | the lease of running jobs |
//! | `checkpoint` | the checkpoint of running jobs |
//! | `finish` | running → completed, failed, retrying, expired |
//! | `hand_back`, `hand_back_suspects` | running → queued, epoch + 1, no attempt counted |
//! | `cancel` | any unfinished → cancelled, epoch + 1 |
//! | [`run_now`](WaitingJobs::run_now) | the due time of scheduled and retrying jobs |
//! | [`hold_range`](JobRanges::hold_range) | any unfinished → scheduled without a time, epoch + 1 |
//! | [`release_range`](JobRanges::release_range) | the deadline, and the due time of held jobs |
//! | `reconcile` | due scheduled and retrying → queued; expired lease → queued or failed; deadline passed → expired |
//!
//! The other traits of this module are small, one for each kind of caller; [`Operations`] and
//! [`JobStore`] combines several. [`PostgresStore`] and [`SqliteStore`] implement all traits.

mod attempts;
pub mod bulk;
#[macro_use]
pub mod charges;
pub mod classes;
pub mod dead_letters;
mod error;
pub mod history;
pub mod job_queries;
mod job_query;
mod job_ranges;
pub mod maintenance;
mod page;
mod postgres;
pub mod queue_settings;
mod reconciled;
mod sampler;
mod serving;
mod sqlite;
pub mod tables;
pub mod waiting;
pub mod workers;

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;
pub use charges::Charges;
pub use classes::NumericsClasses;
pub use dead_letters::DeadLetters;
pub use error::StoreError;
pub use history::QueueHistory;
pub use job_queries::{JobFilter, JobQueries};
pub use job_ranges::{ChangedJobs, EndMark, EndedJob, JobEnd, JobEnds, JobRanges, RangedJob};
pub use maintenance::{Maintained, Maintenance};
pub use page::Page;
pub use postgres::{
    Conflict, PoolState, PooledConnection, PostgresOptions, PostgresStore, RETENTION_DEFAULT,
    SchemaError, Submission, SubmitError, Transaction,
};
pub use queue_settings::QueueSettings;
pub use reconciled::{RECONCILED_MAX, Reconciled, Unannounced};
pub use serving::Serving;
pub use sqlite::{AnsweredLine, IngestCounts, IngestedLine, RejectedLine, SqliteStore};
pub use waiting::WaitingJobs;
pub use workers::Workers;

use crate::{
    dispatch::{Entry, Missing},
    job::{Job, JobId, JobState, QueueName, Timestamp},
    outcome::{JobError, Outcome},
};

/// A clock that replaces a store's own.
pub type Clock = Arc<dyn Fn() -> Timestamp + Send + Sync>;

/// The worker that claims, and the length of its lease.
#[derive(Debug, Clone)]
pub struct Claimant<'a> {
    /// Name of the process incarnation, for display; fencing uses the epoch and the claim id.
    pub owner: &'a str,
    /// Length of the lease, from now on the store's clock.
    pub lease: Duration,
    /// A random number that identifies this call.
    pub claim_id: i64,
    /// The only queue of which it claims jobs: one that moved to another queue since it was delivered is not claimed.
    pub queue: Option<&'a QueueName>,
}

impl<'a> Claimant<'a> {
    /// Returns a claimant with a new claim id, for jobs of any queue.
    pub fn new(owner: &'a str, lease: Duration) -> Self {
        Self { owner, lease, claim_id: fastrand::i64(..), queue: None }
    }
}

/// Reference to a claim. Epochs alone may repeat after a store was restored from a backup, or lost its
/// last transactions in a failover.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ClaimRef {
    /// The job.
    pub id: JobId,
    /// The epoch of the claim.
    pub epoch: i64,
    /// The claim id of the call that claimed it.
    pub claim_id: i64,
}

/// A claimed job.
#[derive(Debug, Clone, PartialEq)]
pub struct Claim {
    /// The job as submitted.
    pub job: Job,
    /// The epoch of this claim.
    pub epoch: i64,
    /// The claim id of the call that claimed it.
    pub claim_id: i64,
    /// Attempts that ended before this claim.
    pub attempts: u32,
    /// Whether workers were lost while they ran the job, so that it must run without other jobs. If
    /// this claim is lost as well, that counts as an attempt.
    pub alone: bool,
    /// Time left until the job's deadline, if it has one.
    pub expires_in: Option<Duration>,
    /// Checkpoint of the previous claim, if its lease was lost or it was handed back.
    pub checkpoint: Option<Vec<u8>>,
}

impl Claim {
    /// Returns the reference that later writes name.
    pub fn claim_ref(&self) -> ClaimRef {
        ClaimRef { id: self.job.id, epoch: self.epoch, claim_id: self.claim_id }
    }
}

/// An attempt that ended.
#[derive(Debug, Clone, PartialEq)]
pub struct FinishedAttempt {
    /// The claim of the attempt.
    pub claim: ClaimRef,
    /// How the attempt ended.
    pub outcome: Outcome,
    /// Time from the claim to the first token, if there was one.
    pub first_token: Option<Duration>,
}

/// State of a job after [`Store::finish`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Settled {
    /// The job.
    pub id: JobId,
    /// Its state: terminal, or retrying.
    pub state: JobState,
}

/// A job in a terminal state.
#[derive(Debug, Clone, PartialEq)]
pub struct FinishedJob {
    /// The job.
    pub id: JobId,
    /// Its terminal state.
    pub state: JobState,
    /// The answer or the last error; `None` for a cancelled job.
    pub outcome: Option<Outcome>,
}

/// A job with its state and errors.
#[derive(Debug, Clone, PartialEq)]
pub struct JobRecord {
    /// The job as submitted.
    pub job: Job,
    /// Its state.
    pub state: JobState,
    /// Number of claims, cancels and hand-backs so far.
    pub epoch: i64,
    /// Attempts that ended in an error or a lost lease.
    pub attempts: u32,
    /// The terminal outcome of a completed, failed or expired job.
    pub outcome: Option<Outcome>,
    /// Time at which it reached its terminal state.
    pub finished_at: Option<Timestamp>,
    /// The errors of its attempts, oldest first.
    pub errors: Vec<JobError>,
}

/// Counts of jobs by state, and tokens of the completed ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Progress {
    /// Jobs to run at a later time.
    pub scheduled: u64,
    /// Jobs ready to run.
    pub queued: u64,
    /// Jobs under a lease.
    pub running: u64,
    /// Jobs that wait for another attempt.
    pub retrying: u64,
    /// Answered jobs.
    pub completed: u64,
    /// Dead letters.
    pub failed: u64,
    /// Cancelled jobs.
    pub cancelled: u64,
    /// Jobs past their deadline.
    pub expired: u64,
    /// Prompt tokens of completed jobs.
    pub prompt_tokens: u64,
    /// Generated tokens of completed jobs.
    pub completion_tokens: u64,
}

impl Progress {
    /// Returns the counter of a state.
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

/// The durable state of jobs.
#[async_trait]
pub trait Store: Send + Sync {
    /// Records jobs, in one transaction. A job with a known id stays as it is.
    async fn submit(&self, jobs: &[Job]) -> Result<(), StoreError>;

    /// Claims the jobs that are queued, each with a new epoch and a lease. Ids that are not returned
    /// are finished, not due, unknown, running or in another queue: the caller acknowledges them without running them. A
    /// job that cannot be read ends its attempt with an error.
    async fn claim(&self, ids: &[JobId], by: Claimant<'_>) -> Result<Vec<Claim>, StoreError>;

    /// Extends leases, to between two thirds of `lease` and `lease` from now. A store may extend the lease of
    /// the worker, and with it all of its claims that were renewed before. Takes jobs back that lost their
    /// lease and were not claimed since. Returns the claims that are no longer valid: their work must stop. On
    /// an error the old leases continue.
    async fn renew(
        &self,
        claims: &[ClaimRef],
        lease: Duration,
    ) -> Result<Vec<ClaimRef>, StoreError>;

    /// Saves checkpoints of running attempts, in a format of the caller's; each replaces the job's
    /// previous one. The next claim returns it, unless `finish` ends the attempt, which deletes it.
    /// Returns the claims that are no longer valid: their work must stop.
    async fn checkpoint(&self, saved: &[(ClaimRef, Vec<u8>)]) -> Result<Vec<ClaimRef>, StoreError>;

    /// Records how attempts ended, in one transaction. Writes and returns only attempts whose claim is
    /// the last one of a running job, or of a queued job that lost its lease and was not claimed
    /// since; the results of the other attempts must be discarded. The call may be repeated after an
    /// error.
    async fn finish(&self, finished: &[FinishedAttempt]) -> Result<Vec<Settled>, StoreError>;

    /// Releases claims without counting an attempt; returns the jobs of the claims that were still
    /// valid. Compares claim ids and not epochs, so that claims can be released whose answer was lost.
    async fn hand_back(&self, claims: &[ClaimRef]) -> Result<Vec<JobId>, StoreError>;

    /// Releases claims as [`Self::hand_back`] does. The next claim of each of these jobs runs alone,
    /// because one of them may have broken an engine.
    async fn hand_back_suspects(&self, claims: &[ClaimRef]) -> Result<Vec<JobId>, StoreError>;

    /// Cancels the unfinished jobs; returns their ids.
    async fn cancel(&self, ids: &[JobId]) -> Result<Vec<JobId>, StoreError>;

    /// Applies all due changes to the jobs of every queue (see the module's table). The caller adds
    /// the entries of queued jobs to the dispatcher. An expired lease counts as a lost worker; it
    /// counts as an attempt if the job ran alone. If no reconciler reached the store for a while, the
    /// store was away, and leases are extended instead. What was changed before an error stays changed;
    /// [`Store::queued`] returns those jobs.
    async fn reconcile(&self) -> Result<Reconciled, StoreError>;

    /// Remembers that the dispatcher has the entries of one submission.
    fn announced(&self, entries: &[Entry]);

    /// Returns the oldest jobs of a queue that were queued seconds ago and may be missing from the
    /// dispatcher.
    async fn unannounced(&self, queue: &QueueName) -> Result<Unannounced, StoreError>;

    /// Forgets these jobs: the dispatcher has their entries.
    async fn forget_announcements(&self, done: &Unannounced) -> Result<(), StoreError>;

    /// Returns up to `limit` queued jobs of a queue after the job `after`, in the order of the store: by id, or, in a
    /// store for one process, by the begin of the prompt first. These jobs refill a dispatcher that lost its data.
    async fn queued(
        &self,
        queue: &QueueName,
        after: Option<JobId>,
        limit: u32,
    ) -> Result<Vec<Entry>, StoreError>;

    /// Returns the queued jobs of a queue that a dispatcher needs first when it has lost its data: up to
    /// `each` of every priority and tenant and `limit` in total, high priority first, then round the
    /// tenants, each tenant's oldest first; and what the queue has in total.
    async fn queued_heads(
        &self,
        queue: &QueueName,
        each: u32,
        limit: u32,
    ) -> Result<(Missing, Vec<Entry>), StoreError>;

    /// Returns the time on the clock of leases and deadlines.
    async fn now(&self) -> Result<Timestamp, StoreError>;

    /// Returns the state of a job; `None` if the id is unknown. Cheaper than [`job`](Self::job): reads
    /// one column of one row.
    async fn state(&self, id: JobId) -> Result<Option<JobState>, StoreError>;

    /// Returns a job with its state and errors.
    async fn job(&self, id: JobId) -> Result<Option<JobRecord>, StoreError>;

    /// Returns the jobs in a terminal state, with their outcomes.
    async fn finished(&self, ids: &[JobId]) -> Result<Vec<FinishedJob>, StoreError>;

    /// Returns the number of unfinished jobs of a queue.
    async fn unfinished(&self, queue: &QueueName) -> Result<u64, StoreError>;

    /// Returns counts over one queue, or over all.
    async fn progress(&self, queue: Option<&QueueName>) -> Result<Progress, StoreError>;
}

/// All traits that operators and workers need besides [`Store`].
pub trait Operations:
    QueueSettings
    + QueueHistory
    + NumericsClasses
    + Workers
    + DeadLetters
    + WaitingJobs
    + Maintenance
    + Charges
{
}

impl<S> Operations for S where
    S: QueueSettings
        + QueueHistory
        + NumericsClasses
        + Workers
        + DeadLetters
        + WaitingJobs
        + Maintenance
        + Charges
{
}

/// A store with all that operators do with jobs.
pub trait JobStore: Store + Operations + JobQueries {}

impl<S> JobStore for S where S: Store + Operations + JobQueries {}
