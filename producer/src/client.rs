//! [`Client`]: submits jobs to a queue and reads their results, over any store and dispatcher.
//!
//! A job is accepted once the store has recorded it. The dispatcher is notified next. If it cannot
//! be reached, the job is accepted all the same, because workers feed the dispatcher from the
//! store.

mod clock;
mod following;
mod measuring;
mod waiting;

use std::{sync::Arc, time::Duration};

use tritmill_queue::{
    DispatchError, Dispatcher, Entry, FinishedJob, Job, JobId, JobState, Store, StoreError,
    Timestamp,
    dispatch::{BacklogLimit, Cause, Demand, Limit, Quotas, RedisDispatcher, RedisUrlError},
    events::Events,
    store::{Conflict, JobRecord, PostgresStore, QueueSettings, Submission, SubmitError, Workers},
};

use self::clock::StoreClock;
pub use self::{following::EventFollower, waiting::Waited};
use crate::{
    BuildError,
    admission::{Admission, Reservation},
    canonical::{Purpose, hash},
    overload::Refused,
};

/// Jobs recorded per transaction.
const SUBMIT_CHUNK: usize = 1000;
/// Jobs looked up in one call.
const POLL_CHUNK: usize = 1000;

/// A call of a [`Client`] failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClientError {
    /// The queue is full, or a job would miss its deadline. Submit the jobs after the first `accepted` again after
    /// `retry_after`.
    #[error("queue is full at {limit}: {cause}: try again in {:.1} s", retry_after.as_secs_f32())]
    Busy {
        /// The limit that the jobs would exceed.
        limit: Limit,
        /// Why there is no room.
        cause: Cause,
        /// Number of jobs of the call that were accepted, from the first on.
        accepted: usize,
        /// Time to wait before the next try.
        retry_after: Duration,
    },
    /// The store failed. The call may be repeated: an accepted job is not accepted twice.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The dispatcher refuses this program.
    #[error(transparent)]
    Dispatch(#[from] DispatchError),
    /// The job was never accepted, or its retention is over.
    #[error("no job {0}")]
    Unknown(JobId),
    /// The idempotency key was used for another request.
    #[error(transparent)]
    Conflict(#[from] Conflict),
    /// The client's store has no idempotency keys.
    #[error("idempotency keys need Postgres")]
    NoKeys,
    /// A [`JobBuilder`](crate::JobBuilder) or a job has a field out of range. Nothing was submitted.
    #[error(transparent)]
    Build(#[from] BuildError),
}

/// A client could not be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// The database cannot be used.
    #[error("cannot use the database: {0}")]
    Store(#[from] StoreError),
    /// The Redis URL is invalid.
    #[error("cannot use Redis: {0}")]
    Redis(#[from] RedisUrlError),
}

/// Connection of a producer to its queues. Clones share it.
#[derive(Clone)]
pub struct Client {
    store: Arc<dyn Store>,
    dispatcher: Arc<dyn Dispatcher>,
    events: Arc<dyn Events>,
    /// The limits of operators and of workers, if the store knows them.
    admission: Option<Arc<Admission>>,
    clock: Arc<StoreClock>,
    /// The servers of a fleet, for idempotency keys and metrics; `None` if all is in this process.
    servers: Option<(Arc<PostgresStore>, Arc<RedisDispatcher>)>,
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Client").finish_non_exhaustive()
    }
}

impl Client {
    /// Creates a client of a store, a dispatcher and a source of events in this process.
    pub fn embedded(
        store: Arc<dyn Store>,
        dispatcher: Arc<dyn Dispatcher>,
        events: Arc<dyn Events>,
    ) -> Self {
        let clock = Arc::default();
        Self { store, dispatcher, events, admission: None, clock, servers: None }
    }

    /// Returns the same client; the queues' limits in this store apply, and jobs that would miss their deadlines
    /// are refused.
    #[must_use]
    pub fn limited_by<S: QueueSettings + Workers + 'static>(self, store: Arc<S>) -> Self {
        Self { admission: Some(Arc::new(Admission::new(store))), ..self }
    }

    /// Connects to Postgres; Redis is connected to when it is used first.
    ///
    /// # Errors
    /// [`ConnectError`] names the URL at fault, without its password.
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
        Ok(Self::from_servers(store, Arc::new(dispatcher)))
    }

    /// Creates a client of a Postgres store and a Redis dispatcher.
    pub fn from_servers(store: Arc<PostgresStore>, dispatcher: Arc<RedisDispatcher>) -> Self {
        let client = Self {
            store: store.clone(),
            events: Arc::new(dispatcher.events()),
            dispatcher: dispatcher.clone(),
            admission: None,
            clock: Arc::default(),
            servers: Some((store.clone(), dispatcher)),
        };
        client.limited_by(store)
    }

    /// Submits one job.
    ///
    /// # Errors
    /// [`ClientError`]. The job may or may not be accepted then; submit the same job (the same id)
    /// again.
    pub async fn submit(&self, job: Job) -> Result<JobId, ClientError> {
        let id = job.id;
        self.submit_many(std::slice::from_ref(&job)).await?;
        Ok(id)
    }

    /// Submits jobs in bulk: a thousand per transaction, or as few as there is room for. Jobs with an id that is
    /// already known stay as they are.
    ///
    /// # Errors
    /// [`ClientError`]. Some jobs may be accepted then; repeat the same call.
    pub async fn submit_many(&self, jobs: &[Job]) -> Result<(), ClientError> {
        validate(jobs)?;
        let (mut accepted, mut size) = (0, SUBMIT_CHUNK);
        while accepted < jobs.len() {
            let chunk = &jobs[accepted..jobs.len().min(accepted + size)];
            let _reservation = match self.room(chunk, |demand| demand).await {
                Ok(reservation) => reservation,
                Err(refused) if chunk.len() == 1 => return Err(busy(refused, accepted)),
                Err(_) => {
                    size = (chunk.len() / 8).max(1);
                    continue;
                }
            };
            self.store.submit(chunk).await?;
            accepted += chunk.len();
            self.enqueue(&Job::entries(to_run(chunk))).await;
        }
        Ok(())
    }

    /// Submits jobs of one tenant under an idempotency key and returns their ids. A second call with
    /// the same key submits nothing and returns the ids of the first. `request` identifies the
    /// request, in any bytes: it distinguishes a repetition from another request under the same key.
    /// A key covers all the jobs, so a queue with room for the first job takes all.
    ///
    /// # Errors
    /// [`ClientError::Conflict`] if the key was used for another request, [`ClientError::NoKeys`]
    /// without Postgres. After any other error the same call may be repeated.
    pub async fn submit_once(
        &self,
        key: &str,
        request: &[u8],
        jobs: &[Job],
    ) -> Result<Vec<JobId>, ClientError> {
        let Some((store, _)) = &self.servers else { return Err(ClientError::NoKeys) };
        validate(jobs)?;
        let first = jobs.get(..1).unwrap_or_default();
        let _reservation =
            self.room(first, |demand| demand).await.map_err(|refused| busy(refused, 0))?;
        let tenant = jobs.first().map(|job| job.tenant.clone()).unwrap_or_default();
        let request = hash(Purpose::Submission, &[request]);
        match store.submit_idempotent(&tenant, key, &request, jobs).await {
            Ok(Submission::Known(ids)) => Ok(ids),
            Ok(Submission::New) => {
                self.enqueue(&Job::entries(to_run(jobs))).await;
                Ok(jobs.iter().map(|job| job.id).collect())
            }
            Err(SubmitError::Conflict(conflict)) => Err(conflict.into()),
            Err(SubmitError::Store(error)) => Err(error.into()),
            Err(error) => Err(StoreError::Unavailable(Box::new(error)).into()),
        }
    }

    /// Returns the time on the store's clock, for
    /// [`JobBuilder::expires_after`](crate::JobBuilder::expires_after). Reads it at most once a second.
    pub async fn now(&self) -> Result<Timestamp, ClientError> {
        Ok(self.clock.now(self.store.now()).await?)
    }

    /// Checks whether there is room for these jobs of a batch. A fifth of each limit stays free for
    /// interactive requests, and deadlines do not count: a batch waits by itself. A caller that records jobs in
    /// the store itself checks first and [`announce`](Self::announce)s afterwards.
    ///
    /// # Errors
    /// [`ClientError::Busy`] if there is no room.
    pub async fn admit(&self, jobs: &[Job]) -> Result<(), ClientError> {
        let room = self.room(jobs, Demand::leaving_room).await;
        room.map(drop).map_err(|refused| busy(refused, 0))
    }

    /// Notifies the dispatcher of jobs that are in the store. If it cannot be reached, workers find
    /// them in the store.
    pub async fn announce(&self, jobs: &[Job]) {
        self.enqueue(&Job::entries(jobs)).await;
    }

    async fn enqueue(&self, entries: &[Entry]) {
        match self.dispatcher.enqueue(entries).await {
            Ok(_) => self.store.announced(entries),
            Err(error) => crate::outage::log_dispatch_failure(&error),
        }
    }

    /// Checks whether there is room for the jobs that may run now. They count as waiting until the result is
    /// dropped.
    async fn room(
        &self,
        jobs: &[Job],
        demanding: fn(Demand) -> Demand,
    ) -> Result<Vec<Reservation>, Refused> {
        let mut all = Vec::new();
        let entries: Vec<Entry> = to_run(jobs).map(Job::entry).collect();
        for demand in Demand::by_queue(&entries).into_iter().map(demanding) {
            let quotas = match &self.admission {
                Some(admission) => admission.quotas(&demand.queue).await,
                None => Quotas::default(),
            };
            let backlog = match self.dispatcher.admit(&demand, &quotas).await {
                Ok(backlog) => backlog,
                Err(DispatchError::Busy { limit, retry_after, .. }) => {
                    let serving = match &self.admission {
                        Some(admission) => admission.serving(&demand.queue).await,
                        None => None,
                    };
                    return Err(Refused::by_dispatcher(limit, retry_after, serving.as_ref()));
                }
                // The length of the queue is unknown: the store decides.
                Err(_) => continue,
            };
            let Some(admission) = &self.admission else { continue };
            let jobs = to_run(jobs).filter(|job| job.queue == demand.queue);
            all.extend(admission.reserve(&demand, jobs, &quotas, backlog).await?);
        }
        Ok(all)
    }

    /// Checks that the dispatcher of a fleet lets this program use queues. One that is down for a moment is no error.
    ///
    /// # Errors
    /// [`ClientError::Dispatch`].
    pub async fn check_dispatcher(&self) -> Result<(), ClientError> {
        let Some((_, dispatcher)) = &self.servers else { return Ok(()) };
        match dispatcher.check().await {
            Err(refused @ DispatchError::Refused(_)) => Err(refused.into()),
            Ok(()) | Err(_) => Ok(()),
        }
    }

    /// Returns a job's state, without its prompt and result.
    ///
    /// # Errors
    /// [`ClientError::Unknown`] or [`ClientError::Store`].
    pub async fn poll(&self, id: JobId) -> Result<JobState, ClientError> {
        self.store.state(id).await?.ok_or(ClientError::Unknown(id))
    }

    /// Returns a job with its errors and, once it is finished, its outcome.
    ///
    /// # Errors
    /// [`ClientError::Unknown`] or [`ClientError::Store`].
    pub async fn result(&self, id: JobId) -> Result<JobRecord, ClientError> {
        self.store.job(id).await?.ok_or(ClientError::Unknown(id))
    }

    /// Cancels the unfinished jobs among `ids` and returns their ids. Running jobs stop within a
    /// third of a lease.
    pub async fn cancel(&self, ids: &[JobId]) -> Result<Vec<JobId>, ClientError> {
        Ok(self.store.cancel(ids).await?)
    }

    /// Returns the jobs among `ids` that are in a terminal state, with their outcomes.
    pub async fn finished(&self, ids: &[JobId]) -> Result<Vec<FinishedJob>, ClientError> {
        let mut finished = Vec::new();
        for chunk in ids.chunks(POLL_CHUNK) {
            finished.extend(self.store.finished(chunk).await?);
        }
        Ok(finished)
    }
}

/// Checks the parameters of jobs that were made without a builder, too.
fn validate(jobs: &[Job]) -> Result<(), BuildError> {
    jobs.iter().try_for_each(|job| Ok(job.sampling.validate()?))
}

/// Returns the error of jobs that were refused after `accepted` others.
fn busy(refused: Refused, accepted: usize) -> ClientError {
    let Refused { limit, cause, retry_after } = refused;
    ClientError::Busy { limit, cause, accepted, retry_after }
}

/// Returns the jobs that may run now, not at a later time.
fn to_run(jobs: &[Job]) -> impl Iterator<Item = &Job> + Clone {
    jobs.iter().filter(|job| job.run_at.is_none())
}
