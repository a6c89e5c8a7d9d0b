//! The fast mode: jobs in Redis alone.

use std::sync::Arc;

use tritmill_queue::{
    DispatchError, QueueName, StoreError,
    dispatch::{BacklogLimit, RedisDispatcher},
    store::{AcceptError, FAST_RETENTION, RedisStore},
};

use super::{Client, ClientError, ConnectError, Mode};

impl Client {
    /// Creates a client of one queue in the fast mode: Redis alone keeps the jobs, for the workers
    /// too (`tritmill worker --fast`). Submitting is faster, and jobs are only as durable as that
    /// Redis.
    /// **What may be lost when Redis dies:**
    ///
    /// | Redis | accepted jobs and written results that may be lost |
    /// | --- | --- |
    /// | `appendonly yes`, `appendfsync everysec` | those of about the last second |
    /// | `appendonly yes`, `appendfsync always` | none that were acknowledged |
    /// | no append-only file | all since the last snapshot; all, without one |
    /// | failover to a replica | all that the replica had not received |
    ///
    /// If a result is lost, its job runs again or is lost with it. An answer never changes: a job
    /// has the same tokens each time. Redis must not evict: this checks for
    /// `maxmemory-policy noeviction`. A full Redis answers [`ClientError::Busy`]. Finished jobs are
    /// kept for a day, then they are unknown.
    ///
    /// A queue is either fast or journalled; the two modes of one queue need two Redis databases.
    ///
    /// This mode has no pauses and limits of queues, refusals of jobs that would miss their deadlines,
    /// lists of workers, replay and purge of dead letters (a failed job can be read, with its errors,
    /// until it expires), erasure by tenant, idempotency keys (the job's id is the key), or retention
    /// beyond a day.
    ///
    /// # Errors
    /// [`ConnectError`] if the URL is invalid or this Redis may lose jobs.
    ///
    /// ```no_run
    /// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
    /// use tritmill_client::{Client, JobBuilder, QueueName};
    ///
    /// let queue = QueueName { model: "demo".into(), format: "i2_s".into() };
    /// let client = Client::fast("redis://localhost", queue).await?;
    /// let id = client.submit(JobBuilder::question("demo", "Due 3/3/24").build()?).await?;
    /// # Ok(())
    /// # }
    /// ```
    pub async fn fast(redis: &str, queue: QueueName) -> Result<Self, ConnectError> {
        let dispatcher = RedisDispatcher::new(redis, BacklogLimit::default())?;
        let store = dispatcher.store(queue, FAST_RETENTION);
        store.check().await?;
        Ok(Self::from_redis(dispatcher, store))
    }

    /// Creates a client in the [fast mode](Self::fast), of an existing store of this dispatcher.
    pub fn from_redis(dispatcher: RedisDispatcher, store: RedisStore) -> Self {
        Self {
            store: Arc::new(store.clone()),
            events: Arc::new(dispatcher.events()),
            dispatcher: Arc::new(dispatcher),
            admission: None,
            clock: Arc::default(),
            mode: Mode::Fast(store),
        }
    }
}

impl From<AcceptError> for ClientError {
    fn from(error: AcceptError) -> Self {
        match error {
            AcceptError::Store(error) => Self::Store(error),
            AcceptError::Dispatch(DispatchError::Busy { limit, retry_after, .. }) => {
                Self::Busy { limit, cause: limit.cause(), accepted: 0, retry_after }
            }
            other => Self::Store(StoreError::Unavailable(Box::new(other))),
        }
    }
}
