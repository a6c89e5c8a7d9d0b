//! Deletion of everything that a tenant has.

use async_trait::async_trait;
use tritmill_queue::{StoreError, Tenant};

/// What [`Tenants::erase_tenant`] deleted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
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

/// Tenants of a store.
#[async_trait]
pub trait Tenants: Send + Sync {
    /// Deletes everything of a tenant: keys, batches, files, quotas, and jobs with their results in
    /// any state; a worker that runs one loses its claim. Deletes a limited number of jobs per
    /// call ([`ERASED_MAX`](tritmill_queue::store::maintenance::ERASED_MAX)); repeat until [`Erased::done`]. What was
    /// deleted before an error stays deleted.
    async fn erase_tenant(&self, tenant: &Tenant) -> Result<Erased, StoreError>;
}
