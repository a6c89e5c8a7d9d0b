//! A dispatcher for many processes: Redis streams.
//!
//! One stream per queue, priority and tenant, `tm:{MODEL:FORMAT}:PRIORITY:TENANT`, with the consumer
//! group `workers`. All keys of a queue share one cluster slot, and every change is one script in it
//! (`redis/*.lua`; `queue.lua` lists the keys). An entry holds a version, a job id and a cost; the job
//! itself is in the store.
//!
//! Invariants: streams are never trimmed; an entry is removed when it is acknowledged, and a stream when
//! it is empty; only the consumer that an entry is pending with can acknowledge, renew or hand it back; a
//! job is in its queue once. Damage by other programs (deleted entries, lost groups, garbage in a stream,
//! an emptied Redis) is repaired when it is found, and counted.
//!
//! Handed-back entries stay in their stream, pending with a reserved consumer name, and are delivered in
//! their order before other entries of their tenant. Requeued jobs follow in order of age, then fresh
//! entries.
//!
//! See also `redis/pull.rs` for waiting and for lost answers.

mod address;
mod admission;
mod check;
mod connections;
mod deliveries;
mod enqueue;
mod inner;
mod keys;
mod pull;
pub(crate) mod scripts;
mod shards;
mod tls;

use std::{fmt, sync::Arc, time::Duration};

pub use address::RedisUrlError;
use async_trait::async_trait;
pub use connections::BlockingConnections;
pub(crate) use connections::{BLOCK_MAX, Connections};
pub use enqueue::Delayed;
pub use inner::DispatchStats;
pub(crate) use inner::unavailable;
use redis::FromRedisValue as _;

use self::{address::Address, inner::Inner};
use super::{
    Backlog, BacklogByPriority, BacklogLimit, Delivery, Demand, DispatchError, Dispatcher, Entry,
    Missing, Pull, Quotas,
};
use crate::{events::RedisEvents, job::QueueName};

/// Idle time after which a consumer without entries counts as dead. The next pull of a live one creates
/// it again.
const CONSUMER_IDLE: Duration = Duration::from_secs(600);

/// Queues in Redis. Cheap to clone; clones share connections and counters.
#[derive(Clone)]
pub struct RedisDispatcher {
    inner: Arc<Inner>,
}

impl fmt::Debug for RedisDispatcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Inner { connections, limit, .. } = &*self.inner;
        f.debug_struct("RedisDispatcher")
            .field("connections", connections)
            .field("limit", limit)
            .finish_non_exhaustive()
    }
}

impl RedisDispatcher {
    /// Creates a dispatcher on the Redis at `url`, with this limit for each shard of a queue. It connects when it
    /// is first used, and again when a connection breaks. URLs:
    ///
    /// ```text
    /// redis://[user:password@]host[:6379][/db]
    /// redis+sentinel://[user:password@]host[:26379],…/service[/db][?sentinel_password=…]
    /// redis+cluster://[user:password@]host[:6379],…
    /// ```
    ///
    /// with `?shards=N` for queues in N shards, `rediss` for TLS, `?sslrootcert=FILE` for a private authority and
    /// `sslcert=FILE&sslkey=FILE` for a client certificate; all values are percent-encoded.
    ///
    /// # Errors
    /// If the URL is invalid. The error does not repeat the URL, which may hold a password.
    pub fn new(url: &str, limit: BacklogLimit) -> Result<Self, RedisUrlError> {
        let connections = Connections::new(Address::parse(url)?)
            .map_err(|error| RedisUrlError::Certificates(error.to_string()))?;
        let shards = connections.shards();
        Ok(Self { inner: Arc::new(Inner::new(Arc::new(connections), shards, limit)) })
    }

    /// Pings Redis through the shared connection.
    pub async fn ping(&self) -> Result<(), DispatchError> {
        let (command, connections) = (redis::cmd("PING"), &self.inner.connections);
        let again = match connections.query::<redis::Value>(&command).await {
            // A broken connection was dropped: try a new one.
            Err(_) => connections.query::<redis::Value>(&command).await,
            answer => answer,
        };
        again.map(drop).map_err(unavailable)
    }

    /// Returns the number of shards of each queue.
    pub fn shards(&self) -> u16 {
        self.inner.shards
    }

    /// Faults that were detected and repaired since this dispatcher was created.
    pub fn stats(&self) -> DispatchStats {
        *self.inner.stats.lock()
    }

    /// Returns the state of the connections for reads that wait. Other commands share one connection.
    pub fn blocking_connections(&self) -> BlockingConnections {
        self.inner.connections.blocking()
    }

    /// Keeps entries until they are due; then pulls and [`Self::promote`] queue them. A job that waits
    /// or is delivered stays as it is; a delayed one gets the new time; enqueueing a job ends its
    /// delay.
    ///
    /// # Errors
    /// [`DispatchError::Busy`] if more entries would be delayed than may wait.
    pub async fn delay(&self, delayed: &[Delayed]) -> Result<(), DispatchError> {
        self.inner.delay(delayed).await
    }

    /// Queues delayed entries that are due; returns their number.
    pub async fn promote(&self, queue: &QueueName) -> Result<usize, DispatchError> {
        self.inner.promote(queue).await
    }

    /// Returns the backlog of a queue and the rate at which it is drained.
    pub async fn backlog(&self, queue: &QueueName) -> Result<Backlog, DispatchError> {
        self.inner.backlog(queue).await
    }

    /// Removes consumers without entries that were idle for `idle`; returns their number.
    /// [`Dispatcher::reclaim`] does this once a minute, with ten minutes.
    pub async fn remove_idle_consumers(
        &self,
        queue: &QueueName,
        idle: Duration,
    ) -> Result<usize, DispatchError> {
        self.inner.sweep(queue, idle).await.map_err(unavailable)
    }

    /// Deletes all data of a queue in Redis. If the store still has queued jobs of it, reconcilers
    /// enqueue them again.
    pub async fn forget_queue(&self, queue: &QueueName) -> Result<(), DispatchError> {
        for prefix in self.inner.prefixes(queue) {
            self.inner.data_names.lock().remove(&prefix);
        }
        self.forget_after(queue, Duration::ZERO).await
    }

    /// Lets all data of a queue in Redis expire, as far as it exists now.
    async fn forget_after(&self, queue: &QueueName, after: Duration) -> Result<(), DispatchError> {
        let arguments = [after.as_millis().to_string()];
        for prefix in self.inner.prefixes(queue) {
            let run = self.inner.connections.run_again(&scripts::FORGET, &prefix, &arguments);
            run.await.map(|_: i64| ()).map_err(unavailable)?;
        }
        Ok(())
    }

    /// Returns the memory that Redis uses for its data, in bytes; in a cluster, that of one node.
    pub async fn used_memory_bytes(&self) -> Result<u64, DispatchError> {
        let mut command = redis::cmd("INFO");
        command.arg("memory");
        let answer: redis::Value =
            self.inner.connections.query_again(&command).await.map_err(unavailable)?;
        let info = String::from_redis_value(answer).unwrap_or_default();
        let bytes =
            info.lines().find_map(|line| line.strip_prefix("used_memory:")?.trim().parse().ok());
        bytes.ok_or_else(|| {
            let what = "Redis does not tell its memory";
            unavailable((redis::ErrorKind::UnexpectedReturnType, what).into())
        })
    }

    /// Events of jobs in the same Redis, with the same connections.
    pub fn events(&self) -> RedisEvents {
        let Inner { connections, stats, .. } = &*self.inner;
        RedisEvents::new(Arc::clone(connections), Arc::clone(stats))
    }
}

#[async_trait]
impl Dispatcher for RedisDispatcher {
    async fn enqueue(&self, entries: &[Entry]) -> Result<usize, DispatchError> {
        self.inner.enqueue(entries).await
    }

    async fn requeue(&self, entries: &[Entry]) -> Result<usize, DispatchError> {
        self.inner.requeue(entries).await
    }

    async fn missing(&self, queue: &QueueName) -> Result<Option<Missing>, DispatchError> {
        self.inner.missing(queue).await
    }

    async fn set_missing(&self, queue: &QueueName, missing: Missing) -> Result<(), DispatchError> {
        self.inner.set_missing(queue, missing).await
    }

    async fn admit(
        &self,
        demand: &Demand,
        quotas: &Quotas,
    ) -> Result<BacklogByPriority, DispatchError> {
        self.inner.admit(demand, quotas).await
    }

    async fn pull(&self, pull: Pull<'_>) -> Result<Vec<Delivery>, DispatchError> {
        self.inner.pull(pull).await
    }

    async fn acknowledge(
        &self,
        consumer: &str,
        deliveries: &[Delivery],
    ) -> Result<usize, DispatchError> {
        self.inner.acknowledge(consumer, deliveries).await.map_err(unavailable)
    }

    async fn hand_back(
        &self,
        consumer: &str,
        deliveries: &[Delivery],
    ) -> Result<usize, DispatchError> {
        self.inner.hand_back(consumer, deliveries).await.map_err(unavailable)
    }

    async fn renew(
        &self,
        consumer: &str,
        deliveries: &[Delivery],
    ) -> Result<Vec<Delivery>, DispatchError> {
        self.inner.renew(consumer, deliveries).await.map_err(unavailable)
    }

    async fn reclaim(
        &self,
        pull: Pull<'_>,
        idle: Duration,
    ) -> Result<Vec<Delivery>, DispatchError> {
        if self.inner.is_sweep_due(pull.queue) {
            // A failed sweep does not affect the caller.
            if let Err(error) = self.inner.sweep(pull.queue, CONSUMER_IDLE).await {
                tracing::debug!(%error, "search for dead consumers failed");
            }
        }
        self.inner.reclaim(&pull, idle).await.map_err(unavailable)
    }

    async fn depth(&self, queue: &QueueName) -> Result<usize, DispatchError> {
        self.inner.depth(queue).await
    }
}
