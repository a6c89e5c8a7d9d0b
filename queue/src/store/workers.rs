//! Workers as the store records them: their heartbeats, drain requests and fault counters.

use std::time::Duration;

use async_trait::async_trait;
use serde::{Deserialize, Serialize};

use super::{Serving, StoreError};
use crate::job::{QueueName, Timestamp};

/// A worker with a last heartbeat older than this does not block [`reset_class`]: about a dozen
/// missed heartbeats.
///
/// [`reset_class`]: super::NumericsClasses::reset_class
pub const SILENT_ALIVE_MAX: Duration = Duration::from_secs(30);

/// A worker with a last heartbeat older than this is deleted by maintenance.
pub(super) const SILENT_KEPT: Duration = Duration::from_secs(24 * 60 * 60);

/// Report that a worker sends every few seconds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Heartbeat {
    /// Name of the process incarnation, as in its claims.
    pub owner: String,
    /// The queue it serves.
    pub queue: QueueName,
    /// Host name of its machine.
    pub host: String,
    /// Process id.
    pub pid: u32,
    /// Jobs in its engine.
    pub running: u32,
    /// Jobs its engine has room for.
    pub slots: u32,
    /// Whether it accepts no new jobs.
    pub draining: bool,
    /// Recent rate of generated tokens per second.
    pub tokens_per_s: f64,
    /// Its other measurements and counters.
    #[serde(default, rename = "measured")]
    pub metrics: WorkerMetrics,
}

/// Measurements of a worker. Those that it leaves out are 0 or empty.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct WorkerMetrics {
    /// The release of its program.
    #[serde(default)]
    pub release: String,
    /// Kind of device: `cpu`.
    pub device: String,
    /// Instruction set of its kernels.
    pub isa: String,
    /// Its numerics class: what answers depend on besides the job.
    pub numerics_class: String,
    /// Recent mean number of sequences per step.
    pub batch_size: f64,
    /// Recent rate of prompt tokens computed per second.
    pub prefill_tokens_per_s: f64,
    /// Recent rate of tokens decoded per second.
    pub decode_tokens_per_s: f64,
    /// Tokens that it takes off the backlog per second while it is busy, as jobs' costs count them; `None` before
    /// it was busy. Smoothed.
    pub drain_tokens_per_s: Option<f64>,
    /// KV blocks held by sequences.
    pub kv_blocks_used: u64,
    /// KV blocks in total.
    pub kv_blocks_total: u64,
    /// KV blocks kept for their contents: the prefix cache.
    pub kv_blocks_cached: u64,
    /// Bytes of the blocks held by sequences; 0 from an earlier release.
    pub kv_bytes_used: u64,
    /// Bytes of all KV blocks; 0 from an earlier release.
    pub kv_bytes_total: u64,
    /// The tiers below the KV blocks; `None` without any.
    pub tiers: Option<TierReport>,
    /// Prompt tokens found in the prefix cache.
    pub prefix_hit_tokens: u64,
    /// Prompt tokens not found in the prefix cache.
    pub prefix_miss_tokens: u64,
    /// Time since its last lease renewal; `None` while it holds no lease.
    pub lease_age_ms: Option<u64>,
    /// Time since it last read its queue; `None` before the first read.
    pub read_age_ms: Option<u64>,
    /// What its engines did.
    pub report: WorkReport,
    /// Its fault counters.
    pub integrity: Integrity,
}

/// Where a worker keeps KV blocks beside those of its device, since its start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct TierReport {
    /// Blocks found in any tier.
    pub hits: u64,
    /// Of these, in the memory of the host.
    pub memory_hits: u64,
    /// Of these, at other workers.
    pub peer_hits: u64,
    /// Looked up blocks that no tier had, one for each prompt.
    pub misses: u64,
    /// Bytes of blocks in the memory of the host.
    pub memory_bytes: u64,
    /// Blocks on disk.
    pub disk_blocks: u64,
    /// Bytes of blocks on disk.
    pub disk_bytes: u64,
}

impl TierReport {
    /// Returns the blocks found on disk.
    pub fn disk_hits(&self) -> u64 {
        self.hits.saturating_sub(self.memory_hits + self.peer_hits)
    }
}

/// What the engines of a worker did since its heartbeat before.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct WorkReport {
    /// Requests that ended, per second.
    pub requests_per_s: f64,
    /// Steps (forward passes of a batch) per second.
    pub steps_per_s: f64,
    /// Mean number of rows of a step: tokens of prompts and decodes.
    pub rows_per_step: f64,
    /// Share of the time in which a step ran, as the mean of the devices.
    pub utilisation: f64,
    /// Mean time from a request's arrival in the engine to its first step; `None` if no request started.
    pub wait_ms: Option<f64>,
    /// Rows per second of running steps, as a share of the most since the worker's start; `None` without a step.
    pub efficiency: Option<f64>,
}

/// Faults that were detected and corrected. Each count is a loss or duplicate that was prevented.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Integrity {
    /// Jobs queued again or failed because their lease expired.
    pub leases_reclaimed: u64,
    /// Jobs that a worker stopped because its claim was gone.
    pub leases_lost: u64,
    /// Results discarded because the claim was gone.
    pub results_fenced: u64,
    /// Deliveries of jobs that were finished, cancelled or claimed by another worker.
    pub duplicates_suppressed: u64,
    /// Times that the dispatcher had lost a queue (NOGROUP).
    pub dispatcher_losses: u64,
    /// Queued jobs that were missing from the dispatcher and added again.
    pub jobs_fed_again: u64,
}

impl Integrity {
    /// Returns the counters with their names.
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

    /// Adds the counters of another worker.
    pub fn merge(&mut self, other: &Self) {
        self.leases_reclaimed += other.leases_reclaimed;
        self.leases_lost += other.leases_lost;
        self.results_fenced += other.results_fenced;
        self.duplicates_suppressed += other.duplicates_suppressed;
        self.dispatcher_losses += other.dispatcher_losses;
        self.jobs_fed_again += other.jobs_fed_again;
    }
}

/// Reply to a heartbeat: what the worker must do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Directive {
    /// Finish or checkpoint the running jobs, then exit.
    pub drain: bool,
    /// Claim no new jobs until a later reply says otherwise.
    pub paused: bool,
    /// What the worker does for others until the next reply.
    pub leads: Leadership,
}

/// What one process does for all. Nothing goes wrong if two processes do it at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Leadership {
    /// Changes of jobs that time causes, samples and maintenance of the store.
    pub store: bool,
    /// Entries that the dispatcher lacks, of the worker's queue.
    pub queue: bool,
}

impl Leadership {
    /// Everything: for a process without others.
    pub const ALL: Self = Self { store: true, queue: true };
    /// A leader that sent no heartbeat for this long is replaced: three heartbeats.
    pub const LEASE: Duration = Duration::from_secs(6);
}

/// A worker in a list.
#[derive(Debug, Clone, PartialEq)]
pub struct Worker {
    /// Its last heartbeat.
    pub heartbeat: Heartbeat,
    /// Time of its first heartbeat.
    pub started_at: Timestamp,
    /// Time since its last heartbeat.
    pub silent: Duration,
    /// Whether an operator asked it to drain.
    pub drain_requested: bool,
}

impl Worker {
    /// A worker that is silent for longer counts as dead: several heartbeats are missing.
    pub const SILENT_MAX: Duration = Duration::from_secs(15);

    /// Returns whether its last heartbeat is recent.
    pub fn is_alive(&self) -> bool {
        self.silent <= Self::SILENT_MAX
    }
}

/// Registration of workers and orders to them.
#[async_trait]
pub trait Workers: Send + Sync {
    /// Records a heartbeat; returns what the worker must do.
    async fn heartbeat(&self, heartbeat: &Heartbeat) -> Result<Directive, StoreError>;

    /// Returns every worker with a heartbeat within the last day, by name; silent ones included.
    async fn workers(&self) -> Result<Vec<Worker>, StoreError>;

    /// Returns what the live workers of a queue can do together.
    async fn serving(&self, queue: &QueueName) -> Result<Serving, StoreError>;

    /// Asks a worker to drain; the reply to its next heartbeat says so. Returns false if the worker
    /// is unknown.
    async fn request_drain(&self, owner: &str) -> Result<bool, StoreError>;

    /// Deletes a worker that has ended; its fault counters are kept in the totals.
    async fn forget_worker(&self, owner: &str) -> Result<(), StoreError>;

    /// Returns the fault counters summed over all workers, past ones included.
    async fn integrity(&self) -> Result<Integrity, StoreError>;
}
