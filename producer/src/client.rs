//! [`Client`]: jobs in, answers out, over any store and dispatcher.
//!
//! A job is accepted when the store has it. The dispatcher is told next; if it cannot be reached the
//! job is accepted all the same, since workers feed a dispatcher from the store.

mod fast;
mod waiting;

use std::{sync::Arc, time::Duration};

use tritmill_queue::{
    DispatchError, Dispatcher, Entry, FinishedJob, Job, JobId, JobState, Store, StoreError,
    Timestamp,
    dispatch::{BacklogLimit, Demand, Limit, Quotas, RedisDispatcher, RedisUrlError},
    events::Events,
    store::{
        Conflict, JobRecord, PostgresStore, RedisConfigError, RedisStore, Submission, SubmitError,
    },
};

pub use self::waiting::Waited;
use crate::{
    canonical::{Purpose, hash},
    quotas::KnownQuotas,
};

/// Jobs recorded per transaction.
const SUBMIT_CHUNK: usize = 1000;
/// Jobs asked about in one call.
const POLL_CHUNK: usize = 1000;
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
    Unfit(#[from] RedisConfigError),
}

/// A producer's connection.
#[derive(Clone)]
pub struct Client {
    store: Arc<dyn Store>,
    dispatcher: Arc<dyn Dispatcher>,
    events: Option<Arc<dyn Events>>,
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

    /// The same client, which also hears what happens to jobs that stream.
    #[must_use]
    pub fn with_events(self, events: Arc<dyn Events>) -> Self {
        Self { events: Some(events), ..self }
    }

    /// A client of the Postgres and the Redis at these addresses, which also hears events.
    ///
    /// # Errors
    /// [`ConnectError`] names the address at fault, without its password.
    ///
    /// ```no_run
    /// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
    /// use tritmill_client::{Client, JobBuilder};
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
            events: Some(Arc::new(dispatcher.events())),
            servers: Some(servers),
            ..Self::new(store, dispatcher)
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
            if let Some((limit, retry_after)) = self.refusal(Demand::of(&entries)).await {
                if chunk.len() == 1 {
                    return Err(ClientError::Busy { limit, accepted, retry_after });
                }
                size = (chunk.len() / 8).max(1);
                continue;
            }
            self.store.submit(chunk).await?;
            accepted += chunk.len();
            match self.dispatcher.enqueue(&entries).await {
                Ok(_) => {}
                // Accepted by the store: workers feed the dispatcher from there.
                Err(error) => crate::outage::log_dispatch_failure(&error),
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
        if let Some((limit, retry_after)) = self.refusal(Demand::of(first)).await {
            return Err(ClientError::Busy { limit, accepted: 0, retry_after });
        }
        let tenant = jobs.first().map(|job| job.tenant.clone()).unwrap_or_default();
        let request = hash(Purpose::Submission, &[request]);
        match servers.store.submit_idempotent(&tenant, key, &request, jobs).await {
            Ok(Submission::Known(ids)) => Ok(ids),
            Ok(Submission::New) => {
                if let Err(error) = self.dispatcher.enqueue(&entries).await {
                    crate::outage::log_dispatch_failure(&error);
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

    /// Whether there is room for these jobs of a batch now, beside a fifth of each bound that is left
    /// for those who wait for answers. Whoever records jobs in the store by itself asks first and
    /// [`announce`](Self::announce)s afterwards.
    ///
    /// # Errors
    /// [`ClientError::Busy`].
    pub async fn admit(&self, jobs: &[Job]) -> Result<(), ClientError> {
        let entries: Vec<Entry> = jobs.iter().map(Job::entry).collect();
        let demands = Demand::of(&entries).into_iter().map(Demand::leaving_room).collect();
        match self.refusal(demands).await {
            Some((limit, retry_after)) => {
                Err(ClientError::Busy { limit, accepted: 0, retry_after })
            }
            None => Ok(()),
        }
    }

    /// Tells the dispatcher of jobs that the store has. Workers find those that it was not told of.
    pub async fn announce(&self, jobs: &[Job]) {
        let entries: Vec<Entry> = jobs.iter().map(Job::entry).collect();
        if let Err(error) = self.dispatcher.enqueue(&entries).await {
            crate::outage::log_dispatch_failure(&error);
        }
    }

    /// The bound that these would pass, and when to try again.
    async fn refusal(&self, demands: Vec<Demand>) -> Option<(Limit, Duration)> {
        for demand in demands {
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
    pub async fn ended(&self, ids: &[JobId]) -> Result<Vec<FinishedJob>, ClientError> {
        let mut ended = Vec::new();
        for chunk in ids.chunks(POLL_CHUNK) {
            ended.extend(self.store.finished(chunk).await?);
        }
        Ok(ended)
    }
}
