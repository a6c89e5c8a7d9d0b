//! Settings of queues: pause, limits of the backlog and of the wait, and tenant quotas.
//!
//! The store keeps the settings; producers apply the limits and workers the pauses.

use std::time::Duration;

use async_trait::async_trait;

use super::{Progress, StoreError};
use crate::{
    dispatch::Quotas,
    job::{QueueName, Tenant},
};

/// The settings of one queue.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QueueState {
    /// The queue.
    pub queue: QueueName,
    /// Whether workers claim no jobs from it.
    pub paused: bool,
    /// Limit of its backlog in tokens; `None` means the program's default.
    pub limit_tokens: Option<u64>,
    /// Longest predicted wait of a new job; `None`: only its own deadline applies.
    pub max_wait: Option<Duration>,
    /// Numerics class that its first worker registered.
    pub class: Option<String>,
    /// Further numerics classes that its workers may have.
    pub allowed_classes: Vec<String>,
}

impl QueueState {
    /// Creates a queue with default settings.
    pub fn with_defaults(queue: QueueName) -> Self {
        let allowed_classes = Vec::new();
        let (limit_tokens, max_wait, class) = (None, None, None);
        Self { queue, paused: false, limit_tokens, max_wait, class, allowed_classes }
    }
}

/// A queue with its job counts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QueueOverview {
    /// Its settings.
    pub settings: QueueState,
    /// Its jobs by state, and the tokens of the completed ones.
    pub progress: Progress,
    /// Time since the oldest queued job was submitted.
    pub oldest_queued: Option<Duration>,
    /// Unclaimed jobs past their deadline; the next reconciliation marks them as expired.
    pub overdue: u64,
    /// Live workers that serve the queue.
    pub workers: u64,
}

impl QueueOverview {
    /// Creates a queue without jobs or workers.
    pub(super) fn from_state(settings: QueueState) -> Self {
        let progress = Progress::default();
        Self { settings, progress, oldest_queued: None, overdue: 0, workers: 0 }
    }
}

/// Reads and writes the settings of queues.
#[async_trait]
pub trait QueueSettings: Send + Sync {
    /// Returns a queue's settings; the defaults if none were set.
    async fn queue_state(&self, queue: &QueueName) -> Result<QueueState, StoreError>;

    /// Returns the settings of every queue that has any, by name.
    async fn queue_states(&self) -> Result<Vec<QueueState>, StoreError>;

    /// Returns every queue that has jobs or settings, by name. Reads every job, so it must not be
    /// called often.
    async fn queues(&self) -> Result<Vec<QueueOverview>, StoreError>;

    /// Pauses or resumes a queue.
    async fn set_paused(&self, queue: &QueueName, paused: bool) -> Result<(), StoreError>;

    /// Limits a queue's backlog in tokens; `None` restores the default.
    async fn set_limit(
        &self,
        queue: &QueueName,
        limit_tokens: Option<u64>,
    ) -> Result<(), StoreError>;

    /// Sets the longest predicted wait of a new job, in whole milliseconds; `None` removes the limit.
    async fn set_max_wait(
        &self,
        queue: &QueueName,
        max_wait: Option<Duration>,
    ) -> Result<(), StoreError>;

    /// Returns the limits of a queue: its own, and those of its tenants in tokens.
    async fn quotas(&self, queue: &QueueName) -> Result<Quotas, StoreError>;

    /// Limits the backlog of one tenant in a queue, or (`tenant` = `None`) of each tenant without a
    /// quota of its own. A `limit_tokens` of `None` removes the limit.
    async fn set_quota(
        &self,
        queue: &QueueName,
        tenant: Option<&Tenant>,
        limit_tokens: Option<u64>,
    ) -> Result<(), StoreError>;
}
