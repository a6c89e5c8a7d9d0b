//! Batches: a file of lines that are answered together.
//!
//! ```text
//! validating ─► in_progress ─► finalizing ─► completed
//!     │             ├── deadline ─► finalizing ─► expired
//!     │             ├── pause ───► paused ─► validating       (also from validating)
//!     │             └── cancel ──► cancelling ─► cancelled    (also from validating and paused)
//!     └─► failed      nothing was submitted
//! ```
//!
//! A retry opens an ended batch again: it is validating, with lines that are known to be valid, until its tenant has
//! room for one more batch in progress. A paused batch that is resumed goes the same way.
//!
//! A batch after another one is validating from its creation: see [`after`](super::after).
//!
//! A batch proceeds in steps, each under a claim of its own: see [`batch_steps`](super::batch_steps).
//!
//! The id of a batch's job is the batch's id with the line's number in its last 32 bits. So repeated
//! submissions of a line create one job, no table of lines is needed, and the jobs of a batch are a
//! range of ids.

use std::{collections::BTreeMap, fmt, ops::RangeInclusive, str::FromStr, time::Duration};

use async_trait::async_trait;
use serde::{Deserialize, Serialize};
use tritmill_client::{Endpoint, Request};
use tritmill_queue::{
    Charge, JobId, Priority, QueueName, StoreError, Tenant, Tier, Timestamp, Usage,
    job::UnknownWord, store::Page,
};
use uuid::Uuid;

pub use super::windows::{BACKGROUND, parse_window, tier_of};
use super::{
    after::After,
    batch_changes::{BatchChange, Changed},
    escalation::Escalation,
    files::{FileId, prefixed},
    notices::Delivery,
    step_state::{BatchError, FilePosition, StepState},
    webhooks::Webhook,
    windows::WINDOW_MAX,
};
use crate::data_urls::{InputUrl, OutputUrl};

/// Identifier of a batch; its last 32 bits are zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct BatchId(Uuid);

/// Mask of the line's number.
const LINE_BITS: u128 = u32::MAX as u128;

impl BatchId {
    /// Returns an id at or before all that were made at a time or later.
    pub fn first_of(at: Timestamp) -> Self {
        Self(Uuid::from(JobId::first_of(at)))
    }

    /// Returns the id in a column.
    pub(super) const fn of_column(id: Uuid) -> Self {
        Self(id)
    }

    /// Generates a new id. The generator counts in the bits above the last 32, so no other id of this
    /// process is in the range of the batch's jobs.
    pub fn generate() -> Self {
        Self(Uuid::from_u128(Uuid::now_v7().as_u128() & !LINE_BITS))
    }

    /// Returns the id of the job for a line (from 1).
    pub fn job(self, line: u32) -> JobId {
        Uuid::from_u128(self.0.as_u128() | u128::from(line)).into()
    }

    /// Returns the ids of the jobs of the lines `first..=last`.
    pub fn jobs(self, first: u32, last: u32) -> RangeInclusive<JobId> {
        self.job(first)..=self.job(last)
    }

    /// Returns the ids of the jobs of all lines.
    pub fn all_jobs(self) -> RangeInclusive<JobId> {
        self.jobs(1, u32::MAX)
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
    /// Paused by its tenant: no line starts, and its deadline does not come nearer.
    Paused,
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

    /// All states.
    pub const ALL: [Self; 9] = [
        Self::Validating,
        Self::InProgress,
        Self::Paused,
        Self::Finalizing,
        Self::Completed,
        Self::Failed,
        Self::Expired,
        Self::Cancelling,
        Self::Cancelled,
    ];

    /// Returns the name in stores and on the wire.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Validating => "validating",
            Self::InProgress => "in_progress",
            Self::Paused => "paused",
            Self::Finalizing => "finalizing",
            Self::Completed => "completed",
            Self::Failed => "failed",
            Self::Expired => "expired",
            Self::Cancelling => "cancelling",
            Self::Cancelled => "cancelled",
        }
    }
}

impl FromStr for BatchState {
    type Err = UnknownWord;

    fn from_str(word: &str) -> Result<Self, UnknownWord> {
        let found = Self::ALL.into_iter().find(|state| state.as_str() == word);
        found.ok_or_else(|| UnknownWord { what: "batch state", word: word.to_owned() })
    }
}

/// Times at which a batch entered each state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct BatchTimes {
    /// Time at which the batch became `in_progress`.
    pub in_progress: Option<Timestamp>,
    /// Time at which an open batch was closed.
    pub sealed: Option<Timestamp>,
    /// Time at which the batch became `paused`, while it is.
    pub paused: Option<Timestamp>,
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
    /// The API key that created it.
    #[serde(default)]
    pub key: Option<Uuid>,
    /// Its state.
    pub state: BatchState,
    /// The endpoint of all its lines, or [`MIXED`].
    pub endpoint: String,
    /// File with its lines. A batch after another one has it when they are made.
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
    /// The queue of its jobs; `None` before validation, and for lines of several models.
    #[serde(default)]
    pub queue: Option<QueueName>,
    /// The queues of its lines by the names of their models, where lines may name several.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub queues: BTreeMap<String, QueueName>,
    /// Whether lines may be added to it.
    #[serde(default)]
    pub is_open: bool,
    /// The earlier batch, of a batch after another one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after: Option<Box<After>>,
    /// Where its lines are read, if not from a file of the API.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub input_url: Option<Box<InputUrl>>,
    /// Where its answers are written when it ends, beside its files.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub output_url: Option<Box<OutputUrl>>,
    /// The file of which an open batch got a copy to begin with.
    #[serde(default)]
    pub began_with: Option<FileId>,
    /// Number of lines in its file, without those that were added while it was open.
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
    /// Tokens of the answered lines; counted when the output is written. `None` if a program without this count
    /// wrote some of it.
    #[serde(default)]
    pub usage: Option<Usage>,
    /// What those lines cost, by currency.
    #[serde(default)]
    pub cost: Vec<Charge>,
    /// Estimated tokens of all its lines, without those that were added; before they are checked, as far as it was needed.
    #[serde(default)]
    pub tokens: Option<u64>,
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
    /// Why lines were left without an answer before it was opened again: it was `cancelled` or `expired`.
    #[serde(default)]
    pub left_by: Option<BatchState>,
    /// How often it was opened again.
    #[serde(default)]
    pub reopened: u32,
    /// The last number of a line that ended: see [`batch_ends`](super::batch_ends).
    #[serde(default)]
    pub last_end: u64,
    /// Idempotency key from its creator: a tenant has one batch per key.
    #[serde(default)]
    pub idempotency_key: Option<String>,
    /// Where its lines go that have not begun at some time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub escalation: Option<Escalation>,
    /// Webhook to call with its events.
    #[serde(default)]
    pub webhook: Option<Webhook>,
    /// Mail addresses that its events are sent to.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mail_to: Vec<String>,
    /// What the next step continues from.
    #[serde(default)]
    pub steps: StepState,
    /// Time since which it is archived. A column of its own has it, so that no step of the batch changes it; claimed batches
    /// do not have it.
    #[serde(skip)]
    pub archived_at: Option<Timestamp>,
    /// Lines that were added to it while it was open, in a column of its own as well. The column is NULL if it was never open.
    #[serde(skip)]
    pub added: u64,
    /// How far the latest event is delivered to its webhook. Claimed batches do not have it.
    #[serde(skip)]
    pub told: Option<Delivery>,
}

/// Most models of a batch of lines that may name several.
pub const MODELS_MAX: usize = 64;
/// The endpoint of a batch of lines for several endpoints and models.
pub const MIXED: &str = "mixed";

impl Batch {
    /// Returns a new batch with a completion window, of priority normal.
    pub fn new(tenant: Tenant, endpoint: String, window: String, created_at: Timestamp) -> Self {
        let within = parse_window(&window).unwrap_or(WINDOW_MAX);
        Self {
            id: BatchId::generate(),
            tenant,
            key: None,
            state: BatchState::Validating,
            endpoint,
            input: FileId::generate(),
            completion_window: window,
            priority: Priority::Normal,
            metadata: None,
            output_expires_s: None,
            created_at,
            expires_at: created_at.after(within),
            at: BatchTimes::default(),
            queue: None,
            queues: BTreeMap::new(),
            is_open: false,
            after: None,
            input_url: None,
            output_url: None,
            began_with: None,
            lines: 0,
            refused: 0,
            submitted: FilePosition::default(),
            completed: 0,
            failed: 0,
            usage: None,
            cost: Vec::new(),
            tokens: None,
            errors: Vec::new(),
            output: None,
            error_file: None,
            overdue: false,
            left_by: None,
            reopened: 0,
            last_end: 0,
            idempotency_key: None,
            escalation: None,
            webhook: None,
            mail_to: Vec::new(),
            steps: StepState::default(),
            archived_at: None,
            added: 0,
            told: None,
        }
    }

    /// Returns the tier of lines without one of their own.
    pub fn tier(&self) -> Tier {
        tier_of(&self.completion_window)
    }

    /// Whether its lines may be for several endpoints.
    pub fn is_mixed(&self) -> bool {
        self.endpoint == MIXED
    }

    /// Whether each of its lines names a model of its own, as in Anthropic's batches. In OpenAI's, all lines name the same.
    pub fn has_models(&self) -> bool {
        self.is_mixed() || self.endpoint == Endpoint::Messages.as_str()
    }

    /// Returns the queue of a line's job.
    pub fn queue_of(&self, request: &Request) -> Option<&QueueName> {
        if let Some(escalation) = self.escalated() {
            return Some(&escalation.queue);
        }
        match self.has_models() {
            true => self.queues.get(request.body.model.as_deref()?),
            false => self.queue.as_ref(),
        }
    }

    /// Sets the queues of its models, of which one that is alone is the batch's.
    pub fn set_queues(&mut self, queues: impl IntoIterator<Item = (String, QueueName)>) {
        self.queues.extend(queues);
        let mut named = self.queues.values();
        let first = named.next();
        self.queue = first.filter(|first| named.all(|other| other == *first)).cloned();
    }

    /// Returns the number of its lines.
    pub fn total_lines(&self) -> u64 {
        self.lines + self.added
    }

    /// Lets no more lines be added.
    pub fn seal(&mut self, now: Timestamp) {
        if self.is_open {
            self.is_open = false;
            self.at.sealed = Some(now);
        }
    }

    /// Returns the length of its completion window.
    pub fn window(&self) -> Duration {
        parse_window(&self.completion_window).unwrap_or(WINDOW_MAX)
    }

    /// Sets the state and records the time.
    pub fn enter(&mut self, state: BatchState, now: Timestamp) {
        self.state = state;
        self.at.paused = None;
        let at = match state {
            BatchState::Validating => return,
            BatchState::InProgress => &mut self.at.in_progress,
            BatchState::Paused => &mut self.at.paused,
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

/// Result of [`create_batch`](Batches::create_batch).
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Creation {
    /// The batch was recorded.
    New,
    /// The batch that the tenant created earlier under the same idempotency key. Nothing was recorded.
    Known(Box<Batch>),
    /// The tenant has too many unfinished batches. Nothing was recorded.
    Full,
    /// The tenant has no such earlier batch. Nothing was recorded.
    NoEarlier,
}

/// Conditions on batches. All given conditions must hold.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct BatchFilter {
    /// Tenant of the batch.
    pub tenant: Option<Tenant>,
    /// State of the batch.
    pub state: Option<BatchState>,
    /// Whether it is archived.
    pub archived: Option<bool>,
    /// Time of its creation: from, and before.
    pub created: (Option<Timestamp>, Option<Timestamp>),
    /// What only the latest [`SCAN_MAX`] batches are searched for that match the other conditions.
    pub search: BatchSearch,
}

/// Conditions that every batch is tested for.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct BatchSearch {
    /// Pairs of its metadata.
    pub metadata: Vec<(String, String)>,
    /// Its model, with or without a format (`MODEL@FORMAT`).
    pub model: Option<String>,
    /// Its endpoint.
    pub endpoint: Option<String>,
    /// Text in its id or in the name of its input file, whatever the case of its letters.
    pub text: Option<String>,
}

/// Result of [`delete_batch`](Batches::delete_batch).
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BatchDeletion {
    /// The batch was deleted.
    Deleted,
    /// The tenant has no such batch.
    NotFound,
    /// The batch is in this state, in which it runs.
    Unfinished(BatchState),
    /// This batch waits for its answers.
    Awaited(BatchId),
}

/// Batches in a store.
#[async_trait]
pub trait Batches: Send + Sync {
    /// Records a new, unclaimed batch, unless the tenant already has `open_max` unfinished batches.
    /// Calls at the same moment may exceed that number by their own.
    async fn create_batch(&self, batch: &Batch, open_max: u32) -> Result<Creation, StoreError>;

    /// Returns the batch that a tenant created under an idempotency key.
    async fn keyed_batch(&self, tenant: &Tenant, key: &str) -> Result<Option<Batch>, StoreError>;

    /// Returns a batch of a tenant.
    async fn batch(&self, tenant: &Tenant, id: BatchId) -> Result<Option<Batch>, StoreError>;

    /// Returns a batch of any tenant; for operators.
    async fn batch_of_any_tenant(&self, id: BatchId) -> Result<Option<Batch>, StoreError>;

    /// Returns batches that match a filter, the newest first unless the page says otherwise.
    async fn find_batches(
        &self,
        filter: &BatchFilter,
        page: Page<BatchId>,
    ) -> Result<Vec<Batch>, StoreError>;

    /// Changes a batch of a tenant, and ends the claim of the process that drives it; its next step is due at once.
    /// If the state of a batch does not allow the change, it stays as it is. An ended batch that would be the tenant's
    /// unfinished batch number `open_max` + 1 is not opened again.
    async fn change_batch(
        &self,
        tenant: &Tenant,
        id: BatchId,
        change: &BatchChange,
        open_max: u32,
    ) -> Result<Option<Changed>, StoreError>;

    /// Archives a batch of a tenant that has ended, or takes it back. Returns the batch as it is afterwards: one that
    /// runs is not archived.
    async fn archive_batch(
        &self,
        tenant: &Tenant,
        id: BatchId,
        archived: bool,
    ) -> Result<Option<Batch>, StoreError>;

    /// Deletes a batch of a tenant that has ended and that no other one waits for, with its output files, and its input file if no other batch has it. Its jobs
    /// and results follow: see [`erase_deleted_batches`](Self::erase_deleted_batches).
    async fn delete_batch(&self, tenant: &Tenant, id: BatchId)
    -> Result<BatchDeletion, StoreError>;

    /// Deletes some jobs or ends of deleted batches. Returns whether there may be more.
    async fn erase_deleted_batches(&self) -> Result<bool, StoreError>;
}

#[cfg(test)]
impl Batch {
    /// Returns a batch without lines.
    pub(crate) fn empty(endpoint: &str) -> Self {
        let (tenant, window) = (Tenant("t".to_owned()), "1h".to_owned());
        Self::new(tenant, endpoint.to_owned(), window, Timestamp::default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jobs_of_a_batch_are_a_range_without_other_ids() {
        let before = JobId::generate();
        let batch = BatchId::generate();
        let after = JobId::generate();
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
