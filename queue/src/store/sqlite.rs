//! The embedded store: one SQLite file in WAL mode.
//!
//! One connection does everything, so every call is one serial transaction and no call waits for
//! another one's lock. Bulk calls pass their rows as one JSON array and join it with `json_each`,
//! as the Postgres store joins `UNNEST`. The clock is injected: tests move it by hand.

mod audit;
mod batches;
mod claims;
mod classes;
mod dead_letters;
mod files;
mod job_queries;
mod keys;
mod lines;
mod operations;
mod rows;
mod sampler;
mod sessions;
mod workers;

use std::{
    path::Path,
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use async_trait::async_trait;
pub use lines::{AnsweredLine, IngestCounts, IngestedLine, RejectedLine};
use sqlx::{
    Row, SqlitePool,
    sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions, SqliteSynchronous},
};

use super::{
    Claim, ClaimRef, Claimant, FinishedAttempt, FinishedJob, JobRecord, Progress, Reconciled,
    Settled, Store, StoreError,
};
use crate::{
    dispatch::Entry,
    job::{Job, JobId, QueueName, Timestamp},
};

/// The schema, embedded in the program: forward only.
static MIGRATIONS: sqlx::migrate::Migrator = sqlx::migrate!("../migrations/sqlite");

/// Tells the store the time.
pub type Clock = Arc<dyn Fn() -> Timestamp + Send + Sync>;

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

/// A database error; the caller may repeat the call.
fn unavailable(error: sqlx::Error) -> StoreError {
    StoreError::Unavailable(Box::new(error))
}

/// The machine's clock.
fn system_clock() -> Timestamp {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Timestamp(i64::try_from(since.as_millis()).unwrap_or(i64::MAX))
}

impl SqliteStore {
    /// Opens or creates the file and brings its schema up to date.
    ///
    /// # Errors
    /// [`StoreError::Unavailable`] when the file cannot be opened, [`StoreError::Migrate`] when it
    /// was written by another program or a later schema.
    pub async fn open(path: &Path) -> Result<Self, StoreError> {
        Self::open_with_clock(path, Arc::new(system_clock)).await
    }

    /// As [`open`](Self::open), on a given clock.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub async fn open_with_clock(path: &Path, clock: Clock) -> Result<Self, StoreError> {
        let options = SqliteConnectOptions::new()
            .filename(path)
            .create_if_missing(true)
            .journal_mode(SqliteJournalMode::Wal)
            // A commit survives the loss of power, not only the death of the process.
            .synchronous(SqliteSynchronous::Full)
            .foreign_keys(true)
            .pragma("cache_size", "-16000")
            .busy_timeout(Duration::from_secs(5));
        let pool = SqlitePoolOptions::new()
            .max_connections(1)
            .idle_timeout(None)
            .max_lifetime(None)
            .connect_with(options)
            .await
            .map_err(unavailable)?;
        MIGRATIONS.run(&pool).await.map_err(|error| StoreError::Migrate(Box::new(error)))?;
        Ok(Self { pool, clock })
    }

    /// Folds the log into the file and closes it.
    pub async fn close(&self) {
        self.pool.close().await;
    }

    /// The store's time.
    pub fn now(&self) -> Timestamp {
        (self.clock)()
    }

    /// Gives every running job back without counting an attempt, and lets go of every batch; returns
    /// how many jobs those were. Only for the one process that owns the file: whoever held those leases
    /// is gone.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn hand_back_all(&self) -> Result<u64, StoreError> {
        let done = sqlx::query(
            "UPDATE jobs SET state = 'queued', epoch = epoch + 1, owner = NULL, lease_until = NULL
             WHERE state = 'running'",
        )
        .execute(&self.pool)
        .await
        .map_err(unavailable)?;
        sqlx::query("UPDATE batches SET epoch = epoch + 1, owner = NULL, lease_until = NULL")
            .execute(&self.pool)
            .await
            .map_err(unavailable)?;
        Ok(done.rows_affected())
    }

    /// A transaction that holds the write lock from its start, so that what it reads stays true.
    async fn begin(&self) -> Result<sqlx::Transaction<'static, sqlx::Sqlite>, StoreError> {
        self.pool.begin_with("BEGIN IMMEDIATE").await.map_err(unavailable)
    }
}

#[async_trait]
impl Store for SqliteStore {
    async fn submit(&self, jobs: &[Job]) -> Result<(), StoreError> {
        let mut tx = self.begin().await?;
        claims::insert_jobs(&mut tx, jobs, None, self.now()).await?;
        tx.commit().await.map_err(unavailable)
    }

    async fn claim(&self, ids: &[JobId], by: Claimant<'_>) -> Result<Vec<Claim>, StoreError> {
        let mut tx = self.begin().await?;
        let now = self.now();
        claims::lapse(&mut tx, now).await?;
        let claims = claims::claim(&mut tx, ids, by, now).await?;
        tx.commit().await.map_err(unavailable)?;
        Ok(claims)
    }

    async fn renew(&self, held: &[ClaimRef], lease: Duration) -> Result<Vec<ClaimRef>, StoreError> {
        let rows = sqlx::query(
            "UPDATE jobs SET lease_until = ?1
             FROM json_each(?2) AS held
             WHERE jobs.id = unhex(held.value ->> 'id') AND jobs.epoch = held.value ->> 'epoch'
               AND jobs.state = 'running'
             RETURNING jobs.id, jobs.epoch",
        )
        .bind(self.now().after(lease).0)
        .bind(rows::held_json(held))
        .fetch_all(&self.pool)
        .await
        .map_err(unavailable)?;
        let kept = rows::held(&rows)?;
        Ok(held.iter().copied().filter(|held| !kept.contains(held)).collect())
    }

    async fn checkpoint(&self, saved: &[(ClaimRef, Vec<u8>)]) -> Result<Vec<ClaimRef>, StoreError> {
        let mut tx = self.begin().await?;
        let lost = claims::checkpoint(&mut tx, saved).await?;
        tx.commit().await.map_err(unavailable)?;
        Ok(lost)
    }

    async fn finish(&self, finished: &[FinishedAttempt]) -> Result<Vec<Settled>, StoreError> {
        let mut tx = self.begin().await?;
        let settled = claims::finish(&mut tx, finished, self.now()).await?;
        tx.commit().await.map_err(unavailable)?;
        Ok(settled)
    }

    async fn hand_back(&self, held: &[ClaimRef]) -> Result<Vec<JobId>, StoreError> {
        let rows = sqlx::query(
            "UPDATE jobs SET state = 'queued', epoch = jobs.epoch + 1, owner = NULL,
                             lease_until = NULL
             FROM json_each(?1) AS held
             WHERE jobs.id = unhex(held.value ->> 'id') AND jobs.epoch = held.value ->> 'epoch'
               AND jobs.state = 'running'
             RETURNING jobs.id",
        )
        .bind(rows::held_json(held))
        .fetch_all(&self.pool)
        .await
        .map_err(unavailable)?;
        Ok(rows::ids(&rows)?.into_iter().collect())
    }

    async fn cancel(&self, ids: &[JobId]) -> Result<Vec<JobId>, StoreError> {
        let mut tx = self.begin().await?;
        let cancelled = claims::cancel(&mut tx, ids, self.now()).await?;
        tx.commit().await.map_err(unavailable)?;
        Ok(cancelled)
    }

    async fn reconcile(&self) -> Result<Reconciled, StoreError> {
        let mut tx = self.begin().await?;
        let now = self.now();
        let mut done = Reconciled::default();
        for row in claims::lapse(&mut tx, now).await? {
            done.extend(1, rows::queued(&row)?);
            done.lapsed += 1;
        }
        done.extend(claims::expire(&mut tx, now).await?, None);
        for row in claims::promote(&mut tx, now).await? {
            done.extend(1, rows::queued(&row)?);
        }
        tx.commit().await.map_err(unavailable)?;
        Ok(done)
    }

    async fn queued(
        &self,
        queue: &QueueName,
        after: Option<JobId>,
        limit: u32,
    ) -> Result<Vec<Entry>, StoreError> {
        let rows = sqlx::query(
            "SELECT id, tenant, priority FROM jobs
             WHERE model = ?1 AND format = ?2 AND state = 'queued' AND id > ?3
             ORDER BY id LIMIT ?4",
        )
        .bind(&queue.model)
        .bind(&queue.format)
        .bind(after.map_or(Vec::new(), |id| id.as_bytes().to_vec()))
        .bind(limit)
        .fetch_all(&self.pool)
        .await
        .map_err(unavailable)?;
        rows.iter().map(|row| rows::entry(row, queue)).collect()
    }

    async fn now(&self) -> Result<Timestamp, StoreError> {
        Ok(Self::now(self))
    }

    async fn job(&self, id: JobId) -> Result<Option<JobRecord>, StoreError> {
        let row = sqlx::query(
            "SELECT job, state, epoch, attempts, outcome, finished_at
             FROM jobs LEFT JOIN results ON results.job_id = jobs.id WHERE id = ?1",
        )
        .bind(id.as_bytes().as_slice())
        .fetch_optional(&self.pool)
        .await
        .map_err(unavailable)?;
        let Some(row) = row else { return Ok(None) };
        let errors =
            sqlx::query("SELECT error FROM attempt_errors WHERE job_id = ?1 ORDER BY rowid")
                .bind(id.as_bytes().as_slice())
                .fetch_all(&self.pool)
                .await
                .map_err(unavailable)?;
        rows::record(&row, &errors).map(Some)
    }

    async fn finished(&self, ids: &[JobId]) -> Result<Vec<FinishedJob>, StoreError> {
        let rows = sqlx::query(
            "SELECT jobs.id, state, outcome FROM json_each(?1) AS wanted
             JOIN jobs ON jobs.id = unhex(wanted.value)
             LEFT JOIN results ON results.job_id = jobs.id
             WHERE state IN ('completed', 'failed', 'cancelled', 'expired')",
        )
        .bind(rows::ids_json(ids))
        .fetch_all(&self.pool)
        .await
        .map_err(unavailable)?;
        rows.iter().map(rows::ended).collect()
    }

    async fn unfinished(&self, queue: &QueueName) -> Result<u64, StoreError> {
        let row = sqlx::query(
            "SELECT count(*) AS jobs FROM jobs WHERE model = ?1 AND format = ?2
             AND state IN ('scheduled', 'queued', 'running', 'retrying')",
        )
        .bind(&queue.model)
        .bind(&queue.format)
        .fetch_one(&self.pool)
        .await
        .map_err(unavailable)?;
        Ok(rows::integer(&row, "jobs")?.unsigned_abs())
    }

    async fn progress(&self, queue: Option<&QueueName>) -> Result<Progress, StoreError> {
        let (model, format) = queue.map_or((None, None), |q| (Some(&q.model), Some(&q.format)));
        let rows = sqlx::query(
            "SELECT state, count(*) AS jobs FROM jobs
             WHERE (?1 IS NULL OR (model = ?1 AND format = ?2)) GROUP BY state",
        )
        .bind(model)
        .bind(format)
        .fetch_all(&self.pool)
        .await
        .map_err(unavailable)?;
        let mut progress = Progress::default();
        for row in &rows {
            let count: i64 = row.try_get("jobs").map_err(unavailable)?;
            *progress.counter(rows::state(row)?) = count.unsigned_abs();
        }
        let row = sqlx::query(
            "SELECT coalesce(sum(prompt_tokens), 0) AS prompt,
                    coalesce(sum(completion_tokens), 0) AS completion
             FROM results
             WHERE ?1 IS NULL
                OR job_id IN (SELECT id FROM jobs WHERE model = ?1 AND format = ?2)",
        )
        .bind(model)
        .bind(format)
        .fetch_one(&self.pool)
        .await
        .map_err(unavailable)?;
        progress.prompt_tokens =
            row.try_get::<i64, _>("prompt").map_err(unavailable)?.unsigned_abs();
        progress.completion_tokens =
            row.try_get::<i64, _>("completion").map_err(unavailable)?.unsigned_abs();
        Ok(progress)
    }
}
