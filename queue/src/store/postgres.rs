//! The store of a fleet: Postgres 14 or later.
//!
//! Every move of jobs is one statement, so one round trip and one commit, however many jobs it
//! moves; rows travel as arrays that the statement joins with `UNNEST`. Ids are bound in ascending
//! order, so that two statements lock the jobs they share in the same order. Statements are planned
//! anew each time: a plan costs less than a millisecond, touches only the partitions that the ids
//! fall in, and never rests on the size a table had when it was empty.
//!
//! Times are the server's (`store_now_ms` in the schema): the machines' clocks need not agree.
//!
//! Invariants: a process never changes the schema when it connects ([`PostgresStore::migrate`]
//! does); a password is in no error, log line or debug output of this module.
//!
//! See also `migrations/postgres`, and `partitions.rs` for what keeps the tables small.

mod audit;
mod batches;
mod claims;
mod classes;
mod connect;
mod dead_letters;
mod files;
mod idempotency;
mod job_queries;
mod keys;
mod operations;
mod partitions;
mod quotas;
mod reads;
mod reconcile;
mod rows;
mod sampler;
mod schema;
mod sessions;
mod settings;
mod workers;

use std::time::Duration;

use async_trait::async_trait;
pub use idempotency::{Conflict, Submission, SubmitError};
pub use partitions::Maintained;
pub use schema::SchemaError;
pub use settings::RETENTION_DEFAULT;
use sqlx::{Connection as _, PgPool, postgres::PgPoolOptions};

use super::{
    Claim, ClaimRef, Claimant, Clock, FinishedAttempt, FinishedJob, JobRecord, Progress,
    Reconciled, Settled, Store, StoreError,
};
use crate::{
    dispatch::Entry,
    job::{Job, JobId, QueueName, Timestamp},
};

/// A connection that was idle for longer is tried before it is used: the server may have restarted.
/// Shorter than any restart, so that none costs more than the calls of its moment.
const TRUSTED_IDLE: Duration = Duration::from_millis(100);
/// Longest a statement may run, in the server's notation.
const STATEMENT_TIMEOUT: &str = "60s";
/// Longest a statement may wait for a lock, in the server's notation.
const LOCK_TIMEOUT: &str = "15s";

/// How many connections a process keeps, and how long it waits for the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PostgresOptions {
    /// Most connections at a time; at least 1.
    pub connections_max: u32,
    /// Longest wait for a connection, connecting included; then the call fails as unavailable.
    pub acquire_timeout: Duration,
    /// Longest a call of [`Store`] may take, the wait for a connection included; then it fails as
    /// unavailable, whatever became of it at the server. For a server that neither answers nor
    /// hangs up.
    pub call_timeout: Duration,
}

impl Default for PostgresOptions {
    fn default() -> Self {
        Self {
            connections_max: 8,
            acquire_timeout: Duration::from_secs(5),
            call_timeout: Duration::from_secs(60),
        }
    }
}

/// A store in a Postgres database.
#[derive(Clone)]
pub struct PostgresStore {
    pool: PgPool,
    call_timeout: Duration,
    clock: Option<Clock>,
}

/// A server that did not answer in time.
#[derive(Debug, thiserror::Error)]
#[error("no answer from the database within {0:?}")]
struct NoAnswer(Duration);

impl std::fmt::Debug for PostgresStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // Not the pool: it prints the options, and these hold the password.
        f.debug_struct("PostgresStore").field("connections", &self.pool.size()).finish()
    }
}

/// What the server said. Its own words and code alone: the driver adds a line of the server's source,
/// which reads like one of the user's.
#[derive(Debug, thiserror::Error)]
#[error("the database says: {message} (SQLSTATE {code})")]
struct ServerError {
    message: String,
    code: String,
}

/// An error as people are told it.
fn told(error: sqlx::Error) -> Box<dyn std::error::Error + Send + Sync> {
    if let sqlx::Error::Database(said) = &error {
        let code = said.code().map_or_else(|| "unknown".to_owned(), std::borrow::Cow::into_owned);
        return Box::new(ServerError { message: said.message().to_owned(), code });
    }
    Box::new(error)
}

/// A database error; the caller may repeat the call.
fn unavailable(error: sqlx::Error) -> StoreError {
    StoreError::Unavailable(told(error))
}

/// A duration as the schema's milliseconds.
fn milliseconds(duration: Duration) -> i64 {
    i64::try_from(duration.as_millis()).unwrap_or(i64::MAX)
}

impl PostgresStore {
    /// Creates the database's schema or brings it up to date; a later one is left as it is. Several
    /// processes may do so at once. Also makes the partitions of the coming days.
    ///
    /// # Errors
    /// [`StoreError::Unavailable`] when the server cannot be reached, [`StoreError::Migrate`] when
    /// a migration fails or was changed after it ran.
    pub async fn migrate(url: &str) -> Result<(), StoreError> {
        // Without a limit on statements: a migration may rewrite a table.
        let options = PgPoolOptions::new()
            .max_connections(1)
            .acquire_timeout(PostgresOptions::default().acquire_timeout);
        let pool = connect::pool(options, connect::parse(url)?).await?;
        schema::migrate(&pool).await?;
        let mut connection = pool.acquire().await.map_err(unavailable)?;
        partitions::create_ahead(&mut connection, None).await?;
        connection.close().await.map_err(unavailable)
    }

    /// Connects to a database whose schema is at least this program's.
    ///
    /// # Errors
    /// [`StoreError::Unavailable`] when the server cannot be reached, [`StoreError::Migrate`] with
    /// a [`SchemaError`] when the schema is missing or older: run [`migrate`](Self::migrate).
    pub async fn connect(url: &str) -> Result<Self, StoreError> {
        Self::connect_with(url, PostgresOptions::default()).await
    }

    /// As [`connect`](Self::connect), with a pool of a given size.
    ///
    /// # Errors
    /// As [`connect`](Self::connect).
    pub async fn connect_with(url: &str, options: PostgresOptions) -> Result<Self, StoreError> {
        let connect = connect::parse(url)?.options([
            ("plan_cache_mode", "force_custom_plan"),
            ("jit", "off"),
            ("statement_timeout", STATEMENT_TIMEOUT),
            ("lock_timeout", LOCK_TIMEOUT),
            ("idle_in_transaction_session_timeout", STATEMENT_TIMEOUT),
        ]);
        let pool_options = PgPoolOptions::new()
            .max_connections(options.connections_max.max(1))
            .acquire_timeout(options.acquire_timeout)
            // The hook below does it, but not for every statement of a busy process.
            .test_before_acquire(false)
            .before_acquire(|connection, meta| {
                Box::pin(async move {
                    if meta.idle_for >= TRUSTED_IDLE {
                        connection.ping().await?;
                    }
                    Ok(true)
                })
            });
        let pool = connect::pool(pool_options, connect).await?;
        schema::check(&pool).await?;
        Ok(Self { pool, call_timeout: options.call_timeout, clock: None })
    }

    /// The same store on a clock of the caller's instead of the server's: for tests.
    #[must_use]
    pub fn with_clock(self, clock: Clock) -> Self {
        Self { clock: Some(clock), ..self }
    }

    /// Deletes jobs with their results and errors, whatever their state: for jobs that were only
    /// tried. Whoever runs one finds its claim gone. Returns how many there were.
    ///
    /// # Errors
    /// [`StoreError`]; then none was deleted.
    pub async fn delete_jobs(&self, ids: &[JobId]) -> Result<u64, StoreError> {
        self.within(claims::delete(&self.pool, ids)).await
    }

    /// Waits for the calls in progress and closes every connection.
    pub async fn close(&self) {
        self.pool.close().await;
    }

    /// A call's result, or an error when it takes too long.
    async fn within<T>(
        &self,
        call: impl Future<Output = Result<T, StoreError>> + Send,
    ) -> Result<T, StoreError> {
        let limit = self.call_timeout;
        tokio::time::timeout(limit, call)
            .await
            .unwrap_or_else(|_| Err(StoreError::Unavailable(Box::new(NoAnswer(limit)))))
    }

    /// The time of a test's clock; statements take the server's when there is none.
    fn given_now(&self) -> Option<i64> {
        self.clock.as_ref().map(|clock| clock().0)
    }
}

#[async_trait]
impl Store for PostgresStore {
    async fn submit(&self, jobs: &[Job]) -> Result<(), StoreError> {
        self.within(async {
            let mut connection = self.pool.acquire().await.map_err(unavailable)?;
            claims::insert_jobs(&mut connection, jobs, None, self.given_now()).await
        })
        .await
    }

    async fn claim(&self, ids: &[JobId], by: Claimant<'_>) -> Result<Vec<Claim>, StoreError> {
        self.within(claims::claim(&self.pool, ids, by, self.given_now())).await
    }

    async fn renew(&self, held: &[ClaimRef], lease: Duration) -> Result<Vec<ClaimRef>, StoreError> {
        self.within(claims::renew(&self.pool, held, lease, self.given_now())).await
    }

    async fn checkpoint(&self, saved: &[(ClaimRef, Vec<u8>)]) -> Result<Vec<ClaimRef>, StoreError> {
        self.within(claims::checkpoint(&self.pool, saved)).await
    }

    async fn finish(&self, finished: &[FinishedAttempt]) -> Result<Vec<Settled>, StoreError> {
        self.within(claims::finish(&self.pool, finished, self.given_now())).await
    }

    async fn hand_back(&self, held: &[ClaimRef]) -> Result<Vec<JobId>, StoreError> {
        self.within(claims::hand_back(&self.pool, held)).await
    }

    async fn cancel(&self, ids: &[JobId]) -> Result<Vec<JobId>, StoreError> {
        self.within(claims::cancel(&self.pool, ids, self.given_now())).await
    }

    async fn reconcile(&self) -> Result<Reconciled, StoreError> {
        self.within(reconcile::reconcile(&self.pool, self.given_now())).await
    }

    async fn queued(
        &self,
        queue: &QueueName,
        after: Option<JobId>,
        limit: u32,
    ) -> Result<Vec<Entry>, StoreError> {
        self.within(reads::queued(&self.pool, queue, after, limit)).await
    }

    async fn now(&self) -> Result<Timestamp, StoreError> {
        self.within(reads::now(&self.pool, self.given_now())).await
    }

    async fn job(&self, id: JobId) -> Result<Option<JobRecord>, StoreError> {
        Ok(self.within(reads::records(&self.pool, &[id])).await?.pop())
    }

    async fn finished(&self, ids: &[JobId]) -> Result<Vec<FinishedJob>, StoreError> {
        reads::ended(&self.pool, ids).await
    }

    async fn unfinished(&self, queue: &QueueName) -> Result<u64, StoreError> {
        self.within(reads::unfinished(&self.pool, queue)).await
    }

    async fn progress(&self, queue: Option<&QueueName>) -> Result<Progress, StoreError> {
        self.within(reads::progress(&self.pool, queue)).await
    }
}
