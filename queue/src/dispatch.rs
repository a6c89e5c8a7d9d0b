//! What hands jobs to workers: the [`Dispatcher`] trait.
//!
//! A dispatcher orders ids: priorities weighted 16:4:1, first in first out within one. It may lose
//! everything at any time; whoever feeds it asks the store what is unfinished. So a delivery is a
//! hint, and only a claim in the store makes a job somebody's.
//!
//! [`MemoryDispatcher`] serves one process, [`RedisDispatcher`] many.

mod backlog;
mod memory;
mod redis;

use std::time::Duration;

use async_trait::async_trait;
pub use backlog::{Backlog, BacklogLimit, Demand, Limit, Quotas};
pub use memory::MemoryDispatcher;
pub(crate) use redis::{BLOCK_MAX, Connections, keys, refusal, scripts};
pub use redis::{Delayed, DispatchStats, RedisDispatcher, RedisUrlError};

use crate::job::{JobId, Priority, QueueName, Tenant};

/// What a dispatcher keeps of a job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// The job.
    pub id: JobId,
    /// Where it waits.
    pub queue: QueueName,
    /// How urgent it is.
    pub priority: Priority,
    /// Whose it is.
    pub tenant: Tenant,
    /// Tokens it is expected to take, for fairness between tenants and for admission.
    pub cost: u32,
}

/// An entry handed to a consumer until it is acknowledged or handed back.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Delivery {
    /// The job.
    pub id: JobId,
    /// Names this delivery to the dispatcher (a stream entry's id).
    pub receipt: String,
    /// How often the entry was delivered, this time included. A poison cap, not the attempts.
    pub deliveries: u32,
}

/// A consumer's wish for work.
#[derive(Debug, Clone)]
pub struct Pull<'a> {
    /// The queue it serves.
    pub queue: &'a QueueName,
    /// Name of the process incarnation.
    pub consumer: &'a str,
    /// Entries it has room for.
    pub max: usize,
    /// How long to wait for the first.
    pub wait: Duration,
}

/// A dispatcher that did not do as told.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DispatchError {
    /// The queue is at its bound; nothing was taken.
    #[error("queue {queue} is full at {limit}")]
    Busy {
        /// The queue.
        queue: QueueName,
        /// The bound that would be passed.
        limit: Limit,
        /// When to try again.
        retry_after: Duration,
    },
    /// The dispatcher cannot be reached; the store goes on being the truth.
    #[error("dispatcher unavailable: {0}")]
    Unavailable(#[source] Box<dyn std::error::Error + Send + Sync>),
}

/// Hands jobs to workers in order of priority. May lose everything.
#[async_trait]
pub trait Dispatcher: Send + Sync {
    /// Adds entries at the ends of their queues, all of them or none; returns how many were news. An
    /// entry that is already waiting or delivered stays as it is.
    ///
    /// # Errors
    /// [`DispatchError::Busy`] over the bound.
    async fn enqueue(&self, entries: &[Entry]) -> Result<usize, DispatchError>;

    /// Whether there is room for so much more: within the dispatcher's bounds and the queue's
    /// quotas. A single entry finds room where nothing of its kind waits, however large it is: else
    /// it never would. Concurrent producers may each be told yes; a bound is passed by no more than what
    /// they submit at once.
    ///
    /// # Errors
    /// [`DispatchError::Busy`] over a bound.
    async fn admit(&self, demand: &Demand, quotas: &Quotas) -> Result<(), DispatchError>;

    /// Takes up to `max` entries, high before normal before low by weight; waits up to `wait` for
    /// the first, then returns what is there.
    ///
    /// # Errors
    /// [`DispatchError::Unavailable`].
    async fn pull(&self, pull: Pull<'_>) -> Result<Vec<Delivery>, DispatchError>;

    /// Forgets delivered entries for good, after the store's commit. Only deliveries that are
    /// still the consumer's count; returns how many did.
    ///
    /// # Errors
    /// [`DispatchError::Unavailable`].
    async fn acknowledge(
        &self,
        consumer: &str,
        deliveries: &[Delivery],
    ) -> Result<usize, DispatchError>;

    /// Gives delivered entries back to the front of their queues, for others at once.
    ///
    /// # Errors
    /// [`DispatchError::Unavailable`].
    async fn hand_back(
        &self,
        consumer: &str,
        deliveries: &[Delivery],
    ) -> Result<usize, DispatchError>;

    /// Says that the consumer still works on these, so that nobody reclaims them; returns those that
    /// are its own no more. Only a hint about speed: the lease is in the store.
    ///
    /// # Errors
    /// [`DispatchError::Unavailable`].
    async fn renew(
        &self,
        consumer: &str,
        deliveries: &[Delivery],
    ) -> Result<Vec<Delivery>, DispatchError>;

    /// Takes up to `pull.max` entries that other consumers were delivered but have not renewed for
    /// `idle`; does not wait. Their claims in the store may still live: the caller tries.
    ///
    /// # Errors
    /// [`DispatchError::Unavailable`].
    async fn reclaim(&self, pull: Pull<'_>, idle: Duration)
    -> Result<Vec<Delivery>, DispatchError>;

    /// Entries waiting in a queue, delivered ones not counted.
    ///
    /// # Errors
    /// [`DispatchError::Unavailable`].
    async fn depth(&self, queue: &QueueName) -> Result<usize, DispatchError>;
}
