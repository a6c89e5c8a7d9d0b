//! Idempotency keys of single calls: a repeated call waits for the answer of the first.

use std::time::Duration;

use async_trait::async_trait;
use tritmill_queue::{JobId, StoreError, Tenant};

/// How long a key is kept.
pub const KEPT: Duration = Duration::from_hours(24);

/// The idempotency key of a call, and what was asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CallKey<'a> {
    /// The key: a tenant has one job per key.
    pub key: &'a str,
    /// SHA-256 of the request: another one with the same key is refused.
    pub request_hash: &'a [u8; 32],
}

/// The job of a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KeyedCall {
    /// The job: of the first call with the key.
    pub job: JobId,
    /// Whether that call asked the same.
    pub is_same: bool,
}

/// Idempotency keys of calls in a store.
#[async_trait]
pub trait CallKeys: Send + Sync {
    /// Gives a job a key, unless another job of the tenant has it; returns the one that has it. The job may be in no
    /// store yet: it is submitted afterwards, by each call with the key.
    async fn claim_call(
        &self,
        tenant: &Tenant,
        key: CallKey<'_>,
        job: JobId,
    ) -> Result<KeyedCall, StoreError>;

    /// Gives the key of a job without an answer to another job; returns whether it still had the key.
    async fn replace_call(
        &self,
        tenant: &Tenant,
        key: &str,
        jobs: (JobId, JobId),
    ) -> Result<bool, StoreError>;

    /// Returns whether an earlier request of a tenant took a key and asked the same.
    async fn has_call(&self, tenant: &Tenant, key: CallKey<'_>) -> Result<bool, StoreError>;

    /// Deletes the keys that were kept for [`KEPT`]; returns how many.
    async fn sweep_calls(&self) -> Result<u64, StoreError>;
}
