//! What people who run a fleet set and see: the [`Operations`] trait.
//!
//! Queues can be paused and bounded, and belong to one numerics class, or to those that are allowed;
//! workers are listed by their heartbeats and asked to drain; dead letters are read, replayed or purged.
//! The store keeps these settings; who obeys them is the producer (limits) and the worker (pauses,
//! drains, classes).

use std::time::Duration;

use async_trait::async_trait;
use serde::{Deserialize, Serialize};

use super::{
    JobRecord, Maintained, Progress, StoreError,
    classes::{ClassError, ResetClassError},
};
use crate::{
    dispatch::Quotas,
    job::{Job, JobId, QueueName, Tenant, Timestamp},
};

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
    /// Classes that its workers may have as well.
    pub allowed_classes: Vec<String>,
}

impl QueueState {
    /// A queue that nobody has set anything for.
    pub fn with_defaults(queue: QueueName) -> Self {
        let allowed_classes = Vec::new();
        Self { queue, paused: false, limit_tokens: None, class: None, allowed_classes }
    }
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

impl QueueOverview {
    /// A queue without jobs or workers.
    pub(super) fn of(settings: QueueState) -> Self {
        Self {
            settings,
            progress: Progress::default(),
            oldest_queued: None,
            overdue: 0,
            workers: 0,
        }
    }
}

/// A worker that was silent for longer is not taken for alive: some dozen heartbeats.
pub const SILENT_ALIVE_MAX: Duration = Duration::from_secs(30);

/// Workers that were silent for longer are forgotten.
pub(super) const SILENT_KEPT: Duration = Duration::from_secs(24 * 60 * 60);

/// What a worker says of itself, every few seconds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
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
    /// What else it measures and counts.
    #[serde(default, rename = "measured")]
    pub metrics: WorkerMetrics,
}

/// What a worker measures of itself. All of it may be absent: of a worker of an earlier release.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct WorkerMetrics {
    /// What computes: `cpu`.
    pub device: String,
    /// The instruction set of its kernels.
    pub isa: String,
    /// What its answers depend on besides the job.
    pub numerics_class: String,
    /// Sequences of a step, in the mean, lately.
    pub batch_size: f64,
    /// Prompt tokens computed per second, lately.
    pub prefill_tokens_per_s: f64,
    /// Tokens decoded per second, lately.
    pub decode_tokens_per_s: f64,
    /// KV blocks that sequences hold.
    pub kv_blocks_used: u64,
    /// All of them.
    pub kv_blocks_total: u64,
    /// Prompt tokens that were found in the prefix cache.
    pub prefix_hit_tokens: u64,
    /// Prompt tokens that were not.
    pub prefix_miss_tokens: u64,
    /// How long ago it renewed its leases; none while it holds none.
    pub lease_age_ms: Option<u64>,
    /// How long ago it read its queue; none before the first time.
    pub read_age_ms: Option<u64>,
    /// What it had to put right.
    pub integrity: Integrity,
}

/// What was put right, or kept from going wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Integrity {
    /// Jobs whose lease was over, queued again or failed.
    pub leases_reclaimed: u64,
    /// Jobs that a worker stopped, since their claim was gone.
    pub leases_lost: u64,
    /// Results that were discarded, since the claim was gone.
    pub results_fenced: u64,
    /// Deliveries of jobs that were over, withdrawn or somebody else's.
    pub duplicates_suppressed: u64,
    /// Times that the dispatcher had lost a queue (NOGROUP).
    pub dispatcher_losses: u64,
    /// Queued jobs that the dispatcher did not know and was told of again.
    pub jobs_fed_again: u64,
}

impl Integrity {
    /// Its counts by name.
    pub fn named(&self) -> [(&'static str, u64); 6] {
        [
            ("leases_reclaimed", self.leases_reclaimed),
            ("leases_lost", self.leases_lost),
            ("results_fenced", self.results_fenced),
            ("duplicates_suppressed", self.duplicates_suppressed),
            ("dispatcher_losses", self.dispatcher_losses),
            ("jobs_fed_again", self.jobs_fed_again),
        ]
    }

    /// Adds another's.
    pub fn merge(&mut self, other: &Self) {
        self.leases_reclaimed += other.leases_reclaimed;
        self.leases_lost += other.leases_lost;
        self.results_fenced += other.results_fenced;
        self.duplicates_suppressed += other.duplicates_suppressed;
        self.dispatcher_losses += other.dispatcher_losses;
        self.jobs_fed_again += other.jobs_fed_again;
    }
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

/// Jobs that one call deletes at most.
pub const ERASED_MAX: u64 = 50_000;

/// What was deleted of a tenant's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct Erased {
    /// Keys.
    pub keys: u64,
    /// Batches.
    pub batches: u64,
    /// Files.
    pub files: u64,
    /// Jobs.
    pub jobs: u64,
    /// Whether nothing is left.
    pub done: bool,
}

/// When replays are due, so that they do not come all at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pace {
    /// The first.
    pub from: Timestamp,
    /// From each to the next.
    pub every: Duration,
}

impl Pace {
    /// When the job after `before` others is due.
    pub(super) fn due(self, before: usize) -> Timestamp {
        self.from.after(self.every.saturating_mul(u32::try_from(before).unwrap_or(u32::MAX)))
    }
}

/// A queue that a worker has registered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RegisteredQueue {
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

    /// Gives a queue its numerics class, or confirms that workers of this class may serve it.
    ///
    /// # Errors
    /// [`ClassError::Mismatch`] when another class was registered first, and this one is not allowed.
    async fn register_class(&self, queue: &QueueName, class: &str) -> Result<(), ClassError>;

    /// Lets workers of another numerics class serve a queue as well: from then on its answers are of
    /// either class, and name it. False if they may already.
    ///
    /// # Errors
    /// [`StoreError::InvalidValue`] of a name that is none, or of too many.
    async fn allow_class(&self, queue: &QueueName, class: &str) -> Result<bool, StoreError>;

    /// Takes back what [`allow_class`](Self::allow_class) did: workers of this class drain with their
    /// next heartbeats, and start no more. False if the class was not among the allowed ones; the
    /// queue's own class never is.
    ///
    /// # Errors
    /// [`StoreError`].
    async fn withdraw_class(&self, queue: &QueueName, class: &str) -> Result<bool, StoreError>;

    /// Queues that a worker has registered, the first registered first.
    ///
    /// # Errors
    /// [`StoreError`].
    async fn registered_queues(&self) -> Result<Vec<RegisteredQueue>, StoreError>;

    /// Forgets a queue's numerics class and the allowed ones, so that the next worker sets it; returns
    /// the one it had. For a queue whose model or settings are replaced: its later answers may differ
    /// from its earlier ones.
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

    /// Submits each of these dead letters again as a new job, due at once or one after another, and
    /// without a deadline; ids that are no dead letters are passed over.
    ///
    /// # Errors
    /// [`StoreError`]; then none was submitted.
    async fn replay(&self, ids: &[JobId], pace: Option<Pace>) -> Result<Vec<Replay>, StoreError>;

    /// Deletes these dead letters with their errors; returns how many there were.
    ///
    /// # Errors
    /// [`StoreError`].
    async fn purge(&self, ids: &[JobId]) -> Result<u64, StoreError>;

    /// Looks at the queues and adds what it sees to their [`history`](super::history), unless somebody
    /// did so a moment ago; whether it did. To be called every few seconds, by any number of processes.
    ///
    /// # Errors
    /// [`StoreError`]; the next call sees what this one missed.
    async fn sample(&self) -> Result<bool, StoreError>;

    /// Deletes what a tenant has: keys, batches, files, quotas and jobs with their results, whatever
    /// their state; whoever runs one finds its claim gone. Of jobs no more than [`ERASED_MAX`] in one
    /// call.
    ///
    /// # Errors
    /// [`StoreError`]; what was deleted until then stays deleted, and the same call goes on.
    async fn erase_tenant(&self, tenant: &Tenant) -> Result<Erased, StoreError>;

    /// What is set for every queue that anything is set for, by name.
    ///
    /// # Errors
    /// [`StoreError`].
    async fn queue_states(&self) -> Result<Vec<QueueState>, StoreError>;
}
