//! Upkeep of a store: partitions, retention, and deletion of a tenant's jobs.

use async_trait::async_trait;

use super::StoreError;
use crate::job::{JobId, Tenant};

/// Maximum number of jobs that one call of [`Maintenance::erase_jobs`] deletes.
pub const ERASED_MAX: u64 = 50_000;

/// What [`Maintenance::maintain`] did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Maintained {
    /// Partitions created, over all tables.
    pub created: u32,
    /// Partitions dropped, over all tables.
    pub dropped: u32,
    /// Partitions of jobs past the retention that were kept because a job finished too recently.
    pub kept_recent: u32,
}

/// What [`Maintenance::erase_jobs`] deleted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ErasedJobs {
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

    /// Deletes the quotas of a tenant, and its jobs with their results in any state; a worker that runs one
    /// loses its claim. Deletes at most [`ERASED_MAX`] jobs per call; repeat until [`ErasedJobs::done`]. What was
    /// deleted before an error stays deleted.
    async fn erase_jobs(&self, tenant: &Tenant) -> Result<ErasedJobs, StoreError>;

    /// Deletes jobs in any state with their results; a worker that runs one loses its claim. Returns how many were
    /// deleted.
    async fn delete_jobs(&self, ids: &[JobId]) -> Result<u64, StoreError>;
}
