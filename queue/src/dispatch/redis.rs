//! The dispatcher of many processes: Redis streams.
//!
//! One stream per queue, priority and tenant, `tm:{MODEL:FORMAT}:PRIORITY:TENANT`, with the consumer
//! group `workers`; all keys of a queue share a slot of a cluster, and every change is one script
//! within it (`redis/*.lua`; `queue.lua` lists the keys). Entries hold an id and a cost under field
//! names and a version; the job itself is the store's.
//!
//! Invariants: nothing is trimmed, an entry leaves its stream when it is acknowledged, and a stream
//! leaves when it is empty; only the consumer that an entry is pending with can acknowledge, renew
//! or hand it back; a job is in a queue once. What another program breaks (deleted entries, lost
//! groups, garbage in a stream, an emptied Redis) is repaired where it is met, and counted.
//!
//! Handed-back entries stay in their stream, pending with a consumer that nobody is called, and are
//! taken from there in their order before anything fresh: at once, and at the front of their tenant.
//!
//! See also `redis/pull.rs` for waiting and for answers that get lost.

mod address;
mod connections;
mod feed;
pub(crate) mod keys;
mod pull;
pub(crate) mod scripts;
mod stats;

use std::{
    collections::HashMap,
    fmt,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

pub use address::RedisUrlError;
use async_trait::async_trait;
pub(crate) use connections::{BLOCK_MAX, Connections};
pub(crate) use feed::refusal;
use redis::{RedisError, RedisResult};
pub use stats::DispatchStats;

use self::{
    address::Address,
    pull::Consumer,
    stats::{Counters, add},
};
use super::{
    Backlog, BacklogLimit, Delivery, Demand, DispatchError, Dispatcher, Entry, Pull, Quotas,
};
use crate::{
    job::{QueueName, Timestamp},
    store::RedisStore,
};

/// How often a process looks for dead consumers of a queue, at most.
const SWEEP_EVERY: Duration = Duration::from_secs(60);
/// How long a consumer without entries has done nothing when it is taken for dead. One that lives
/// after all is made again by its next pull.
const CONSUMER_IDLE: Duration = Duration::from_secs(600);
/// Deliveries of one script.
const BATCH: usize = 512;

/// Queues in Redis. Cheap to clone; clones share connections and counters.
#[derive(Clone)]
pub struct RedisDispatcher {
    inner: Arc<Inner>,
}

struct Inner {
    connections: Arc<Connections>,
    limit: BacklogLimit,
    stats: Counters,
    /// Names of queues' data, by prefix: a new one says that Redis was emptied.
    born: Mutex<HashMap<String, String>>,
    /// Consumers of this process, by name.
    consumers: Mutex<HashMap<String, Arc<Consumer>>>,
    /// When dead consumers were looked for last, by queue.
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

/// An entry and when it is due, on Redis's clock.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Delayed {
    /// What will wait.
    pub entry: Entry,
    /// From when on.
    pub due: Timestamp,
}

/// A Redis that wants a password where the URL has none.
#[derive(Debug, thiserror::Error)]
#[error("authentication required (NOAUTH): the Redis URL has no password")]
struct NoPassword;

fn unavailable(error: RedisError) -> DispatchError {
    // Anything long is refused before Redis looks which command it is.
    if error.code() == Some("NOAUTH") || error.to_string().contains("unauthenticated") {
        return DispatchError::Unavailable(Box::new(NoPassword));
    }
    DispatchError::Unavailable(Box::new(error))
}

impl RedisDispatcher {
    /// A dispatcher in the Redis at `url`, whose queues hold up to `limit` each. It connects when it
    /// is first used, and again whenever it must. URLs:
    ///
    /// ```text
    /// redis://[user:password@]host[:6379][/db]
    /// redis+sentinel://[user:password@]host[:26379],…/service[/db][?sentinel_password=…]
    /// redis+cluster://[user:password@]host[:6379],…
    /// ```
    ///
    /// with `rediss` for TLS, then with `?sslrootcert=FILE` for a private authority and
    /// `sslcert=FILE&sslkey=FILE` for a certificate of one's own; all values are percent encoded.
    ///
    /// # Errors
    /// [`RedisUrlError`] if the URL names no Redis; it does not repeat the URL.
    pub fn new(url: &str, limit: BacklogLimit) -> Result<Self, RedisUrlError> {
        let connections = Connections::new(Address::parse(url)?);
        let inner = Inner {
            connections: Arc::new(
                connections.map_err(|error| RedisUrlError::Certificates(error.to_string()))?,
            ),
            limit,
            stats: Counters::default(),
            born: Mutex::default(),
            consumers: Mutex::default(),
            swept: Mutex::default(),
        };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// Asks Redis whether it is there, through the connection that everything uses.
    ///
    /// # Errors
    /// [`DispatchError::Unavailable`].
    pub async fn ping(&self) -> Result<(), DispatchError> {
        let (command, connections) = (redis::cmd("PING"), &self.inner.connections);
        let again = match connections.query::<redis::Value>(&command).await {
            // A connection found broken is replaced.
            Err(_) => connections.query::<redis::Value>(&command).await,
            answer => answer,
        };
        again.map(drop).map_err(unavailable)
    }

    /// What went wrong, and was put right, since this dispatcher was made.
    pub fn stats(&self) -> DispatchStats {
        self.inner.stats.read()
    }

    /// Keeps entries until they are due; pulls and [`Self::promote`] let them in. A job that waits
    /// or is delivered stays as it is, one that is delayed gets the new time, and enqueueing it ends
    /// the delay.
    ///
    /// # Errors
    /// [`DispatchError::Busy`] if as many are delayed as may wait.
    pub async fn delay(&self, delayed: &[Delayed]) -> Result<(), DispatchError> {
        self.inner.delay(delayed).await
    }

    /// Moves delayed entries that are due to their queue; returns how many were.
    ///
    /// # Errors
    /// [`DispatchError::Unavailable`].
    pub async fn promote(&self, queue: &QueueName) -> Result<usize, DispatchError> {
        self.inner.promote(queue).await
    }

    /// What waits in a queue, and how fast it is drained.
    ///
    /// # Errors
    /// [`DispatchError::Unavailable`].
    pub async fn backlog(&self, queue: &QueueName) -> Result<Backlog, DispatchError> {
        self.inner.backlog(queue).await
    }

    /// Removes consumers that hold nothing and did nothing for `idle`; returns how many.
    /// [`Dispatcher::reclaim`] does this once a minute with ten minutes.
    ///
    /// # Errors
    /// [`DispatchError::Unavailable`].
    pub async fn remove_idle_consumers(
        &self,
        queue: &QueueName,
        idle: Duration,
    ) -> Result<usize, DispatchError> {
        self.inner.sweep(queue, idle).await.map_err(unavailable)
    }

    /// Deletes all that Redis has of a queue: for one that is gone for good, or was only tried. Jobs
    /// of it that the store has queued are fed to it again by whoever reconciles.
    ///
    /// # Errors
    /// [`DispatchError::Unavailable`].
    pub async fn forget_queue(&self, queue: &QueueName) -> Result<(), DispatchError> {
        let (prefix, none): (String, &[String]) = (keys::prefix(queue), &[]);
        self.inner.born.lock().unwrap_or_else(PoisonError::into_inner).remove(&prefix);
        let run = self.inner.connections.run_again(&scripts::FORGET, &prefix, none);
        run.await.map(|_: i64| ()).map_err(unavailable)
    }

    /// A store of one queue's jobs in the same Redis, over the same connections: the fast mode, see
    /// [`RedisStore`] for what it may lose. Jobs that are over are kept for `retention`.
    pub fn store(&self, queue: QueueName, retention: Duration) -> RedisStore {
        let connections = Arc::clone(&self.inner.connections);
        RedisStore::new(connections, queue, self.inner.limit, retention)
    }

    /// Events of jobs in the same Redis, over the same connections.
    pub fn events(&self) -> crate::events::RedisEvents {
        crate::events::RedisEvents::new(Arc::clone(&self.inner.connections))
    }
}

impl Inner {
    fn consumer(&self, name: &str) -> Arc<Consumer> {
        let mut consumers = self.consumers.lock().unwrap_or_else(PoisonError::into_inner);
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
                self.stats.foreign(group.prefix, foreign);
                count += mine;
            }
        }
        self.consumer(name).release(deliveries);
        let fenced = deliveries.len().saturating_sub(count) as u64;
        add(&self.stats.fenced_acknowledgements, fenced);
        if fenced > 0 {
            tracing::debug!(consumer = name, fenced, "acknowledged entries of others");
        }
        Ok(count)
    }

    async fn hand_back(&self, name: &str, deliveries: &[Delivery]) -> RedisResult<usize> {
        let mut count = 0;
        for batch in deliveries.chunks(BATCH) {
            for group in keys::group(name, batch).0 {
                let script = &scripts::HAND_BACK;
                let run = self.connections.run_again(script, group.prefix, &group.arguments);
                count += run.await.map(|mine: usize| mine)?;
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
        let (prefix, mut cursor, mut count) = (keys::prefix(queue), "0".to_owned(), 0);
        loop {
            let arguments = [cursor, idle.as_millis().to_string()];
            let answer = self.connections.run_again(&scripts::SWEEP, &prefix, &arguments).await?;
            let (next, removed): (String, usize) = answer;
            count += removed;
            if next == "0" {
                break;
            }
            cursor = next;
        }
        add(&self.stats.consumers_removed, count as u64);
        Ok(count)
    }

    /// Whether it is time to look for dead consumers of this queue.
    fn is_sweep_due(&self, queue: &QueueName) -> bool {
        let mut swept = self.swept.lock().unwrap_or_else(PoisonError::into_inner);
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

    async fn admit(&self, demand: &Demand, quotas: &Quotas) -> Result<(), DispatchError> {
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
            // A chore: its failure is not the caller's.
            if let Err(error) = self.inner.sweep(pull.queue, CONSUMER_IDLE).await {
                tracing::debug!(%error, "looking for dead consumers failed");
            }
        }
        self.inner.reclaim(&pull, idle).await.map_err(unavailable)
    }

    async fn depth(&self, queue: &QueueName) -> Result<usize, DispatchError> {
        self.inner.depth(queue).await
    }
}
