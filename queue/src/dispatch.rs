//! The [`Dispatcher`] trait: delivers jobs to workers.
//!
//! A dispatcher orders job ids: priorities are weighted 16:4:1, and each is first in, first out. It may
//! lose everything at any time; reconcilers enqueue again what the store has queued. So a delivery is
//! only a hint: a worker owns a job once it has claimed it in the store.
//!
//! [`MemoryDispatcher`] serves one process, [`RedisDispatcher`] many.

mod backlog;
mod entry;
mod memory;
mod redis;

use std::time::Duration;

use async_trait::async_trait;
pub use backlog::{
    Backlog, BacklogByPriority, BacklogLimit, Cause, Demand, Limit, Missing, PriorityBacklog,
    Quotas,
};
pub use entry::{Delivery, Entry, Pull};
pub use memory::MemoryDispatcher;
pub(crate) use redis::{BLOCK_MAX, Connections, scripts, unavailable};
pub use redis::{BlockingConnections, Delayed, DispatchStats, RedisDispatcher, RedisUrlError};

use crate::{job::QueueName, refusal::Refusal};

/// A dispatcher operation failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DispatchError {
    /// The queue is full; nothing was added.
    #[error("queue {queue} is full at {limit}")]
    Busy {
        /// The queue.
        queue: QueueName,
        /// The limit that would be exceeded.
        limit: Limit,
        /// Time to wait before the next try.
        retry_after: Duration,
    },
    /// The dispatcher cannot be reached. The store still has all jobs.
    #[error("dispatcher unavailable: {0}")]
    Unavailable(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The dispatcher refuses the call until an operator has changed something. The store still has all jobs.
    #[error("dispatcher refused: {0}")]
    Refused(#[source] Refusal),
}

/// Delivers jobs to workers by priority; it may lose all its data.
#[async_trait]
pub trait Dispatcher: Send + Sync {
    /// Adds entries at the ends of their queues, all or none; returns how many were new. Entries that
    /// are already waiting or delivered stay as they are.
    ///
    /// # Errors
    /// [`DispatchError::Busy`] if a queue would exceed its limit.
    async fn enqueue(&self, entries: &[Entry]) -> Result<usize, DispatchError>;

    /// Adds entries of jobs that were accepted before, such as retries and what a restarted dispatcher
    /// lost: before all entries that [`Self::enqueue`] added for their tenants, in order of age (of job
    /// id). Returns how many were new; entries that are already waiting or delivered stay as they are.
    ///
    /// # Errors
    /// [`DispatchError::Busy`] if more than twice as many entries as the limit would wait. No other limit
    /// applies: these jobs were admitted once. Some entries may have been added; the call can be repeated.
    async fn requeue(&self, entries: &[Entry]) -> Result<usize, DispatchError>;

    /// Returns what the dispatcher lacks of the store's queued jobs; `None` if this is unknown, because
    /// its data is new or was lost.
    async fn missing(&self, queue: &QueueName) -> Result<Option<Missing>, DispatchError>;

    /// Sets what the dispatcher lacks, which may be nothing at the beginning of a refill. It counts as waiting
    /// towards the limits of the queue, not towards those of a tenant.
    async fn set_missing(&self, queue: &QueueName, missing: Missing) -> Result<(), DispatchError>;

    /// Checks that the demand fits the dispatcher's limits and the queue's quotas; returns what waits already. A
    /// single entry always fits if no other entry counts towards the limit: otherwise a large one would never be
    /// accepted. Concurrent callers are checked separately, so together they may exceed a limit. Jobs that only
    /// the store has count as waiting with the lowest priority.
    ///
    /// # Errors
    /// [`DispatchError::Busy`] if a limit would be exceeded.
    async fn admit(
        &self,
        demand: &Demand,
        quotas: &Quotas,
    ) -> Result<BacklogByPriority, DispatchError>;

    /// Takes up to `max` entries by weighted priority; waits up to `wait` for the first, then returns
    /// what is available.
    async fn pull(&self, pull: Pull<'_>) -> Result<Vec<Delivery>, DispatchError>;

    /// Removes delivered entries after the store's commit, if they still belong to the consumer; returns
    /// the number removed.
    async fn acknowledge(
        &self,
        consumer: &str,
        deliveries: &[Delivery],
    ) -> Result<usize, DispatchError>;

    /// Puts delivered entries that still belong to the consumer back at the front of their queues,
    /// where others can take them at once; returns their number.
    async fn hand_back(
        &self,
        consumer: &str,
        deliveries: &[Delivery],
    ) -> Result<usize, DispatchError>;

    /// Resets the idle time of deliveries that still belong to the consumer, so that others do not
    /// reclaim them; returns the other deliveries. This time is not the job's lease, which is in
    /// the store.
    async fn renew(
        &self,
        consumer: &str,
        deliveries: &[Delivery],
    ) -> Result<Vec<Delivery>, DispatchError>;

    /// Takes over up to `pull.max` entries of other consumers that were not renewed for `idle`; does not
    /// wait. If the previous consumer's claim in the store is still valid, the store refuses the
    /// caller's claim.
    async fn reclaim(&self, pull: Pull<'_>, idle: Duration)
    -> Result<Vec<Delivery>, DispatchError>;

    /// Returns the number of entries waiting in a queue, without delivered ones.
    async fn depth(&self, queue: &QueueName) -> Result<usize, DispatchError>;
}
