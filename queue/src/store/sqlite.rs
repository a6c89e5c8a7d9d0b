//! The embedded store: one SQLite file in WAL mode.
//!
//! One connection does everything, so calls are serial transactions and never wait for another
//! connection's lock. Bulk calls pass their rows as one JSON array and join it with `json_each`, as the
//! Postgres store joins `UNNEST`. Tests inject the clock.

#[macro_use]
pub(super) mod dialect;

mod announcements;
mod claims;
mod lines;
mod queues;
mod reconcile;
mod sampler;
#[path = "sql/mod.rs"]
mod sql;
mod workers;

use std::{path::Path, sync::Arc, time::Duration};

use SqliteStore as SqlStore;
use async_trait::async_trait;
pub use lines::{AnsweredLine, IngestCounts, IngestedLine, RejectedLine};
pub use sql::{calls, rows};
use sql::{calls::query, classes, history, queue_settings, tenants};
use sqlx::{
    ConnectOptions as _, Connection as _, Row as _, Sqlite, SqlitePool, SqliteTransaction,
    pool::PoolConnection,
    sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions, SqliteSynchronous},
};

use super::{
    Clock, StoreError,
    maintenance::{ErasedJobs, Maintained, Maintenance},
    workers::SILENT_KEPT,
};
use crate::job::{JobId, Tenant, Timestamp};

/// The schema, embedded in the program: forward only.
static MIGRATIONS: sqlx::migrate::Migrator = sqlx_macros::migrate!("migrations/sqlite");

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

impl SqliteStore {
    /// Opens or creates the file and migrates its schema to the latest version.
    ///
    /// # Errors
    /// [`StoreError::Unavailable`] when the file cannot be opened, [`StoreError::Migrate`] when it
    /// has the schema of another program or a later release.
    pub async fn open(path: &Path) -> Result<Self, StoreError> {
        Self::open_with_clock(path, Arc::new(Timestamp::by_this_machine)).await
    }

    /// Like [`open`](Self::open), with a given clock.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub async fn open_with_clock(path: &Path, clock: Clock) -> Result<Self, StoreError> {
        refuse_foreign(path).await?;
        keep_private(path).map_err(sqlx::Error::Io)?;
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

    /// Writes the log back into the file and closes it.
    pub async fn close(&self) {
        self.pool.close().await;
    }

    /// Returns the time of the store's clock.
    pub fn now(&self) -> Timestamp {
        (self.clock)()
    }

    /// Releases every running job without counting an attempt; returns the number of jobs. Only for the one process that owns the file, at its start: the holders of
    /// those leases are gone.
    pub async fn hand_back_all(&self) -> Result<u64, StoreError> {
        let jobs = query(
            "UPDATE jobs SET state = 'queued', epoch = epoch + 1, claim_id = NULL, owner = NULL,
                             lease_until = NULL, losses = losses + 1
             WHERE state = 'running'",
        );
        self.execute(jobs).await
    }

    /// Returns the connection.
    ///
    /// # Errors
    /// [`StoreError::Unavailable`].
    async fn acquire(&self) -> Result<PoolConnection<Sqlite>, StoreError> {
        Ok(self.pool.acquire().await?)
    }

    /// Gives the connection back after a call with this result, which it returns.
    fn release<T, E>(
        &self,
        connection: PoolConnection<Sqlite>,
        result: Result<T, E>,
    ) -> Result<T, StoreError>
    where
        StoreError: From<E>,
    {
        drop(connection);
        result.map_err(StoreError::from)
    }

    /// Begins a transaction that holds the write lock from its start, so that what it reads stays
    /// true.
    ///
    /// # Errors
    /// [`StoreError::Unavailable`].
    pub async fn begin(&self) -> Result<SqliteTransaction<'static>, StoreError> {
        Ok(self.pool.begin_with("BEGIN IMMEDIATE").await?)
    }

    /// Returns a call's result. The file is local, so calls have no time limit.
    ///
    /// # Errors
    /// Those of the call.
    pub async fn within<T>(
        &self,
        call: impl Future<Output = Result<T, StoreError>> + Send,
    ) -> Result<T, StoreError> {
        call.await
    }

    /// Returns the time in milliseconds.
    pub fn clock_parameter(&self) -> i64 {
        self.now().0
    }
}

/// Refuses a file with tables that no migration of this store made, and leaves it as it is.
async fn refuse_foreign(path: &Path) -> Result<(), StoreError> {
    if !path.metadata().is_ok_and(|file| file.len() > 0) {
        return Ok(());
    }
    let mut connection = SqliteConnectOptions::new().filename(path).connect().await?;
    let found = query(
        "SELECT count(*) AS tables, coalesce(sum(name = '_sqlx_migrations'), 0) AS ours
         FROM sqlite_master WHERE type = 'table'",
    );
    let found = found.fetch_one(&mut connection).await?;
    let (tables, ours): (i64, i64) = (found.try_get("tables")?, found.try_get("ours")?);
    connection.close().await?;
    match tables > 0 && ours == 0 {
        true => Err(StoreError::Migrate("the file is a database of another program".into())),
        false => Ok(()),
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

    async fn erase_jobs(&self, tenant: &Tenant) -> Result<ErasedJobs, StoreError> {
        tenants::erase_jobs(self, tenant).await
    }

    async fn delete_jobs(&self, ids: &[JobId]) -> Result<u64, StoreError> {
        claims::delete(self, ids).await
    }
}

/// Creates the file if it is missing, readable by its owner alone: it has prompts, answers and hashes of keys. SQLite gives the
/// files beside it the same permissions.
fn keep_private(path: &Path) -> std::io::Result<()> {
    use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
    const OWNER_ONLY: u32 = 0o600;
    let mut options = std::fs::File::options();
    match options.write(true).create(true).truncate(false).mode(OWNER_ONLY).open(path) {
        Ok(file) => {
            // A file of another owner stays as it is.
            let _ = file.set_permissions(std::fs::Permissions::from_mode(OWNER_ONLY));
            Ok(())
        }
        // SQLite can use what it can only read.
        Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => Ok(()),
        Err(error) => Err(error),
    }
}
