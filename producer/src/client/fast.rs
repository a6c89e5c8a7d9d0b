//! The fast mode: Redis alone.

use std::sync::Arc;

use tritmill_queue::{
    DispatchError, QueueName, StoreError,
    dispatch::{BacklogLimit, RedisDispatcher},
    store::{AcceptError, FAST_RETENTION, RedisStore},
};

use super::{Client, ClientError, ConnectError};

impl Client {
    /// A client of one queue in the fast mode: the Redis at this address is all there is, for its
    /// workers too (`tritmill worker --fast`). Faster to submit, and only as durable as that
    /// Redis. **Lost, when it dies:**
    ///
    /// | Redis | accepted jobs and written results that may be lost |
    /// | --- | --- |
    /// | `appendonly yes`, `appendfsync everysec` | those of about the last second |
    /// | `appendonly yes`, `appendfsync always` | none that were answered for |
    /// | no append-only file | all since the last snapshot; all, without one |
    /// | failover to a replica | those that the replica had not got |
    ///
    /// A result that was lost leaves a job that runs again, or that is lost with it; what is
    /// answered is never answered differently (a job has the same tokens each time). Redis must not
    /// evict: `maxmemory-policy noeviction`, which is checked here. Full, it answers
    /// [`ClientError::Busy`]. Jobs that are over are kept for a day, then unknown.
    ///
    /// A queue is either fast or journalled; both modes of one queue need two Redis databases.
    ///
    /// Not there in this mode: pauses and bounds of queues, lists of workers, replay and purge of
    /// dead letters (a failed job can be read, with its errors, until it expires), erasure by
    /// tenant, idempotency keys (the job's id is the key), and retention beyond a day.
    ///
    /// # Errors
    /// [`ConnectError`].
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
        Ok(Self::within(dispatcher, store))
    }

    /// As [`Self::fast`], of a store of this dispatcher that is there already.
    pub fn within(dispatcher: RedisDispatcher, store: RedisStore) -> Self {
        Self {
            events: Some(Arc::new(dispatcher.events())),
            fast: Some(store.clone()),
            ..Self::new(Arc::new(store), Arc::new(dispatcher))
        }
    }
}

impl From<AcceptError> for ClientError {
    fn from(error: AcceptError) -> Self {
        match error {
            AcceptError::Store(error) => Self::Store(error),
            AcceptError::Dispatch(DispatchError::Busy { limit, retry_after, .. }) => {
                Self::Busy { limit, accepted: 0, retry_after }
            }
            other => Self::Store(StoreError::Unavailable(Box::new(other))),
        }
    }
}
