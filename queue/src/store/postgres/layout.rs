//! Where the rows of open jobs are: split from the ended ones, or combined with them.
//!
//! The previous release keeps all jobs in `jobs`. This release keeps open jobs in `open_jobs` and moves a
//! row to `jobs` when its job ends. During a rolling upgrade processes of both releases work on one
//! database, so this release uses the combined layout until `tritmill migrate --finish`
//! ([`PostgresStore::finish_upgrade`]). From then on:
//!
//! - A process that has not noticed the change does not find all jobs in `jobs`, looks again, and applies
//!   the rest of its call to `open_jobs`.
//! - Open rows that are left in `jobs` are moved when a call names them, and by every reconciler. Ten
//!   minutes after the change, when none is left, calls stop looking for them.
//!
//! A new database begins split. The next release deletes this module and `combined.rs`.

use std::{
    collections::HashSet,
    sync::atomic::{AtomicI64, Ordering},
    time::Duration,
};

use parking_lot::Mutex;
use sqlx::{AssertSqlSafe, PgConnection, postgres::PgRow};
use tokio::time::Instant;

use super::{
    PostgresStore,
    calls::{Query, query},
    dialect::id_list,
    rows,
};
use crate::{
    job::{JobId, JobState},
    store::{StoreError, workers::SILENT_ALIVE_MAX},
};

/// A process notices the end of an upgrade after this time.
const READ_EVERY: Duration = Duration::from_secs(2);
/// Open rows of the combined layout are looked for at least this long after the change.
const LEFTOVERS_FOR_MS: i64 = 10 * 60 * 1000;
/// Time between two looks for open rows of the combined layout, which read all partitions.
const LEFTOVERS_EVERY: Duration = Duration::from_secs(5);
/// Rows moved by one statement.
const CHUNK: i64 = 1000;

/// Where the rows of open jobs are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Layout {
    /// In `jobs`, with those of ended jobs.
    Combined,
    /// In `open_jobs`; some may be left in `jobs`.
    Changing,
    /// In `open_jobs`.
    Split,
}

impl Layout {
    const ALL: [Self; 3] = [Self::Combined, Self::Changing, Self::Split];

    /// The value of the setting `open_jobs`; a database without it is combined.
    fn of(value: i64) -> Self {
        Self::ALL.into_iter().find(|layout| *layout as i64 == value).unwrap_or(Self::Split)
    }

    /// Returns the table of open jobs.
    pub fn open_table(self) -> &'static str {
        match self {
            Self::Combined => "jobs",
            Self::Changing | Self::Split => "open_jobs",
        }
    }

    /// Returns a statement on `open_jobs`, for the table of this layout.
    pub fn statement(self, on_open_jobs: &str) -> AssertSqlSafe<String> {
        AssertSqlSafe(on_open_jobs.replace("open_jobs", self.open_table()))
    }
}

/// What a process knows of the layout.
#[derive(Debug)]
pub(super) struct KnownLayout {
    value: AtomicI64,
    read_at: Mutex<Instant>,
    leftovers_at: Mutex<Option<Instant>>,
}

impl KnownLayout {
    /// Reads the layout of the database.
    pub async fn read(connection: &mut PgConnection) -> Result<Self, StoreError> {
        let value = read(connection).await?;
        Ok(Self {
            value: AtomicI64::new(value),
            read_at: Mutex::new(Instant::now()),
            leftovers_at: Mutex::default(),
        })
    }

    fn get(&self) -> Layout {
        Layout::of(self.value.load(Ordering::Relaxed))
    }

    fn set(&self, value: i64) {
        self.value.store(value, Ordering::Relaxed);
        *self.read_at.lock() = Instant::now();
    }

    /// Returns whether the layout may have changed.
    fn is_due(&self) -> bool {
        self.get() == Layout::Combined && self.read_at.lock().elapsed() >= READ_EVERY
    }
}

async fn read(connection: &mut PgConnection) -> Result<i64, StoreError> {
    let row =
        query("SELECT coalesce(max(value), 0) AS value FROM settings WHERE name = 'open_jobs'");
    rows::integer(&row.fetch_one(connection).await?, "value")
}

async fn write(connection: &mut PgConnection, layout: Layout) -> Result<(), StoreError> {
    query(
        "INSERT INTO settings (name, value)
         VALUES ('open_jobs', $1), ('open_jobs_since', store_now_ms(NULL))
         ON CONFLICT (name) DO UPDATE SET value = excluded.value",
    )
    .bind(layout as i64)
    .execute(connection)
    .await?;
    Ok(())
}

/// Sets the layout of a database that has no jobs and no processes.
pub(super) async fn begin_split(connection: &mut PgConnection) -> Result<(), StoreError> {
    let used = query(
        "SELECT EXISTS (SELECT FROM jobs) OR EXISTS (SELECT FROM workers)
             OR EXISTS (SELECT FROM batches)
             OR EXISTS (SELECT FROM settings WHERE name = 'open_jobs') AS used",
    );
    if !rows::get::<bool>(&used.fetch_one(&mut *connection).await?, "used")? {
        write(connection, Layout::Split).await?;
    }
    Ok(())
}

impl PostgresStore {
    /// Returns the layout of the database as this process knows it.
    pub(super) async fn layout(&self) -> Result<Layout, StoreError> {
        if self.layout.is_due() { self.read_layout().await } else { Ok(self.layout.get()) }
    }

    /// Like [`layout`](Self::layout), within a transaction.
    pub(super) async fn layout_within(
        &self,
        connection: &mut PgConnection,
    ) -> Result<Layout, StoreError> {
        if self.layout.is_due() {
            self.layout.set(read(connection).await?);
        }
        Ok(self.layout.get())
    }

    /// Reads the layout of the database.
    async fn read_layout(&self) -> Result<Layout, StoreError> {
        let value = self.within(async { read(&mut *self.pool.acquire().await?).await }).await?;
        self.layout.set(value);
        Ok(self.layout.get())
    }

    /// Runs a statement that changes open jobs and returns a row with the `id` of each changed job. Jobs
    /// that it does not find are looked for where they may be during an upgrade. `statement` is given the
    /// layout and the items to change; `id` returns the job of an item.
    pub(super) async fn change_open<I: Clone + Sync>(
        &self,
        items: &[I],
        statement: impl Fn(Layout, &[I]) -> Query<'static> + Sync,
        id: impl Fn(&I) -> JobId + Sync,
    ) -> Result<Vec<PgRow>, StoreError> {
        let mut layout = self.layout().await?;
        let run =
            async |layout, items: &[I]| self.fetch_open(layout, statement(layout, items)).await;
        let mut changed = run(layout, items).await?;
        if layout == Layout::Split {
            return Ok(changed);
        }
        let rest = |changed: &[PgRow]| -> Result<Vec<I>, StoreError> {
            let changed: HashSet<JobId> = rows::ids(changed)?.into_iter().collect();
            Ok(items.iter().filter(|item| !changed.contains(&id(item))).cloned().collect())
        };
        let mut missing = rest(&changed)?;
        if !missing.is_empty() && layout == Layout::Combined {
            layout = self.read_layout().await?;
            if layout != Layout::Combined {
                changed.extend(run(layout, &missing).await?);
                missing = rest(&changed)?;
            }
        }
        if !missing.is_empty()
            && layout == Layout::Changing
            && self.move_open(&missing.iter().map(&id).collect::<Vec<_>>()).await? > 0
        {
            changed.extend(run(layout, &missing).await?);
        }
        Ok(changed)
    }

    /// Moves open rows from `jobs` to `open_jobs`; returns how many.
    async fn move_open(&self, ids: &[JobId]) -> Result<u64, StoreError> {
        let moved = query(
            "WITH moved AS (
                 DELETE FROM jobs
                 WHERE id = ANY($1) AND state IN ('scheduled', 'queued', 'running', 'retrying')
                 RETURNING id, model, format, tenant, priority, state, cost, epoch, attempts,
                           attempts_max, owner, lease_until, run_at, expires_at, submitted_at,
                           replay_of, job, checkpoint, custom_id, started_at, claimed_at, error_code,
                           error_signature, claim_id, losses, alone, shard_key
             )
             INSERT INTO open_jobs (id, model, format, tenant, priority, state, cost, epoch, attempts,
                                    attempts_max, owner, lease_until, run_at, expires_at,
                                    submitted_at, replay_of, job, checkpoint, custom_id, started_at,
                                    claimed_at, error_code, error_signature, claim_id, losses, alone,
                                    shard_key)
             SELECT * FROM moved ON CONFLICT (id) DO NOTHING",
        );
        self.execute(moved.bind(id_list(ids.iter().copied()))).await
    }

    /// Moves the open rows that are left in `jobs`; when there are none for long, the change is complete.
    pub(super) async fn move_leftovers(&self) -> Result<(), StoreError> {
        if self.layout().await? != Layout::Changing {
            return Ok(());
        }
        {
            let mut looked_at = self.layout.leftovers_at.lock();
            if looked_at.is_some_and(|at| at.elapsed() < LEFTOVERS_EVERY) {
                return Ok(());
            }
            *looked_at = Some(Instant::now());
        }
        loop {
            let left = query(
                "SELECT id FROM jobs WHERE state IN ('scheduled', 'queued', 'running', 'retrying')
                 LIMIT $1",
            );
            let left = rows::ids(&self.fetch_all(left.bind(CHUNK)).await?)?;
            if left.is_empty() {
                break;
            }
            let moved = self.move_open(&left).await?;
            tracing::info!(jobs = moved, "open jobs moved to their own table");
        }
        let complete = query(
            "UPDATE settings SET value = $1
             WHERE name = 'open_jobs' AND value < $1
               AND (SELECT value FROM settings WHERE name = 'open_jobs_since') + $2
                   < store_now_ms(NULL)",
        );
        let complete = complete.bind(Layout::Split as i64).bind(LEFTOVERS_FOR_MS);
        if self.execute(complete).await? > 0 {
            self.read_layout().await?;
        }
        Ok(())
    }

    /// Ends an upgrade: no process of the previous release runs any more. Returns the names of workers of
    /// that release that are alive; then nothing was changed.
    pub async fn finish_upgrade(&self) -> Result<Vec<String>, StoreError> {
        let alive = query(
            "SELECT owner FROM workers
             WHERE seen_at >= store_now_ms($1) - $2 AND vitals -> 'release' IS NULL
             ORDER BY owner",
        );
        let alive = alive.bind(self.clock_parameter()).bind(rows::milliseconds(SILENT_ALIVE_MAX));
        let alive = self.fetch_all(alive).await?;
        let alive = alive.iter().map(|row| rows::get(row, "owner"));
        let alive: Vec<String> = alive.collect::<Result<_, _>>()?;
        if alive.is_empty() && self.read_layout().await? == Layout::Combined {
            self.within(async { write(&mut *self.pool.acquire().await?, Layout::Changing).await })
                .await?;
            self.read_layout().await?;
        }
        Ok(alive)
    }

    /// Returns a query of `open_jobs`, for the table of the known layout.
    pub(super) async fn on_open_jobs(
        &self,
        sql: &'static str,
    ) -> Result<AssertSqlSafe<String>, StoreError> {
        Ok(self.layout().await?.statement(sql))
    }

    /// Returns the tables with jobs in a state, or with jobs.
    pub(super) async fn tables_of(
        &self,
        state: Option<JobState>,
    ) -> Result<&'static [&'static str], StoreError> {
        Ok(match (self.layout().await?, state) {
            (Layout::Combined, _) => &["jobs"],
            (Layout::Split, Some(state)) if !state.is_terminal() => &["open_jobs"],
            (_, Some(state)) if state.is_terminal() => &["jobs"],
            _ => &["open_jobs", "jobs"],
        })
    }
}
