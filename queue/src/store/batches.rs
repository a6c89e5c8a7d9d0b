//! Batches: a file of lines answered together.
//!
//! ```text
//! validating ─► in_progress ─► finalizing ─► completed
//!     │             ├── too late ─► finalizing ─► expired
//!     │             └── cancel ──► cancelling ─► cancelled    (also from validating)
//!     └─► failed      nothing of it was submitted
//! ```
//!
//! Whoever drives a batch holds its lease by an epoch, as a worker holds a job: a write under an older
//! epoch writes nothing, so any number of processes may drive and none does so twice. A cancel raises
//! the epoch too.
//!
//! The jobs of a batch are named by it: a job's id is the batch's with the line's number in its last
//! 32 bits. So a line is submitted once however often it is tried, no table of lines is needed, and
//! the jobs of a batch are a range of ids.

use std::{fmt, str::FromStr, time::Duration};

use async_trait::async_trait;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::{FileId, Page, Progress, StoreError, files::prefixed, webhooks::Webhook};
use crate::{
    job::{Job, JobId, JobState, Priority, QueueName, Tenant, Timestamp, UnknownWord},
    outcome::Outcome,
};

/// Names a batch; its last 32 bits are zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct BatchId(Uuid);

/// The bits of a line's number.
const LINE_BITS: u128 = u32::MAX as u128;

impl BatchId {
    /// A fresh one. The generator counts in the bits above the last 32, so no other id that this
    /// process makes falls among the batch's jobs.
    pub fn generate() -> Self {
        Self(Uuid::from_u128(Uuid::now_v7().as_u128() & !LINE_BITS))
    }

    /// The id of the job that answers this line, from 1.
    pub fn job(self, line: u32) -> JobId {
        Uuid::from_u128(self.0.as_u128() | u128::from(line)).into()
    }

    /// The line that a job of this batch answers.
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

/// Where a batch is in its life. The module's diagram shows what comes next.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BatchState {
    /// Its lines are read and checked.
    Validating,
    /// Its lines are submitted and answered.
    InProgress,
    /// Its output is written.
    Finalizing,
    /// Over: every line has its answer or error.
    Completed,
    /// Over: its file is no batch.
    Failed,
    /// Over: time was up before every line was answered.
    Expired,
    /// Somebody withdrew it: its jobs are cancelled and its output is written.
    Cancelling,
    /// Over: withdrawn.
    Cancelled,
}

impl BatchState {
    /// Whether it is over.
    pub const fn is_terminal(self) -> bool {
        matches!(self, Self::Completed | Self::Failed | Self::Expired | Self::Cancelled)
    }

    /// The word used in stores and on the wire.
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

/// Something wrong with a batch's file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BatchError {
    /// A word for programs.
    pub code: String,
    /// The line, from 1, if it is one's.
    pub line: Option<u64>,
    /// A sentence for people.
    pub message: String,
    /// The field at fault.
    pub param: Option<String>,
}

/// A place in a file of lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct FilePosition {
    /// Lines before it.
    pub line: u64,
    /// Bytes before it.
    pub offset_bytes: u64,
}

/// When a batch came into each of its states.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct BatchTimes {
    /// `in_progress`
    pub in_progress: Option<Timestamp>,
    /// `finalizing`
    pub finalizing: Option<Timestamp>,
    /// `completed`
    pub completed: Option<Timestamp>,
    /// `failed`
    pub failed: Option<Timestamp>,
    /// `expired`
    pub expired: Option<Timestamp>,
    /// `cancelling`
    pub cancelling: Option<Timestamp>,
    /// `cancelled`
    pub cancelled: Option<Timestamp>,
}

/// A batch as it is kept: one JSON document, beside the columns that are searched.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Batch {
    /// Its name.
    pub id: BatchId,
    /// Whose it is.
    pub tenant: Tenant,
    /// Where it is.
    pub state: BatchState,
    /// The endpoint of every line.
    pub endpoint: String,
    /// Its lines.
    pub input: FileId,
    /// As its creator wrote it.
    pub completion_window: String,
    /// How urgent its jobs are.
    pub priority: Priority,
    /// Up to sixteen pairs of its creator's, as a JSON object.
    pub metadata: Option<serde_json::Map<String, serde_json::Value>>,
    /// How long its output is kept after it was made, in seconds.
    pub output_expires_s: Option<u64>,
    /// When it came.
    pub created_at: Timestamp,
    /// When time is up.
    pub expires_at: Timestamp,
    /// When it moved on.
    #[serde(default)]
    pub at: BatchTimes,
    /// The queue of all its lines; unknown before it is validated.
    #[serde(default)]
    pub queue: Option<QueueName>,
    /// Lines of its file.
    #[serde(default)]
    pub lines: u64,
    /// Lines whose body cannot be served: errors without a job.
    #[serde(default)]
    pub refused: u64,
    /// What was submitted.
    #[serde(default)]
    pub submitted: FilePosition,
    /// Lines answered, as counted last.
    #[serde(default)]
    pub completed: u64,
    /// Lines with an error, as counted last.
    #[serde(default)]
    pub failed: u64,
    /// Why it is no batch.
    #[serde(default)]
    pub errors: Vec<BatchError>,
    /// Answers.
    #[serde(default)]
    pub output: Option<FileId>,
    /// Errors.
    #[serde(default)]
    pub error_file: Option<FileId>,
    /// Whether time was up before every line was answered.
    #[serde(default)]
    pub overdue: bool,
    /// A word of its creator's, who makes no second batch of a tenant's under it.
    #[serde(default)]
    pub idempotency_key: Option<String>,
    /// Who is to be told of its end.
    #[serde(default)]
    pub webhook: Option<Webhook>,
}

impl Batch {
    /// Moves it to a state, and notes when.
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

/// A batch somebody drives.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BatchClaim {
    /// As it was claimed.
    pub batch: Batch,
    /// The epoch of the claim.
    pub epoch: i64,
}

/// What a write to a batch brings along, in the same transaction.
#[derive(Debug, Clone, Copy, Default)]
pub struct BatchWrites<'a> {
    /// Jobs that are submitted; known ids stay as they are.
    pub jobs: &'a [Job],
    /// Files that are complete now, with their lengths and when they expire.
    pub files: &'a [(FileId, u64, Option<Timestamp>)],
}

/// How a line's job ended.
#[derive(Debug, Clone, PartialEq)]
pub struct FinishedLine {
    /// The line, from 1.
    pub line: u32,
    /// A terminal state.
    pub state: JobState,
    /// The answer or the last error; none for a cancelled job.
    pub outcome: Option<Outcome>,
    /// When.
    pub finished_at: Timestamp,
}

/// Batches in a store.
#[async_trait]
pub trait Batches: Send + Sync {
    /// Records a batch that nobody drives yet; or returns the one that its tenant made under the same
    /// idempotency key, as it is now.
    ///
    /// # Errors
    /// [`StoreError`].
    async fn create_batch(&self, batch: &Batch) -> Result<Option<Batch>, StoreError>;

    /// A batch of a tenant.
    ///
    /// # Errors
    /// [`StoreError`].
    async fn batch(&self, tenant: &Tenant, id: BatchId) -> Result<Option<Batch>, StoreError>;

    /// Batches of a tenant, the latest first unless the page says otherwise.
    ///
    /// # Errors
    /// [`StoreError`].
    async fn batches(&self, tenant: &Tenant, page: Page<BatchId>)
    -> Result<Vec<Batch>, StoreError>;

    /// Withdraws a batch of a tenant that is validating or in progress: it is cancelling then, and
    /// whoever drives it does so no more. Any other stays as it is. Returns it as it is afterwards.
    ///
    /// # Errors
    /// [`StoreError`].
    async fn cancel_batch(&self, tenant: &Tenant, id: BatchId)
    -> Result<Option<Batch>, StoreError>;

    /// Claims up to `limit` batches that are not over and that nobody drives, the oldest first.
    ///
    /// # Errors
    /// [`StoreError`]; then none was claimed.
    async fn claim_batches(
        &self,
        owner: &str,
        lease: Duration,
        limit: u32,
    ) -> Result<Vec<BatchClaim>, StoreError>;

    /// Claims up to `limit` batches whose [end is to be told](Batch::webhook_due), the longest due
    /// first.
    ///
    /// # Errors
    /// [`StoreError`]; then none was claimed.
    async fn claim_webhooks(
        &self,
        owner: &str,
        lease: Duration,
        limit: u32,
    ) -> Result<Vec<BatchClaim>, StoreError>;

    /// Extends a claim; false if it holds no more.
    ///
    /// # Errors
    /// [`StoreError`]; then the old lease runs on.
    async fn renew_batch(
        &self,
        id: BatchId,
        epoch: i64,
        lease: Duration,
    ) -> Result<bool, StoreError>;

    /// Lets go of a claim, for others at once.
    ///
    /// # Errors
    /// [`StoreError`].
    async fn release_batch(&self, id: BatchId, epoch: i64) -> Result<(), StoreError>;

    /// Writes a claimed batch with what goes along, all or nothing; false if the claim holds no more,
    /// and then nothing is written.
    ///
    /// # Errors
    /// [`StoreError`]; the same call may be repeated.
    async fn save_batch(
        &self,
        held: &BatchClaim,
        along: BatchWrites<'_>,
    ) -> Result<bool, StoreError>;

    /// Counts a batch's jobs by state.
    ///
    /// # Errors
    /// [`StoreError`].
    async fn batch_progress(&self, id: BatchId) -> Result<Progress, StoreError>;

    /// Withdraws every job of a batch that is not over; returns how many.
    ///
    /// # Errors
    /// [`StoreError`].
    async fn cancel_batch_jobs(&self, id: BatchId) -> Result<u64, StoreError>;

    /// How the jobs of lines `first..=last` ended, those that have.
    ///
    /// # Errors
    /// [`StoreError`].
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
    fn jobs_of_a_batch_are_a_range_that_no_other_id_falls_into() {
        let (before, batch, after) = (JobId::generate(), BatchId::generate(), JobId::generate());
        assert!(before < batch.job(1) && batch.job(1) < batch.job(2));
        assert!(batch.job(u32::MAX) < after, "the generator counts above a line's bits");
        assert_eq!(batch.line(batch.job(7)), Some(7));
        assert_eq!((batch.line(before), batch.line(after)), (None, None));
    }

    #[test]
    fn a_batch_id_has_one_spelling() {
        let id = BatchId::generate();
        assert_eq!(id.to_string().parse::<BatchId>().expect("its own text"), id);
        let job = format!("batch_{}", Uuid::from(id.job(1)).as_simple());
        for wrong in ["", "batch_", "batch_%2e%2e", "file-0", &job] {
            assert!(wrong.parse::<BatchId>().is_err(), "{wrong}");
        }
    }
}
