//! [`Client`]: jobs in, answers out, over any store and dispatcher.
//!
//! A job is accepted when the store has it. The dispatcher is told next; if it cannot be reached the
//! job is accepted all the same, since workers feed a dispatcher from the store.

use std::{collections::HashSet, sync::Arc, time::Duration};

use futures_util::{Stream, StreamExt as _, stream};
use tokio::time::{Instant, sleep};
use tritmill_queue::{
    DispatchError, Dispatcher, Ended, Entry, EventId, Job, JobEvent, JobId, JobState, QueueName,
    Store, StoreError, Timestamp,
    dispatch::{BacklogLimit, Demand, Limit, Quotas, RedisDispatcher, RedisUrlError},
    events::RedisEvents,
    store::{
        AcceptError, Conflict, FAST_RETENTION, JobRecord, PostgresStore, RedisStore, Submission,
        SubmitError, UnfitError,
    },
};

use crate::{
    canonical::{Purpose, hash},
    quotas::KnownQuotas,
};

/// Jobs recorded per transaction.
const SUBMIT_CHUNK: usize = 1000;
/// Jobs asked about in one call.
const POLL_CHUNK: usize = 1000;
/// Between two looks at the store: grows from the first to the last while nothing ends.
const POLL_FIRST: Duration = Duration::from_millis(10);
const POLL_LAST: Duration = Duration::from_millis(500);

/// What went wrong, and so what to do about it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClientError {
    /// The queue is full. Submit those beyond the first `accepted` again after `retry_after`.
    #[error("queue is full at {limit}: try again in {:.1} s", retry_after.as_secs_f32())]
    Busy {
        /// The bound that would be passed.
        limit: Limit,
        /// How many jobs of the call were accepted, from its first on.
        accepted: usize,
        /// When to try again.
        retry_after: Duration,
    },
    /// The store cannot be reached or refused: the call may be repeated as it is, a job that was
    /// accepted is not accepted twice.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// No such job: it was never accepted, or is past its retention.
    #[error("no job {0}")]
    Unknown(JobId),
    /// The idempotency key was used for another request: choose another key.
    #[error(transparent)]
    Conflict(#[from] Conflict),
    /// The store of this client keeps no idempotency keys.
    #[error("idempotency keys need Postgres")]
    NoKeys,
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

/// Wait for the next event before the store is asked whether the job is over.
const EVENT_WAIT: Duration = Duration::from_secs(2);
/// Wait after a failure of Redis.
const EVENT_RETRY: Duration = Duration::from_millis(500);

/// Why a client could not be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// The database cannot be used.
    #[error("cannot use the database: {0}")]
    Store(#[from] StoreError),
    /// The address of Redis is none.
    #[error("cannot use Redis: {0}")]
    Redis(#[from] RedisUrlError),
    /// Redis cannot be the only place of jobs.
    #[error("cannot keep jobs in Redis alone: {0}")]
    Unfit(#[from] UnfitError),
}

/// How many of a set of jobs are over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Waited {
    /// Answered.
    pub completed: usize,
    /// Over without an answer.
    pub failed: usize,
    /// All of the set.
    pub total: usize,
}

impl Waited {
    /// Jobs that are over.
    pub fn done(&self) -> usize {
        self.completed + self.failed
    }
}

/// A producer's connection.
#[derive(Clone)]
pub struct Client {
    store: Arc<dyn Store>,
    dispatcher: Arc<dyn Dispatcher>,
    events: Option<RedisEvents>,
    /// Accepts jobs and adds their entries in one step, if the store is the dispatcher's Redis.
    fast: Option<RedisStore>,
    /// Of a client of Postgres and Redis.
    servers: Option<Servers>,
}

/// What a client of Postgres and Redis has beyond the traits.
#[derive(Clone)]
struct Servers {
    store: Arc<PostgresStore>,
    quotas: Arc<KnownQuotas>,
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Client").finish_non_exhaustive()
    }
}

impl Client {
    /// A client of this store and this dispatcher.
    pub fn new(store: Arc<dyn Store>, dispatcher: Arc<dyn Dispatcher>) -> Self {
        Self { store, dispatcher, events: None, fast: None, servers: None }
    }

    /// A client of the Postgres and the Redis at these addresses, which also hears events.
    ///
    /// # Errors
    /// [`ConnectError`] names the address at fault, without its password.
    ///
    /// ```no_run
    /// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
    /// use tritmill_producer::{Client, JobBuilder};
    ///
    /// let database = "postgres://tritmill@localhost/tritmill";
    /// let client = Client::connect("redis://localhost", database).await?;
    /// let id = client.submit(JobBuilder::question("demo", "Due 3/3/24").build()?).await?;
    /// println!("{:?}", client.poll(id).await?);
    /// # Ok(())
    /// # }
    /// ```
    pub async fn connect(redis: &str, database: &str) -> Result<Self, ConnectError> {
        let store = Arc::new(PostgresStore::connect(database).await?);
        let dispatcher = RedisDispatcher::new(redis, BacklogLimit::default())?;
        Ok(Self::of_servers(store, Arc::new(dispatcher)))
    }

    /// A client of this Postgres and this Redis, which also heeds quotas and hears events.
    pub fn of_servers(store: Arc<PostgresStore>, dispatcher: Arc<RedisDispatcher>) -> Self {
        let quotas = Arc::new(KnownQuotas::new(store.clone()));
        let servers = Servers { store: store.clone(), quotas };
        Self {
            events: Some(dispatcher.events()),
            servers: Some(servers),
            ..Self::new(store, dispatcher)
        }
    }

    /// A client of one queue in the fast mode: the Redis at this address is all there is, for its
    /// workers too (`tritmill worker --fast`). Several times as fast, and only as durable as that
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
    /// use tritmill_producer::{Client, JobBuilder, QueueName};
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
            events: Some(dispatcher.events()),
            fast: Some(store.clone()),
            ..Self::new(Arc::new(store), Arc::new(dispatcher))
        }
    }

    /// Submits one job.
    ///
    /// # Errors
    /// [`ClientError`]; then it may or may not be accepted, and the same job (the same id) may be
    /// submitted again.
    pub async fn submit(&self, job: Job) -> Result<JobId, ClientError> {
        let id = job.id;
        self.submit_many(std::slice::from_ref(&job)).await?;
        Ok(id)
    }

    /// Submits jobs in bulk, a thousand a transaction, or as few as there is room for; in the fast
    /// mode, some hundreds a script. Jobs whose id is known already stay as they are.
    ///
    /// # Errors
    /// [`ClientError`]; some may be accepted, and the same call may be repeated.
    pub async fn submit_many(&self, jobs: &[Job]) -> Result<(), ClientError> {
        if let Some(fast) = &self.fast {
            // Those that it has already do not count again.
            return Ok(fast.accept(jobs).await?);
        }
        let (mut accepted, mut size) = (0, SUBMIT_CHUNK);
        while accepted < jobs.len() {
            let chunk = &jobs[accepted..jobs.len().min(accepted + size)];
            let entries: Vec<Entry> =
                chunk.iter().filter(|job| job.run_at.is_none()).map(Job::entry).collect();
            if let Some((limit, retry_after)) = self.refusal(&entries).await {
                if chunk.len() == 1 {
                    return Err(ClientError::Busy { limit, accepted, retry_after });
                }
                size = (chunk.len() / 8).max(1);
                continue;
            }
            self.store.submit(chunk).await?;
            accepted += chunk.len();
            match self.dispatcher.enqueue(&entries).await {
                Ok(()) => {}
                // Accepted by the store: workers feed the dispatcher from there.
                Err(error) => crate::outage::not_told(&error),
            }
        }
        Ok(())
    }

    /// Submits jobs of one tenant under an idempotency key: doing so twice submits them once. Returns
    /// the ids of the jobs, which are those of the first call. `request` is what the caller was
    /// asked, in any bytes: it tells a repetition from another request under the same key. A key
    /// stands for all of the jobs or none, so a queue with room for the first takes all.
    ///
    /// # Errors
    /// [`ClientError::Conflict`] when the key stands for another request, [`ClientError::NoKeys`]
    /// without Postgres; else as [`submit`](Self::submit), and the same call may be repeated.
    pub async fn submit_once(
        &self,
        key: &str,
        request: &[u8],
        jobs: &[Job],
    ) -> Result<Vec<JobId>, ClientError> {
        let servers = self.servers.as_ref().ok_or(ClientError::NoKeys)?;
        let entries: Vec<Entry> =
            jobs.iter().filter(|job| job.run_at.is_none()).map(Job::entry).collect();
        let first = entries.get(..1).unwrap_or_default();
        if let Some((limit, retry_after)) = self.refusal(first).await {
            return Err(ClientError::Busy { limit, accepted: 0, retry_after });
        }
        let tenant = jobs.first().map(|job| job.tenant.clone()).unwrap_or_default();
        let request = hash(Purpose::Submission, &[request]);
        match servers.store.submit_idempotent(&tenant, key, &request, jobs).await {
            Ok(Submission::Known(ids)) => Ok(ids),
            Ok(Submission::New) => {
                if let Err(error) = self.dispatcher.enqueue(&entries).await {
                    crate::outage::not_told(&error);
                }
                Ok(jobs.iter().map(|job| job.id).collect())
            }
            Err(SubmitError::Conflict(conflict)) => Err(conflict.into()),
            Err(SubmitError::Store(error)) => Err(error.into()),
            Err(error) => Err(StoreError::Unavailable(Box::new(error)).into()),
        }
    }

    /// The time on the clock that deadlines go by, for
    /// [`JobBuilder::expires_after`](crate::JobBuilder::expires_after).
    ///
    /// # Errors
    /// [`ClientError::Store`].
    pub async fn now(&self) -> Result<Timestamp, ClientError> {
        Ok(self.store.now().await?)
    }

    /// The bound that these would pass, and when to try again.
    async fn refusal(&self, entries: &[Entry]) -> Option<(Limit, Duration)> {
        for demand in Demand::of(entries) {
            let quotas = match &self.servers {
                Some(servers) => servers.quotas.of(&demand.queue).await,
                None => Quotas::default(),
            };
            let room = self.dispatcher.admit(&demand, &quotas).await;
            // Of another error nobody can say how full the queue is: the store decides.
            if let Err(DispatchError::Busy { limit, retry_after, .. }) = room {
                return Some((limit, retry_after));
            }
        }
        None
    }

    /// Where a job is.
    ///
    /// # Errors
    /// [`ClientError::Unknown`] or [`ClientError::Store`].
    pub async fn poll(&self, id: JobId) -> Result<JobState, ClientError> {
        Ok(self.result(id).await?.state)
    }

    /// A job's whole story, its outcome included once it is over.
    ///
    /// # Errors
    /// [`ClientError::Unknown`] or [`ClientError::Store`].
    pub async fn result(&self, id: JobId) -> Result<JobRecord, ClientError> {
        self.store.job(id).await?.ok_or(ClientError::Unknown(id))
    }

    /// Withdraws jobs that are not over; returns those it withdrew. Running ones stop within a
    /// third of a lease.
    ///
    /// # Errors
    /// [`ClientError::Store`].
    pub async fn cancel(&self, ids: &[JobId]) -> Result<Vec<JobId>, ClientError> {
        Ok(self.store.cancel(ids).await?)
    }

    /// Those of `ids` that are over.
    ///
    /// # Errors
    /// [`ClientError::Store`].
    pub async fn ended(&self, ids: &[JobId]) -> Result<Vec<Ended>, ClientError> {
        let mut ended = Vec::new();
        for chunk in ids.chunks(POLL_CHUNK) {
            ended.extend(self.store.ended(chunk).await?);
        }
        Ok(ended)
    }

    /// Ends of jobs as they come, until all of `ids` are over. An error does not end the stream:
    /// the next item is tried again.
    pub fn results(&self, ids: Vec<JobId>) -> impl Stream<Item = Result<Ended, ClientError>> + '_ {
        let waiting: HashSet<JobId> = ids.into_iter().collect();
        let state = (waiting, POLL_FIRST);
        let pages = stream::unfold(state, async move |(mut waiting, mut wait)| {
            if waiting.is_empty() {
                return None;
            }
            sleep(wait).await;
            let ids: Vec<JobId> = waiting.iter().copied().collect();
            let page: Vec<Result<Ended, ClientError>> = match self.ended(&ids).await {
                Ok(ended) => ended.into_iter().map(Ok).collect(),
                Err(error) => vec![Err(error)],
            };
            wait = if page.is_empty() { (wait * 2).min(POLL_LAST) } else { POLL_FIRST };
            for ended in page.iter().flatten() {
                waiting.remove(&ended.id);
            }
            Some((stream::iter(page), (waiting, wait)))
        });
        pages.flatten()
    }

    /// What happens to a job that streams: from its start, however late the call, to its end. An
    /// outage of Redis is waited out; the end is then taken from the store. A client that does not
    /// hear events gets the end alone.
    pub fn subscribe(&self, id: JobId) -> impl Stream<Item = Result<JobEvent, ClientError>> + '_ {
        let start = Some(EventId::default());
        let pages = stream::unfold(start, move |after| async move {
            let after = after?;
            let (last, mut events) = self.heard(id, after).await;
            let is_end = |event: &JobEvent| matches!(event, JobEvent::Finished { .. });
            if events.is_empty() {
                match self.poll(id).await {
                    Ok(state) if state.is_terminal() => events.push(JobEvent::Finished { state }),
                    Ok(_) => {}
                    Err(error) => {
                        let over = matches!(error, ClientError::Unknown(_));
                        let page = stream::iter(vec![Err(error)]);
                        return Some((page, (!over).then_some(last)));
                    }
                }
            }
            let next = (!events.iter().any(is_end)).then_some(last);
            let page: Vec<Result<JobEvent, ClientError>> = events.into_iter().map(Ok).collect();
            Some((stream::iter(page), next))
        });
        pages.flatten()
    }

    /// The next events, if any came within [`EVENT_WAIT`], and where they end.
    async fn heard(&self, id: JobId, after: EventId) -> (EventId, Vec<JobEvent>) {
        let Some(events) = &self.events else {
            sleep(EVENT_RETRY).await;
            return (after, Vec::new());
        };
        match events.read_events(id, after, EVENT_WAIT).await {
            Ok(page) => {
                let last = page.last().map_or(after, |(id, _)| *id);
                (last, page.into_iter().map(|(_, event)| event).collect())
            }
            Err(error) => {
                tracing::debug!(%error, "events not read, trying again");
                sleep(EVENT_RETRY).await;
                (after, Vec::new())
            }
        }
    }

    /// Waits until all of `ids` are over, or `limit` has passed; tells `progress` of every change.
    /// Outages of the store are waited out.
    pub async fn wait_all(
        &self,
        ids: &[JobId],
        limit: Duration,
        mut progress: impl FnMut(Waited),
    ) -> Waited {
        let now = Instant::now();
        // A limit beyond the clock is none.
        let until = now.checked_add(limit).unwrap_or_else(|| now + Duration::from_secs(1 << 32));
        let mut waited = Waited { total: ids.len(), ..Waited::default() };
        let mut results = Box::pin(self.results(ids.to_vec()));
        while let Ok(Some(result)) = tokio::time::timeout_at(until, results.next()).await {
            match result {
                Ok(ended) if ended.state == JobState::Completed => waited.completed += 1,
                Ok(_) => waited.failed += 1,
                Err(error) => {
                    tracing::warn!(%error, "waiting for results");
                    continue;
                }
            }
            progress(waited);
        }
        waited
    }
}
