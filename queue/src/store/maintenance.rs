//! Upkeep of a store: partitions, retention, and deletion of a tenant's data.

use async_trait::async_trait;
use serde::Serialize;

use super::StoreError;
use crate::job::Tenant;

/// Maximum number of jobs that one call of [`Maintenance::erase_tenant`] deletes.
pub const ERASED_MAX: u64 = 50_000;

/// What [`Maintenance::maintain`] did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Maintained {
    /// Partitions created, over all tables.
    pub created: u32,
    /// Partitions dropped, over all tables.
    pub dropped: u32,
    /// Partitions of jobs past the retention that were kept because a job is unfinished.
    pub kept_unfinished: u32,
    /// Partitions of jobs past the retention that were kept because a job finished too recently.
    pub kept_recent: u32,
}

/// What [`Maintenance::erase_tenant`] deleted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct Erased {
    /// Deleted API keys.
    pub keys: u64,
    /// Deleted batches.
    pub batches: u64,
    /// Deleted files.
    pub files: u64,
    /// Deleted jobs.
    pub jobs: u64,
    /// Whether nothing is left.
    pub done: bool,
}

/// Upkeep of a store.
#[async_trait]
pub trait Maintenance: Send + Sync {
    /// Creates the partitions of the coming days, deletes what is past the database's retention, and
    /// deletes workers that are long silent. Call it every few hours, from any number of processes.
    /// If an error interrupts a call, the next call finishes the work.
    async fn maintain(&self) -> Result<Maintained, StoreError>;

    /// Deletes everything of a tenant: keys, batches, files, quotas, and jobs with their results in
    /// any state; a worker that runs one loses its claim. Deletes at most [`ERASED_MAX`] jobs per
    /// call; repeat until [`Erased::done`]. What was deleted before an error stays deleted.
    async fn erase_tenant(&self, tenant: &Tenant) -> Result<Erased, StoreError>;
}
