//! The embedded store: one SQLite file in WAL mode.
//!
//! One connection does everything, so calls are serial transactions and never wait for another
//! connection's lock. Bulk calls pass their rows as one JSON array and join it with `json_each`, as the
//! Postgres store joins `UNNEST`. Tests inject the clock.

#[macro_use]
mod dialect;

mod announcements;
mod claims;
mod lines;
mod queues;
mod reconcile;
mod sampler;
#[path = "sql/mod.rs"]
mod sql;
mod workers;

use std::{
    path::Path,
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use SqliteStore as SqlStore;
use async_trait::async_trait;
pub use lines::{AnsweredLine, IngestCounts, IngestedLine, RejectedLine};
use sql::{
    calls::{self, query},
    classes, history, queue_settings, rows, tenants,
};
use sqlx::{
    AssertSqlSafe, SqlitePool, SqliteTransaction,
    sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions, SqliteSynchronous},
};

use super::{
    Clock, StoreError,
    maintenance::{Erased, Maintained, Maintenance},
    workers::SILENT_KEPT,
};
use crate::job::{JobState, Tenant, Timestamp};

/// The schema, embedded in the program: forward only.
static MIGRATIONS: sqlx::migrate::Migrator = sqlx::migrate!("migrations/sqlite");

/// A store in one SQLite file.
#[derive(Clone)]
pub struct SqliteStore {
    pool: SqlitePool,
    clock: Clock,
}

impl std::fmt::Debug for SqliteStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SqliteStore").finish_non_exhaustive()
    }
}

/// Returns the machine's clock.
fn system_clock() -> Timestamp {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Timestamp(i64::try_from(since.as_millis()).unwrap_or(i64::MAX))
}

impl SqliteStore {
    /// Opens or creates the file and migrates its schema to the latest version.
    ///
    /// # Errors
    /// [`StoreError::Unavailable`] when the file cannot be opened, [`StoreError::Migrate`] when it
    /// has the schema of another program or a later release.
    pub async fn open(path: &Path) -> Result<Self, StoreError> {
        Self::open_with_clock(path, Arc::new(system_clock)).await
    }

    /// Like [`open`](Self::open), with a given clock.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub async fn open_with_clock(path: &Path, clock: Clock) -> Result<Self, StoreError> {
        let options = SqliteConnectOptions::new()
            .filename(path)
            .create_if_missing(true)
            .journal_mode(SqliteJournalMode::Wal)
            // A commit survives a power failure, not only the death of the process.
            .synchronous(SqliteSynchronous::Full)
            .foreign_keys(true)
            .pragma("cache_size", "-16000")
            .busy_timeout(Duration::from_secs(5));
        let pool = SqlitePoolOptions::new()
            .max_connections(1)
            .idle_timeout(None)
            .max_lifetime(None)
            .connect_with(options)
            .await?;
        MIGRATIONS.run(&pool).await.map_err(|error| StoreError::Migrate(Box::new(error)))?;
        Ok(Self { pool, clock })
    }

    /// Returns a query of `open_jobs` for this store, which keeps all jobs in one table.
    #[expect(clippy::unused_async, reason = "the Postgres store may look where open jobs are")]
    async fn on_open_jobs(&self, sql: &'static str) -> Result<AssertSqlSafe<String>, StoreError> {
        Ok(AssertSqlSafe(sql.replace("open_jobs", "jobs")))
    }

    /// Returns the tables with jobs in a state, or with jobs.
    #[expect(clippy::unused_async, reason = "as above")]
    async fn tables_of(&self, _: Option<JobState>) -> Result<&'static [&'static str], StoreError> {
        Ok(&["jobs"])
    }

    /// Writes the log back into the file and closes it.
    pub async fn close(&self) {
        self.pool.close().await;
    }

    /// Returns the time of the store's clock.
    pub fn now(&self) -> Timestamp {
        (self.clock)()
    }

    /// Releases every running job without counting an attempt, and every batch, whose lease counts as lost;
    /// returns the number of jobs. Only for the one process that owns the file, at its start: the holders of
    /// those leases are gone.
    pub async fn hand_back_all(&self) -> Result<u64, StoreError> {
        let jobs = query(
            "UPDATE jobs SET state = 'queued', epoch = epoch + 1, claim_id = NULL, owner = NULL,
                             lease_until = NULL, losses = losses + 1
             WHERE state = 'running'",
        );
        let released = self.execute(jobs).await?;
        let batches = "UPDATE batches SET epoch = epoch + 1, owner = NULL, lease_until = NULL,
                              lost_leases = lost_leases + 1
                       WHERE lease_until IS NOT NULL";
        self.execute(query(batches)).await?;
        Ok(released)
    }

    /// Begins a transaction that holds the write lock from its start, so that what it reads stays
    /// true.
    async fn begin(&self) -> Result<SqliteTransaction<'static>, StoreError> {
        Ok(self.pool.begin_with("BEGIN IMMEDIATE").await?)
    }

    /// Returns a call's result. The file is local, so calls have no time limit.
    async fn within<T>(
        &self,
        call: impl Future<Output = Result<T, StoreError>> + Send,
    ) -> Result<T, StoreError> {
        call.await
    }

    /// Returns the time in milliseconds.
    fn clock_parameter(&self) -> i64 {
        self.now().0
    }
}

#[async_trait]
impl Maintenance for SqliteStore {
    /// There are no partitions and no retention here: deletes long silent workers and old samples.
    async fn maintain(&self) -> Result<Maintained, StoreError> {
        let now = self.clock_parameter();
        let mut tx = self.begin().await?;
        let silent_since = now.saturating_sub(rows::milliseconds(SILENT_KEPT));
        workers::forget(&mut tx, None, Some(silent_since)).await?;
        history::sweep(&mut tx, now).await?;
        tx.commit().await?;
        Ok(Maintained::default())
    }

    async fn erase_tenant(&self, tenant: &Tenant) -> Result<Erased, StoreError> {
        tenants::erase(self, tenant).await
    }
}
