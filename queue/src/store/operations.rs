//! What people who run a fleet set and see: the [`Operations`] trait.
//!
//! Queues can be paused and bounded, and belong to one numerics class; workers are listed by their
//! heartbeats and asked to drain; dead letters are read, replayed or purged. The store keeps these
//! settings; who obeys them is the producer (limits) and the worker (pauses, drains, classes).

use std::time::Duration;

use async_trait::async_trait;

use super::{JobRecord, Maintained, Progress, StoreError};
use crate::dispatch::Quotas;
use crate::job::{Job, JobId, JobState, Priority, QueueName, Tenant, Timestamp};

/// What is set for a queue.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QueueState {
    /// The queue.
    pub queue: QueueName,
    /// Whether workers leave it alone.
    pub paused: bool,
    /// Bound of its backlog, in tokens; `None` is the program's default.
    pub limit_tokens: Option<u64>,
    /// The numerics class of its first worker.
    pub class: Option<String>,
}

/// A queue in a list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QueueOverview {
    /// What is set.
    pub settings: QueueState,
    /// Its jobs by state, and the tokens of the completed ones.
    pub progress: Progress,
    /// How long ago the oldest queued job was submitted.
    pub oldest_queued: Option<Duration>,
    /// Waiting jobs whose deadline has passed: they expire when a worker, of whatever queue, looks.
    pub overdue: u64,
    /// Workers that serve it and were heard of lately.
    pub workers: u64,
}

/// A worker that would answer otherwise than the queue's other workers.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClassError {
    /// The queue has another class: its jobs would depend on who runs them.
    #[error("queue {queue} has numerics class '{registered}', not '{offered}'")]
    Mismatch {
        /// The queue.
        queue: QueueName,
        /// The class of its first worker.
        registered: String,
        /// The class that was refused.
        offered: String,
    },
    /// The store did not answer.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// A numerics class that must stay.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ResetClassError {
    /// Workers of this class live: one of another class beside them would answer otherwise.
    #[error("queue {queue} is served by {}: drain them first", .workers.join(", "))]
    Served {
        /// The queue.
        queue: QueueName,
        /// Names of the workers, as in their heartbeats.
        workers: Vec<String>,
    },
    /// The store did not answer.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// A worker that was silent for longer is not taken for alive: some dozen heartbeats.
pub const SILENT_ALIVE_MAX: Duration = Duration::from_secs(30);

/// What a worker says of itself, every few seconds.
#[derive(Debug, Clone, PartialEq)]
pub struct Heartbeat {
    /// Name of the process incarnation, as in its claims.
    pub owner: String,
    /// The queue it serves.
    pub queue: QueueName,
    /// Its machine.
    pub host: String,
    /// Its process.
    pub pid: u32,
    /// Jobs in its engine.
    pub running: u32,
    /// Jobs its engine has room for.
    pub slots: u32,
    /// Whether it takes no more.
    pub draining: bool,
    /// Generated tokens per second, lately.
    pub tokens_per_s: f64,
}

/// What a heartbeat's sender is to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Directive {
    /// Finish or checkpoint what runs, then exit.
    pub drain: bool,
    /// Take nothing new for now.
    pub paused: bool,
}

/// A worker in a list.
#[derive(Debug, Clone, PartialEq)]
pub struct Worker {
    /// What it said last.
    pub heartbeat: Heartbeat,
    /// When it said something first.
    pub started_at: Timestamp,
    /// How long it has been silent.
    pub silent: Duration,
    /// Whether somebody asked it to drain.
    pub drain_requested: bool,
}

impl Worker {
    /// Silent for longer than this, it is taken for dead: some heartbeats were missed.
    pub const SILENT_MAX: Duration = Duration::from_secs(15);

    /// Whether it was heard of lately.
    pub fn is_alive(&self) -> bool {
        self.silent <= Self::SILENT_MAX
    }
}

/// A job that failed for good.
#[derive(Debug, Clone, PartialEq)]
pub struct DeadLetter {
    /// Its whole story.
    pub record: JobRecord,
    /// The dead letter it was a replay of.
    pub replay_of: Option<JobId>,
}

/// A dead letter and the new job that repeats it.
#[derive(Debug, Clone, PartialEq)]
pub struct Replay {
    /// The dead letter; it stays.
    pub replay_of: JobId,
    /// The new job, queued; the caller hands its entry to the dispatcher.
    pub job: Job,
}

/// A job in a list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JobSummary {
    /// The job.
    pub id: JobId,
    /// Where it waits or waited.
    pub queue: QueueName,
    /// How urgent it is.
    pub priority: Priority,
    /// Where it is.
    pub state: JobState,
    /// When it came.
    pub submitted_at: Timestamp,
}

/// A queue that a worker has registered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Registered {
    /// Which.
    pub queue: QueueName,
    /// When it was first; zero if that was before anybody noted it.
    pub at: Timestamp,
}

/// Settings and lists for operators.
#[async_trait]
pub trait Operations: Send + Sync {
    /// What is set for a queue; the defaults for one that nobody has touched.
    ///
    /// # Errors
    /// [`StoreError`].
    async fn queue_state(&self, queue: &QueueName) -> Result<QueueState, StoreError>;

    /// Pauses or resumes a queue.
    ///
    /// # Errors
    /// [`StoreError`].
    async fn set_paused(&self, queue: &QueueName, paused: bool) -> Result<(), StoreError>;

    /// Bounds a queue's backlog in tokens, or returns it to the default.
    ///
    /// # Errors
    /// [`StoreError`].
    async fn set_limit(
        &self,
        queue: &QueueName,
        limit_tokens: Option<u64>,
    ) -> Result<(), StoreError>;

    /// What may wait in a queue, in tokens: its own bound and its tenants'.
    ///
    /// # Errors
    /// [`StoreError`].
    async fn quotas(&self, queue: &QueueName) -> Result<Quotas, StoreError>;

    /// Bounds what may wait of a tenant's in a queue, or of each that has no quota of its own; none
    /// lifts the bound.
    ///
    /// # Errors
    /// [`StoreError`].
    async fn set_quota(
        &self,
        queue: &QueueName,
        tenant: Option<&Tenant>,
        limit_tokens: Option<u64>,
    ) -> Result<(), StoreError>;

    /// Gives a queue its numerics class, or confirms it.
    ///
    /// # Errors
    /// [`ClassError::Mismatch`] when another class was registered first.
    async fn register_class(&self, queue: &QueueName, class: &str) -> Result<(), ClassError>;

    /// Queues that a worker has registered, the first registered first.
    ///
    /// # Errors
    /// [`StoreError`].
    async fn registered(&self) -> Result<Vec<Registered>, StoreError>;

    /// Forgets a queue's numerics class, so that the next worker sets it; returns the one it had.
    /// For a queue whose model or settings are replaced: its later answers may differ from its
    /// earlier ones.
    ///
    /// # Errors
    /// [`ResetClassError::Served`] while workers of the queue were heard within
    /// [`SILENT_ALIVE_MAX`].
    async fn reset_class(&self, queue: &QueueName) -> Result<Option<String>, ResetClassError>;

    /// Every queue that has jobs or settings, by name. Reads every job: for people, not for loops.
    ///
    /// # Errors
    /// [`StoreError`].
    async fn queues(&self) -> Result<Vec<QueueOverview>, StoreError>;

    /// Records that a worker lives; returns what it is to do.
    ///
    /// # Errors
    /// [`StoreError`].
    async fn heartbeat(&self, heartbeat: &Heartbeat) -> Result<Directive, StoreError>;

    /// Every worker that was heard lately, the silent ones included, by name.
    ///
    /// # Errors
    /// [`StoreError`].
    async fn workers(&self) -> Result<Vec<Worker>, StoreError>;

    /// Asks a worker to drain; its next heartbeat tells it. False if it is not known.
    ///
    /// # Errors
    /// [`StoreError`].
    async fn request_drain(&self, owner: &str) -> Result<bool, StoreError>;

    /// Forgets a worker that has ended.
    ///
    /// # Errors
    /// [`StoreError`].
    async fn forget_worker(&self, owner: &str) -> Result<(), StoreError>;

    /// Does what keeps the store in order over the days: makes room ahead, drops what ended longer
    /// ago than the database's retention and forgets workers long silent. To be called every few hours, by any
    /// number of processes.
    ///
    /// # Errors
    /// [`StoreError`]; the rest is done by the next call.
    async fn maintain(&self) -> Result<Maintained, StoreError>;

    /// Up to `limit` dead letters of a queue with an id above `after`, in order of id.
    ///
    /// # Errors
    /// [`StoreError`].
    async fn dead_letters(
        &self,
        queue: &QueueName,
        limit: u32,
        after: Option<JobId>,
    ) -> Result<Vec<DeadLetter>, StoreError>;

    /// Submits each of these dead letters again as a new job, due at once and without a deadline;
    /// ids that are no dead letters are passed over.
    ///
    /// # Errors
    /// [`StoreError`]; then none was submitted.
    async fn replay(&self, ids: &[JobId]) -> Result<Vec<Replay>, StoreError>;

    /// Deletes these dead letters with their errors; returns how many there were.
    ///
    /// # Errors
    /// [`StoreError`].
    async fn purge(&self, ids: &[JobId]) -> Result<u64, StoreError>;

    /// Up to `limit` jobs of a tenant with an id below `before`, the latest first.
    ///
    /// # Errors
    /// [`StoreError`].
    async fn jobs_of(
        &self,
        tenant: &Tenant,
        limit: u32,
        before: Option<JobId>,
    ) -> Result<Vec<JobSummary>, StoreError>;
}
