//! The store of a fleet: Postgres 14 or later.
//!
//! Every change of jobs is one statement, so any number of jobs takes one round trip and one commit;
//! rows are passed as arrays that the statement joins with `UNNEST`. Ids are bound in ascending order,
//! so that two statements lock the jobs they share in the same order.
//!
//! There are two pools of connections (`pool.rs`: how many they have). Statements that change open jobs by their ids, and heartbeats, are planned
//! once for each connection of the pool `hot`, without a scan of the whole table as an alternative: it would look best
//! while the table is empty. All other statements are planned anew each time: planning takes less than a
//! millisecond, touches only the partitions of the ids, and never uses the size that a table had earlier.
//!
//! Times are the server's (`store_now_ms` in the schema): the machines' clocks need not agree.
//!
//! Invariants: connecting never changes the schema ([`PostgresStore::migrate`] does); no error, log line
//! or debug output of this module has a password.
//!
//! See also `migrations/postgres`, and `partitions.rs` for what keeps the tables small.

#[macro_use]
pub(super) mod dialect;

mod announcements;
mod claims;
mod connect;
mod ends;
mod hosts;
mod idempotency;
mod parameters;
mod partitions;
mod pool;
mod pools;
mod queues;
mod reconcile;
mod sampler;
mod schema;
mod settings;
mod spare;
#[path = "sql/mod.rs"]
mod sql;
mod workers;

use std::{sync::Arc, time::Duration};

use PostgresStore as SqlStore;
use announcements::Announced;
use hosts::{CurrentHost, Hosts};
pub use idempotency::{Conflict, Submission, SubmitError};
use pool::{Pool, PoolOptions};
pub use pool::{PooledConnection, Transaction};
pub use pools::PoolState;
pub use schema::SchemaError;
pub use settings::RETENTION_DEFAULT;
pub use sql::{calls, rows};
use sql::{classes, history, queue_settings, tenants};

use super::{Clock, StoreError};
use crate::job::JobId;

/// Longest time a statement may run, in the server's notation.
const STATEMENT_TIMEOUT: &str = "60s";
/// Longest time a statement may wait for a lock, in the server's notation.
const LOCK_TIMEOUT: &str = "15s";

type Settings = &'static [(&'static str, &'static str)];
/// Settings of the connections of both pools.
const CONNECTION_SETTINGS: Settings = &[
    ("jit", "off"),
    ("statement_timeout", STATEMENT_TIMEOUT),
    ("lock_timeout", LOCK_TIMEOUT),
    ("idle_in_transaction_session_timeout", STATEMENT_TIMEOUT),
];
/// Further settings of the pool for all other statements.
const PLANNED_EACH_TIME: Settings = &[("plan_cache_mode", "force_custom_plan")];
/// Further settings of the pool `hot`. Its plans are kept, also those made when statistics said that there are no
/// jobs: then a nested loop over the jobs of a call and their values seems to cost little, but its time is quadratic.
const PLANNED_ONCE: Settings = &[
    ("plan_cache_mode", "force_generic_plan"),
    ("enable_seqscan", "off"),
    ("enable_nestloop", "off"),
];
/// Further settings of a migration, also where the role has limits: it may rewrite a table, and it waits for
/// other ones.
const UNLIMITED: Settings = &[("statement_timeout", "0"), ("lock_timeout", "0")];

/// Size of the connection pool, and time limits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PostgresOptions {
    /// Maximum number of connections at a time in each of two pools (see the module); at least 1.
    pub connections_max: u32,
    /// Longest wait for a connection, including connecting; then the call fails as unavailable.
    pub acquire_timeout: Duration,
    /// Longest time for one statement or transaction, including the wait for a connection; then the
    /// call fails as unavailable, whatever the server did. For a server that neither answers nor
    /// closes the connection.
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
    pool: Pool,
    hot: Pool,
    hosts: Arc<Hosts>,
    host: Arc<CurrentHost>,
    call_timeout: Duration,
    clock: Option<Clock>,
    announced: Arc<Announced>,
}

/// The server did not answer in time.
#[derive(Debug, thiserror::Error)]
#[error("no answer from the database within {0:?}")]
struct NoAnswer(Duration);

impl std::fmt::Debug for PostgresStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // The pool is left out: its options have the password.
        f.debug_struct("PostgresStore").field("connections", &self.pool.sizes().1).finish()
    }
}

impl PostgresStore {
    /// Creates the database's schema or migrates it to the latest version; a later version is left as
    /// it is. Several processes may do so at once. Also creates the partitions of the coming days.
    ///
    /// # Errors
    /// [`StoreError::Unavailable`] when the server cannot be reached, [`StoreError::Refused`] when it refuses the user
    /// or the database, [`StoreError::Migrate`] when a migration fails or was changed after it ran.
    pub async fn migrate(url: &str) -> Result<(), StoreError> {
        let hosts = connect::parse(url)?;
        let limit = PostgresOptions::default().acquire_timeout;
        let index = connect::server(&hosts, limit).await?;
        let host = Arc::new(CurrentHost::new(index));
        let options = hosts.pool_options(1, limit);
        let pool = Pool::new(options, hosts.with(index, Some(UNLIMITED)), host);
        let mut connection = connect::first(&pool).await?;
        schema::check_encoding(&mut connection).await?;
        drop(connection);
        schema::migrate(hosts.with(index, Some(UNLIMITED))).await?;
        let mut connection = connect::first(&pool).await?;
        partitions::create_ahead(&mut connection, None).await?;
        connection.release(Ok(()))?;
        pool.close().await;
        Ok(())
    }

    /// Connects to a database with a schema of this release or later.
    ///
    /// # Errors
    /// [`StoreError::Unavailable`] when the server cannot be reached, [`StoreError::Refused`] when it refuses the user
    /// or the database, [`StoreError::Migrate`] with a [`SchemaError`] when the schema is missing or older: run [`migrate`](Self::migrate).
    pub async fn connect(url: &str) -> Result<Self, StoreError> {
        Self::connect_with(url, PostgresOptions::default()).await
    }

    /// Like [`connect`](Self::connect), with options.
    ///
    /// # Errors
    /// As [`connect`](Self::connect).
    pub async fn connect_with(url: &str, options: PostgresOptions) -> Result<Self, StoreError> {
        let hosts = Arc::new(connect::parse(url)?);
        let limit = options.acquire_timeout;
        let index = connect::server(&hosts, limit).await?;
        let host = Arc::new(CurrentHost::new(index));
        let pool = |base, planning| {
            let max = options.connections_max.max(1) as usize;
            let options = PoolOptions { base, ..hosts.pool_options(max, limit) };
            Pool::new(options, hosts.with(index, Some(planning)), Arc::clone(&host))
        };
        let (pool, hot) = (pool(1, PLANNED_EACH_TIME), pool(0, PLANNED_ONCE));
        let mut connection = connect::first(&pool).await?;
        let checked = schema::check(&mut connection).await;
        connection.release(checked)?;
        Ok(Self {
            pool,
            hot,
            hosts,
            host,
            call_timeout: options.call_timeout,
            clock: None,
            announced: Arc::default(),
        })
    }

    /// Returns the same store with another clock than the server's: for tests.
    #[must_use]
    pub fn with_clock(self, clock: Clock) -> Self {
        Self { clock: Some(clock), ..self }
    }

    /// Deletes jobs in any state with their results and errors; a worker that runs one loses its claim.
    /// Returns how many were deleted. For benchmarks and test jobs.
    pub async fn delete_jobs(&self, ids: &[JobId]) -> Result<u64, StoreError> {
        claims::delete(self, ids).await
    }

    /// Waits for the calls in progress and closes every connection.
    pub async fn close(&self) {
        self.hot.close().await;
        self.pool.close().await;
    }

    /// Returns the time of a test's clock; with `None` statements use the server's.
    pub fn clock_parameter(&self) -> Option<i64> {
        self.clock.as_ref().map(|clock| clock().0)
    }
}
