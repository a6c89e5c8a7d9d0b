//! Limits of tenants, what they use of them, and deletion of everything that a tenant has.

use async_trait::async_trait;
use tritmill_queue::{StoreError, Tenant};

use super::webhooks::Webhook;

/// Limits that operators set for a tenant. `None`: the service's own limit, or no limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TenantLimits {
    /// Bytes of all its files together. The output of batches counts, and is written also above it.
    pub file_bytes: Option<u64>,
    /// Unfinished batches.
    pub open_batches: Option<u32>,
    /// Valid API keys.
    pub keys: Option<u32>,
}

/// What a tenant has now of what [`TenantLimits`] limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TenantUse {
    /// Bytes of its complete files.
    pub file_bytes: u64,
    /// Unfinished batches.
    pub open_batches: u64,
    /// Valid API keys.
    pub keys: u64,
}

/// A tenant with its limits and what it uses of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TenantAccount {
    /// The tenant.
    pub tenant: Tenant,
    /// Its limits.
    pub limits: TenantLimits,
    /// What it uses.
    pub used: TenantUse,
}

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

/// Files of a tenant.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StoredFiles {
    /// Number of complete files.
    pub files: u64,
    /// Their size together.
    pub size_bytes: u64,
}

/// Tenants of a store.
#[async_trait]
pub trait Tenants: Send + Sync {
    /// Returns the limits of a tenant.
    async fn tenant_limits(&self, tenant: &Tenant) -> Result<TenantLimits, StoreError>;

    /// Returns the limits of a tenant, and what it uses of them. Reads all its files: for tenants with limits.
    async fn tenant_account(&self, tenant: &Tenant) -> Result<TenantAccount, StoreError>;

    /// Returns the tenants for which limits are set, by name.
    async fn limited_tenants(&self) -> Result<Vec<TenantAccount>, StoreError>;

    /// Sets all limits of a tenant. What it has above them stays.
    async fn set_tenant_limits(
        &self,
        tenant: &Tenant,
        limits: TenantLimits,
    ) -> Result<(), StoreError>;

    /// Returns the webhook of a tenant's batches that have none of their own.
    async fn tenant_webhook(&self, tenant: &Tenant) -> Result<Option<Webhook>, StoreError>;

    /// Sets or removes that webhook. What failed at its URL is forgotten.
    async fn set_tenant_webhook(
        &self,
        tenant: &Tenant,
        webhook: Option<&Webhook>,
    ) -> Result<(), StoreError>;

    /// Deletes everything of a tenant: keys, batches, files, limits, quotas, and jobs with their results in
    /// any state; a worker that runs one loses its claim. Deletes a limited number of jobs per
    /// call ([`ERASED_MAX`](tritmill_queue::store::maintenance::ERASED_MAX)); repeat until [`Erased::done`]. What was
    /// deleted before an error stays deleted.
    async fn erase_tenant(&self, tenant: &Tenant) -> Result<Erased, StoreError>;

    /// Counts the complete files of a tenant.
    async fn stored_files(&self, tenant: &Tenant) -> Result<StoredFiles, StoreError>;
}
