//! Batches: a file of lines that are answered together.
//!
//! ```text
//! validating ─► in_progress ─► finalizing ─► completed
//!     │             ├── deadline ─► finalizing ─► expired
//!     │             └── cancel ──► cancelling ─► cancelled    (also from validating)
//!     └─► failed      nothing was submitted
//! ```
//!
//! The process that drives a batch holds a lease with an epoch, as a worker does for a job: a write under
//! an older epoch writes nothing. So any number of processes may drive batches, but only one at a time
//! drives a given batch. A cancel raises the epoch too.
//!
//! The id of a batch's job is the batch's id with the line's number in its last 32 bits. So repeated
//! submissions of a line create one job, no table of lines is needed, and the jobs of a batch are a
//! range of ids.

use std::{fmt, str::FromStr, time::Duration};

use async_trait::async_trait;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::{FileId, Page, Progress, StoreError, files::prefixed, webhooks::Webhook};
use crate::{
    job::{Job, JobId, JobState, Priority, QueueName, Tenant, Timestamp, UnknownWord},
    outcome::Outcome,
};

/// Identifier of a batch; its last 32 bits are zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct BatchId(Uuid);

/// Mask of the line's number.
const LINE_BITS: u128 = u32::MAX as u128;

impl BatchId {
    /// Generates a new id. The generator counts in the bits above the last 32, so no other id of this
    /// process is in the range of the batch's jobs.
    pub fn generate() -> Self {
        Self(Uuid::from_u128(Uuid::now_v7().as_u128() & !LINE_BITS))
    }

    /// Returns the id of the job for a line (from 1).
    pub fn job(self, line: u32) -> JobId {
        Uuid::from_u128(self.0.as_u128() | u128::from(line)).into()
    }

    /// Returns the line of a job; `None` if the job is not of this batch.
    pub fn line(self, job: JobId) -> Option<u32> {
        let id = Uuid::from(job).as_u128();
        let line = u32::try_from(id & LINE_BITS).ok()?;
        (id & !LINE_BITS == self.0.as_u128()).then_some(line)
    }
}

impl From<BatchId> for Uuid {
    fn from(id: BatchId) -> Self {
        id.0
    }
}

impl fmt::Display for BatchId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "batch_{}", self.0.as_simple())
    }
}

impl FromStr for BatchId {
    type Err = UnknownWord;

    fn from_str(text: &str) -> Result<Self, UnknownWord> {
        let found = prefixed(text, "batch_").filter(|id| id.as_u128() & LINE_BITS == 0).map(Self);
        found.ok_or_else(|| UnknownWord { what: "batch", word: text.to_owned() })
    }
}

/// State of a batch. The module's diagram shows the transitions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BatchState {
    /// Its lines are being checked.
    Validating,
    /// Its lines are being submitted and answered.
    InProgress,
    /// Its output is being written.
    Finalizing,
    /// Terminal: every line has its answer or error.
    Completed,
    /// Terminal: its file is invalid.
    Failed,
    /// Terminal: its deadline passed before every line was answered.
    Expired,
    /// Cancelled by its tenant: its jobs are being cancelled and its output written.
    Cancelling,
    /// Terminal: cancelled.
    Cancelled,
}

impl BatchState {
    /// Returns whether the state is terminal.
    pub const fn is_terminal(self) -> bool {
        matches!(self, Self::Completed | Self::Failed | Self::Expired | Self::Cancelled)
    }

    /// Returns the name in stores and on the wire.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Validating => "validating",
            Self::InProgress => "in_progress",
            Self::Finalizing => "finalizing",
            Self::Completed => "completed",
            Self::Failed => "failed",
            Self::Expired => "expired",
            Self::Cancelling => "cancelling",
            Self::Cancelled => "cancelled",
        }
    }
}

/// An error in a batch's file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BatchError {
    /// Code for programs.
    pub code: String,
    /// The line (from 1), if the error is in one.
    pub line: Option<u64>,
    /// Message for people.
    pub message: String,
    /// Name of the invalid field.
    pub param: Option<String>,
}

/// A position in a file of lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct FilePosition {
    /// Lines before the position.
    pub line: u64,
    /// Bytes before the position.
    pub offset_bytes: u64,
}

/// Times at which a batch entered each state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct BatchTimes {
    /// Time at which the batch became `in_progress`.
    pub in_progress: Option<Timestamp>,
    /// Time at which the batch became `finalizing`.
    pub finalizing: Option<Timestamp>,
    /// Time at which the batch became `completed`.
    pub completed: Option<Timestamp>,
    /// Time at which the batch became `failed`.
    pub failed: Option<Timestamp>,
    /// Time at which the batch became `expired`.
    pub expired: Option<Timestamp>,
    /// Time at which the batch became `cancelling`.
    pub cancelling: Option<Timestamp>,
    /// Time at which the batch became `cancelled`.
    pub cancelled: Option<Timestamp>,
}

/// A batch, stored as one JSON document beside the columns that are searched.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Batch {
    /// Its identifier.
    pub id: BatchId,
    /// Its tenant.
    pub tenant: Tenant,
    /// Its state.
    pub state: BatchState,
    /// The endpoint of all its lines.
    pub endpoint: String,
    /// File with its lines.
    pub input: FileId,
    /// Completion window as its creator wrote it.
    pub completion_window: String,
    /// Priority of its jobs.
    pub priority: Priority,
    /// Up to sixteen pairs from its creator, as a JSON object.
    pub metadata: Option<serde_json::Map<String, serde_json::Value>>,
    /// Retention of its output files, in seconds.
    pub output_expires_s: Option<u64>,
    /// Creation time.
    pub created_at: Timestamp,
    /// Deadline.
    pub expires_at: Timestamp,
    /// Times of its state changes.
    #[serde(default)]
    pub at: BatchTimes,
    /// The queue of its jobs; `None` before validation.
    #[serde(default)]
    pub queue: Option<QueueName>,
    /// Number of lines in its file.
    #[serde(default)]
    pub lines: u64,
    /// Rejected lines: errors without a job.
    #[serde(default)]
    pub refused: u64,
    /// Position up to which lines were submitted.
    #[serde(default)]
    pub submitted: FilePosition,
    /// Answered lines at the last count.
    #[serde(default)]
    pub completed: u64,
    /// Lines with an error at the last count.
    #[serde(default)]
    pub failed: u64,
    /// Errors in its file.
    #[serde(default)]
    pub errors: Vec<BatchError>,
    /// File with the answers.
    #[serde(default)]
    pub output: Option<FileId>,
    /// File with the errors.
    #[serde(default)]
    pub error_file: Option<FileId>,
    /// Whether the deadline passed before every line was answered.
    #[serde(default)]
    pub overdue: bool,
    /// Idempotency key from its creator: a tenant has one batch per key.
    #[serde(default)]
    pub idempotency_key: Option<String>,
    /// Webhook to call when it reaches a terminal state.
    #[serde(default)]
    pub webhook: Option<Webhook>,
}

impl Batch {
    /// Sets the state and records the time.
    pub fn enter(&mut self, state: BatchState, now: Timestamp) {
        self.state = state;
        let at = match state {
            BatchState::Validating => return,
            BatchState::InProgress => &mut self.at.in_progress,
            BatchState::Finalizing => &mut self.at.finalizing,
            BatchState::Completed => &mut self.at.completed,
            BatchState::Failed => &mut self.at.failed,
            BatchState::Expired => &mut self.at.expired,
            BatchState::Cancelling => &mut self.at.cancelling,
            BatchState::Cancelled => &mut self.at.cancelled,
        };
        *at = Some(now);
    }
}

/// A claimed batch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BatchClaim {
    /// The batch as it was claimed.
    pub batch: Batch,
    /// The epoch of the claim.
    pub epoch: i64,
}

/// Jobs and files that are written in the same transaction as a batch.
#[derive(Debug, Clone, Copy, Default)]
pub struct BatchWrites<'a> {
    /// Jobs to submit; jobs with known ids stay as they are.
    pub jobs: &'a [Job],
    /// Files to complete, with their sizes and expiry times.
    pub files: &'a [(FileId, u64, Option<Timestamp>)],
}

/// The result of a line's job.
#[derive(Debug, Clone, PartialEq)]
pub struct FinishedLine {
    /// The line (from 1).
    pub line: u32,
    /// Its terminal state.
    pub state: JobState,
    /// The answer or the last error; `None` for a cancelled job.
    pub outcome: Option<Outcome>,
    /// Time at which it finished.
    pub finished_at: Timestamp,
}

/// Batches in a store.
#[async_trait]
pub trait Batches: Send + Sync {
    /// Records a new, unclaimed batch; or returns the batch that its tenant created under the same
    /// idempotency key.
    async fn create_batch(&self, batch: &Batch) -> Result<Option<Batch>, StoreError>;

    /// Returns a batch of a tenant.
    async fn batch(&self, tenant: &Tenant, id: BatchId) -> Result<Option<Batch>, StoreError>;

    /// Returns batches of a tenant, the newest first unless the page says otherwise.
    async fn batches(&self, tenant: &Tenant, page: Page<BatchId>)
    -> Result<Vec<Batch>, StoreError>;

    /// Cancels a batch of a tenant that is validating or in progress: its state becomes cancelling, and
    /// the claim of the process that drives it ends. A batch in another state stays as it is. Returns
    /// the batch as it is afterwards.
    async fn cancel_batch(&self, tenant: &Tenant, id: BatchId)
    -> Result<Option<Batch>, StoreError>;

    /// Returns the newest batches of all tenants, the newest first.
    async fn latest_batches(&self, limit: u32) -> Result<Vec<Batch>, StoreError>;

    /// Claims up to `limit` unfinished and unclaimed batches, the oldest first.
    async fn claim_batches(
        &self,
        owner: &str,
        lease: Duration,
        limit: u32,
    ) -> Result<Vec<BatchClaim>, StoreError>;

    /// Claims up to `limit` batches with a [due webhook](Batch::webhook_due), the earliest due
    /// first.
    async fn claim_webhooks(
        &self,
        owner: &str,
        lease: Duration,
        limit: u32,
    ) -> Result<Vec<BatchClaim>, StoreError>;

    /// Extends a claim's lease; returns false if the claim is no longer valid. On an error the old
    /// lease continues.
    async fn renew_batch(
        &self,
        id: BatchId,
        epoch: i64,
        lease: Duration,
    ) -> Result<bool, StoreError>;

    /// Releases a claim, so that others can claim the batch at once.
    async fn release_batch(&self, id: BatchId, epoch: i64) -> Result<(), StoreError>;

    /// Writes a claimed batch with its jobs and files, in one transaction; returns false and writes
    /// nothing if the claim is no longer valid. May be repeated after an error.
    async fn save_batch(
        &self,
        claim: &BatchClaim,
        writes: BatchWrites<'_>,
    ) -> Result<bool, StoreError>;

    /// Counts a batch's jobs by state.
    async fn batch_progress(&self, id: BatchId) -> Result<Progress, StoreError>;

    /// Cancels the unfinished jobs of a batch; returns how many.
    async fn cancel_batch_jobs(&self, id: BatchId) -> Result<u64, StoreError>;

    /// Returns the results of the lines `first..=last` with finished jobs.
    async fn finished_lines(
        &self,
        id: BatchId,
        first: u32,
        last: u32,
    ) -> Result<Vec<FinishedLine>, StoreError>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jobs_of_a_batch_are_a_range_without_other_ids() {
        let (before, batch, after) = (JobId::generate(), BatchId::generate(), JobId::generate());
        assert!(before < batch.job(1) && batch.job(1) < batch.job(2));
        assert!(batch.job(u32::MAX) < after, "the generator counts above a line's bits");
        assert_eq!(batch.line(batch.job(7)), Some(7));
        assert_eq!((batch.line(before), batch.line(after)), (None, None));
    }

    #[test]
    fn batch_id_has_one_form() {
        let id = BatchId::generate();
        assert_eq!(id.to_string().parse::<BatchId>().expect("its own text"), id);
        let job = format!("batch_{}", Uuid::from(id.job(1)).as_simple());
        for wrong in ["", "batch_", "batch_%2e%2e", "file-0", &job] {
            assert!(wrong.parse::<BatchId>().is_err(), "{wrong}");
        }
    }
}
