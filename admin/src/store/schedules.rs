//! Schedules: batches that are created again and again.

use std::{fmt, str::FromStr};

use async_trait::async_trait;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use tritmill_queue::{StoreError, Tenant, Timestamp, job::UnknownWord, store::Page};
use uuid::Uuid;

use super::{BatchId, files::prefixed};

/// Identifier of a schedule.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ScheduleId(pub(super) Uuid);

impl ScheduleId {
    /// Generates a new id.
    pub fn generate() -> Self {
        Self(Uuid::now_v7())
    }
}

impl From<ScheduleId> for Uuid {
    fn from(id: ScheduleId) -> Self {
        id.0
    }
}

impl fmt::Display for ScheduleId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sched_{}", self.0.as_simple())
    }
}

impl FromStr for ScheduleId {
    type Err = UnknownWord;

    fn from_str(text: &str) -> Result<Self, UnknownWord> {
        let found = prefixed(text, "sched_").map(Self);
        found.ok_or_else(|| UnknownWord { what: "schedule", word: text.to_owned() })
    }
}

/// A schedule, without its columns.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScheduleRecord {
    /// Times of its runs, as five fields of cron.
    pub cron: String,
    /// Time zone of these fields, by its name in the IANA database.
    pub timezone: String,
    /// Body of the request that creates a batch.
    pub batch: Map<String, Value>,
    /// Creation time.
    pub created_at: Timestamp,
    /// Time of the latest run.
    #[serde(default)]
    pub last_run_at: Option<Timestamp>,
    /// Batch of the latest run that created one.
    #[serde(default)]
    pub last_batch: Option<BatchId>,
    /// Why the latest run created no batch.
    #[serde(default)]
    pub error: Option<String>,
    /// Runs that were not made, because the service was down.
    #[serde(default)]
    pub missed: u64,
}

impl ScheduleRecord {
    /// Returns a schedule that had no run yet.
    pub fn new(cron: String, timezone: String, batch: Map<String, Value>, at: Timestamp) -> Self {
        let (last_run_at, last_batch, error, missed) = (None, None, None, 0);
        Self { cron, timezone, batch, created_at: at, last_run_at, last_batch, error, missed }
    }
}

/// A schedule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Schedule {
    /// Its identifier.
    pub id: ScheduleId,
    /// Its tenant.
    pub tenant: Tenant,
    /// The API key that created it.
    pub key: Uuid,
    /// Time of the next run; `None` while it is paused.
    pub next_at: Option<Timestamp>,
    /// The rest.
    pub record: ScheduleRecord,
}

/// Schedules in a store.
#[async_trait]
pub trait Schedules: Send + Sync {
    /// Adds a schedule, unless its tenant has `max`; returns whether it did.
    async fn add_schedule(&self, schedule: &Schedule, max: u32) -> Result<bool, StoreError>;

    /// Returns the schedules of a tenant, or of all, in order of creation.
    async fn schedules(
        &self,
        tenant: Option<&Tenant>,
        page: Page<ScheduleId>,
    ) -> Result<Vec<Schedule>, StoreError>;

    /// Returns a schedule of a tenant.
    async fn schedule(
        &self,
        tenant: &Tenant,
        id: ScheduleId,
    ) -> Result<Option<Schedule>, StoreError>;

    /// Returns up to `max` schedules with a due run, the longest due first.
    async fn due_schedules(&self, max: u32) -> Result<Vec<Schedule>, StoreError>;

    /// Writes a schedule, if the time of its next run is still `before`; returns whether it did.
    async fn save_schedule(
        &self,
        schedule: &Schedule,
        before: Option<Timestamp>,
    ) -> Result<bool, StoreError>;

    /// Deletes a schedule of a tenant; returns whether there was one.
    async fn delete_schedule(&self, tenant: &Tenant, id: ScheduleId) -> Result<bool, StoreError>;
}
