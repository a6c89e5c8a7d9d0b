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
mod connections;
mod feed;
pub(crate) mod keys;
mod pull;
pub(crate) mod scripts;
mod shards;
mod stats;

use std::{
    collections::HashMap,
    fmt,
    sync::Arc,
    time::{Duration, Instant},
};

pub use address::RedisUrlError;
use async_trait::async_trait;
pub use connections::BlockingConnections;
pub(crate) use connections::{BLOCK_MAX, Connections};
pub(crate) use feed::refusal;
use parking_lot::Mutex;
use redis::{RedisError, RedisResult};
pub use stats::DispatchStats;

use self::{address::Address, pull::Consumer};
use super::{
    Backlog, BacklogLimit, Delivery, Demand, DispatchError, Dispatcher, Entry, Line, Missing, Pull,
    Quotas,
};
use crate::{
    events::RedisEvents,
    job::{QueueName, Timestamp},
    store::RedisStore,
};

/// Least time between two searches for dead consumers of a queue.
const SWEEP_EVERY: Duration = Duration::from_secs(60);
/// Idle time after which a consumer without entries counts as dead. The next pull of a live one creates
/// it again.
const CONSUMER_IDLE: Duration = Duration::from_secs(600);
/// Maximum number of deliveries that one script handles.
const BATCH: usize = 512;

/// Queues in Redis. Cheap to clone; clones share connections and counters.
#[derive(Clone)]
pub struct RedisDispatcher {
    inner: Arc<Inner>,
}

struct Inner {
    connections: Arc<Connections>,
    /// Shards of each queue.
    shards: u16,
    limit: BacklogLimit,
    /// Shared with the publishers of events.
    stats: Arc<Mutex<DispatchStats>>,
    /// Names of the queues' data, by prefix: a new name shows that Redis was emptied.
    born: Mutex<HashMap<String, String>>,
    /// Consumers of this process, by name.
    consumers: Mutex<HashMap<String, Arc<Consumer>>>,
    /// Time of the last search for dead consumers, by queue.
    swept: Mutex<HashMap<QueueName, Instant>>,
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

/// An entry and its due time, on Redis's clock.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Delayed {
    /// The entry.
    pub entry: Entry,
    /// Due time, on Redis's clock.
    pub due: Timestamp,
}

/// Redis requires a password and the URL has none.
#[derive(Debug, thiserror::Error)]
#[error("authentication required (NOAUTH): the Redis URL has no password")]
struct NoPassword;

fn unavailable(error: RedisError) -> DispatchError {
    // Redis refuses long requests with another error before it reads the command.
    if error.code() == Some("NOAUTH") || error.to_string().contains("unauthenticated") {
        return DispatchError::Unavailable(Box::new(NoPassword));
    }
    DispatchError::Unavailable(Box::new(error))
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
        let inner = Inner {
            shards: connections.shards(),
            connections: Arc::new(connections),
            limit,
            stats: Arc::default(),
            born: Mutex::default(),
            consumers: Mutex::default(),
            swept: Mutex::default(),
        };
        Ok(Self { inner: Arc::new(inner) })
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
            let none: &[String] = &[];
            self.inner.born.lock().remove(&prefix);
            let run = self.inner.connections.run_again(&scripts::FORGET, &prefix, none);
            run.await.map(|_: i64| ()).map_err(unavailable)?;
        }
        Ok(())
    }

    /// Returns a store of one queue's jobs in the same Redis, with the same connections: the fast
    /// mode; see [`RedisStore`] for what it may lose. Finished jobs are kept for `retention`.
    pub fn store(&self, queue: QueueName, retention: Duration) -> RedisStore {
        let connections = Arc::clone(&self.inner.connections);
        RedisStore::new(connections, queue, self.inner.limit, retention)
    }

    /// Events of jobs in the same Redis, with the same connections.
    pub fn events(&self) -> RedisEvents {
        let Inner { connections, stats, .. } = &*self.inner;
        RedisEvents::new(Arc::clone(connections), Arc::clone(stats))
    }
}

impl Inner {
    fn consumer(&self, name: &str) -> Arc<Consumer> {
        let mut consumers = self.consumers.lock();
        Arc::clone(consumers.entry(name.to_owned()).or_default())
    }

    async fn acknowledge(&self, name: &str, deliveries: &[Delivery]) -> RedisResult<usize> {
        let mut count = 0;
        for batch in deliveries.chunks(BATCH) {
            for group in keys::group(name, batch).0 {
                let run = self.connections.run_again(
                    &scripts::ACKNOWLEDGE,
                    group.prefix,
                    &group.arguments,
                );
                let (mine, foreign): (usize, u64) = run.await?;
                self.count_foreign(group.prefix, foreign);
                count += mine;
            }
        }
        self.consumer(name).release(deliveries);
        let fenced = deliveries.len().saturating_sub(count) as u64;
        self.stats.lock().fenced_acknowledgements += fenced;
        if fenced > 0 {
            tracing::debug!(
                consumer = name,
                fenced,
                "acknowledgement of entries that belong to others refused"
            );
        }
        Ok(count)
    }

    async fn hand_back(&self, name: &str, deliveries: &[Delivery]) -> RedisResult<usize> {
        let mut count = 0;
        for batch in deliveries.chunks(BATCH) {
            for group in keys::group(name, batch).0 {
                let script = &scripts::HAND_BACK;
                let run = self.connections.run_again(script, group.prefix, &group.arguments);
                let mine: usize = run.await?;
                self.ring(group.prefix, mine).await;
                count += mine;
            }
        }
        self.consumer(name).release(deliveries);
        Ok(count)
    }

    async fn renew(&self, name: &str, deliveries: &[Delivery]) -> RedisResult<Vec<Delivery>> {
        let mut lost = Vec::new();
        for batch in deliveries.chunks(BATCH) {
            let (groups, others) = keys::group(name, batch);
            lost.extend(others.into_iter().map(|position| batch[position].clone()));
            for group in groups {
                let script = &scripts::RENEW;
                let run = self.connections.run_again(script, group.prefix, &group.arguments);
                let positions: Vec<usize> = run.await?;
                let of = |index: usize| batch.get(*group.positions.get(index)?).cloned();
                lost.extend(positions.into_iter().filter_map(of));
            }
        }
        self.consumer(name).release(&lost);
        Ok(lost)
    }

    async fn sweep(&self, queue: &QueueName, idle: Duration) -> RedisResult<usize> {
        let mut count = 0;
        for prefix in self.prefixes(queue) {
            let mut cursor = "0".to_owned();
            loop {
                let arguments = [cursor, idle.as_millis().to_string()];
                let run = self.connections.run_again(&scripts::SWEEP, &prefix, &arguments);
                let (next, removed): (String, usize) = run.await?;
                count += removed;
                if next == "0" {
                    break;
                }
                cursor = next;
            }
        }
        self.stats.lock().consumers_removed += count as u64;
        Ok(count)
    }

    /// Returns whether it is time to search for dead consumers of this queue.
    fn is_sweep_due(&self, queue: &QueueName) -> bool {
        let mut swept = self.swept.lock();
        let due = swept.get(queue).is_none_or(|last| last.elapsed() >= SWEEP_EVERY);
        if due {
            swept.insert(queue.clone(), Instant::now());
        }
        due
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

    async fn admit(&self, demand: &Demand, quotas: &Quotas) -> Result<Line, DispatchError> {
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
