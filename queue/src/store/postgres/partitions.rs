//! Keeps the big tables in daily partitions: made ahead, dropped whole when they are old and done.
//!
//! A day's partition holds the ids of that day (a UUIDv7 begins with its milliseconds). Ids of a day
//! without one rest in the default partition until the next maintenance makes it and moves them.
//! A partition goes when every job in it has been over for as long as the database keeps jobs
//! (`retention_ms` in `settings`: one value for all who maintain it); results and errors go after
//! their jobs.
//!
//! Each step is a transaction of its own under one advisory lock, and looks again under the lock:
//! several processes may maintain at once. Steps wait for the tables only briefly and fail rather
//! than hold up the traffic behind them; the next maintenance tries again.

use sqlx::{AssertSqlSafe, Connection as _, PgConnection, PgTransaction, Row as _};
use uuid::Uuid;

use super::{PostgresStore, milliseconds, rows, sampler, settings, unavailable, workers};
use crate::store::{StoreError, operations::SILENT_KEPT};

/// Days after today that have a partition.
const DAYS_AHEAD: i64 = 3;
/// The first day whose ids are believed: 2020-01-01. An id from before it is no UUIDv7.
const DAY_FIRST: i64 = 18_262;
const DAY_MS: i64 = 24 * 60 * 60 * 1000;
/// Whoever changes partitions holds it; any number that nobody else uses.
const LOCK: i64 = 0x7472_6974_6d69_6c6c;
/// Longest wait for a table.
const TABLE_WAIT: &str = "SET LOCAL lock_timeout = '3s'";

/// A partitioned table.
#[derive(Clone, Copy)]
struct Table {
    name: &'static str,
    /// Column of the job's id.
    key: &'static str,
    /// Storage parameters: jobs leave room for their moves.
    storage: &'static str,
}

const JOBS: Table = Table {
    name: "jobs",
    key: "id",
    storage: "fillfactor = 80, autovacuum_vacuum_scale_factor = 0.05",
};
const RESULTS: Table = Table { name: "results", key: "job_id", storage: "fillfactor = 100" };
const ERRORS: Table = Table { name: "attempt_errors", key: "job_id", storage: "fillfactor = 100" };

/// What a maintenance did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Maintained {
    /// Partitions made, over all tables.
    pub created: u32,
    /// Partitions dropped, over all tables.
    pub dropped: u32,
    /// Partitions of jobs that are old enough but hold a job that is not over.
    pub kept_unfinished: u32,
    /// Partitions of jobs that are old enough, and over, but for too short a time.
    pub kept_recent: u32,
}

impl PostgresStore {
    /// Makes the partitions of the coming days and drops those whose every job has been over for
    /// the database's retention; forgets idempotency keys that are as old and whose jobs are gone,
    /// and workers long silent. To be called every few hours, by any number of processes.
    ///
    /// # Errors
    /// [`StoreError`]; what was done until then stays done, and the rest is done by the next call.
    pub async fn maintain(&self) -> Result<Maintained, StoreError> {
        let mut connection = self.pool.acquire().await.map_err(unavailable)?;
        let now = self.given_now();
        let retention = settings::retention(&mut connection).await?;
        let mut done =
            Maintained { created: create_ahead(&mut connection, now).await?, ..Default::default() };
        let row = sqlx::query("SELECT store_now_ms($1) AS now")
            .bind(now)
            .fetch_one(&mut *connection)
            .await
            .map_err(unavailable)?;
        let now = rows::integer(&row, "now")?;
        let oldest = now.saturating_sub(milliseconds(retention));
        drop_before(&mut connection, oldest, &mut done).await?;
        sqlx::query(
            "DELETE FROM idempotency WHERE created_at < $1
             AND NOT EXISTS (SELECT FROM jobs WHERE id = ANY(job_ids))",
        )
        .bind(oldest)
        .execute(&mut *connection)
        .await
        .map_err(unavailable)?;
        let silent_since = now.saturating_sub(milliseconds(SILENT_KEPT));
        workers::forget_where(&mut connection, None, Some(silent_since)).await?;
        sampler::sweep(&mut connection, now).await?;
        Ok(done)
    }
}

/// Makes the partitions of today and the coming days, and of every day whose ids rest in a default
/// partition; returns how many.
pub(super) async fn create_ahead(
    connection: &mut PgConnection,
    now: Option<i64>,
) -> Result<u32, StoreError> {
    let row = sqlx::query("SELECT store_now_ms($1) AS now")
        .bind(now)
        .fetch_one(&mut *connection)
        .await
        .map_err(unavailable)?;
    let today = rows::integer(&row, "now")?.div_euclid(DAY_MS);
    let mut created = 0;
    for table in [JOBS, RESULTS, ERRORS] {
        let mut wanted: Vec<i64> = (today..=today + DAYS_AHEAD).collect();
        wanted.extend(days_in_default(connection, table, today + DAYS_AHEAD).await?);
        let there: Vec<i64> =
            partitions(connection, table).await?.into_iter().map(|(_, day)| day).collect();
        wanted.retain(|day| !there.contains(day));
        wanted.sort_unstable();
        wanted.dedup();
        for day in wanted {
            created += u32::from(create(connection, table, day).await?);
        }
    }
    Ok(created)
}

/// Days of the ids in the table's default partition, up to `last`.
async fn days_in_default(
    connection: &mut PgConnection,
    table: Table,
    last: i64,
) -> Result<Vec<i64>, StoreError> {
    let Table { name, key, .. } = table;
    let found = sqlx::query(AssertSqlSafe(format!(
        "SELECT DISTINCT ('x' || left(replace({key}::text, '-', ''), 12))::bit(48)::bigint / $1
                AS day
         FROM {name}_default",
    )))
    .bind(DAY_MS)
    .fetch_all(connection)
    .await
    .map_err(unavailable)?;
    let mut days = Vec::with_capacity(found.len());
    for row in &found {
        days.push(rows::integer(row, "day")?);
    }
    days.retain(|day| (DAY_FIRST..=last).contains(day));
    Ok(days)
}

/// The table's daily partitions and their days.
async fn partitions(
    connection: &mut PgConnection,
    table: Table,
) -> Result<Vec<(String, i64)>, StoreError> {
    let found = sqlx::query(
        "SELECT relname::text AS name,
                (to_date(right(relname, 8), 'YYYYMMDD') - DATE '1970-01-01')::bigint AS day
         FROM pg_inherits JOIN pg_class ON pg_class.oid = inhrelid
         WHERE inhparent = $1::regclass AND relname ~ '_p[0-9]{8}$' ORDER BY day",
    )
    .bind(table.name)
    .fetch_all(connection)
    .await
    .map_err(unavailable)?;
    found.iter().map(|row| Ok((rows::get(row, "name")?, rows::integer(row, "day")?))).collect()
}

/// A transaction that is alone among those that change partitions.
async fn begin(connection: &mut PgConnection) -> Result<PgTransaction<'_>, StoreError> {
    let mut tx = connection.begin().await.map_err(unavailable)?;
    sqlx::query("SELECT pg_advisory_xact_lock($1)")
        .bind(LOCK)
        .execute(&mut *tx)
        .await
        .map_err(unavailable)?;
    sqlx::query(TABLE_WAIT).execute(&mut *tx).await.map_err(unavailable)?;
    Ok(tx)
}

async fn exists(tx: &mut PgConnection, name: &str) -> Result<bool, StoreError> {
    let row = sqlx::query("SELECT to_regclass($1) IS NOT NULL AS there")
        .bind(name)
        .fetch_one(tx)
        .await
        .map_err(unavailable)?;
    row.try_get("there").map_err(unavailable)
}

/// The first id of a day.
fn first_id(day: i64) -> Uuid {
    let ms = u64::try_from(day.saturating_mul(DAY_MS)).unwrap_or(0);
    Uuid::from_u128(u128::from(ms) << 80)
}

/// Makes a day's partition and moves into it what the default partition has of that day; false if
/// it is there.
async fn create(connection: &mut PgConnection, table: Table, day: i64) -> Result<bool, StoreError> {
    let Table { name, key, storage } = table;
    let mut tx = begin(connection).await?;
    let row = sqlx::query("SELECT to_char(DATE '1970-01-01' + $1::integer, 'YYYYMMDD') AS date")
        .bind(day)
        .fetch_one(&mut *tx)
        .await
        .map_err(unavailable)?;
    let date: String = rows::get(&row, "date")?;
    let partition = format!("{name}_p{date}");
    if exists(&mut tx, &partition).await? {
        return Ok(false);
    }
    let (from, to) = (first_id(day), first_id(day + 1));
    if has_rows(&mut tx, table, day).await? {
        // A statement that was planned before the move would look for the rows where they were: it
        // must be over before, or wait for the table and be planned after.
        close(&mut tx, &format!("ONLY {name}")).await?;
    }
    close(&mut tx, &format!("{name}_default")).await?;
    // Attached only when it is filled: usually the table itself stays open to traffic meanwhile.
    let statements = format!(
        "CREATE TABLE {partition}
             (LIKE {name} INCLUDING DEFAULTS INCLUDING CONSTRAINTS INCLUDING STORAGE)
             WITH ({storage});
         WITH moved AS (
             DELETE FROM {name}_default WHERE {key} >= '{from}' AND {key} < '{to}' RETURNING *
         )
         INSERT INTO {partition} SELECT * FROM moved;
         ALTER TABLE {name} ATTACH PARTITION {partition} FOR VALUES FROM ('{from}') TO ('{to}');"
    );
    sqlx::raw_sql(AssertSqlSafe(statements)).execute(&mut *tx).await.map_err(unavailable)?;
    tx.commit().await.map_err(unavailable)?;
    Ok(true)
}

/// Whether the default partition holds rows of a day.
async fn has_rows(tx: &mut PgConnection, table: Table, day: i64) -> Result<bool, StoreError> {
    let Table { name, key, .. } = table;
    let row = sqlx::query(AssertSqlSafe(format!(
        "SELECT EXISTS (SELECT FROM {name}_default WHERE {key} >= $1 AND {key} < $2) AS found"
    )))
    .bind(first_id(day))
    .bind(first_id(day + 1))
    .fetch_one(tx)
    .await
    .map_err(unavailable)?;
    row.try_get("found").map_err(unavailable)
}

/// Closes tables to everybody else until the transaction ends.
async fn close(tx: &mut PgConnection, tables: &str) -> Result<(), StoreError> {
    let lock = format!("LOCK TABLE {tables} IN ACCESS EXCLUSIVE MODE");
    sqlx::raw_sql(AssertSqlSafe(lock)).execute(tx).await.map_err(unavailable)?;
    Ok(())
}

/// Drops the partitions of the days that ended before a time, if their jobs did so too.
async fn drop_before(
    connection: &mut PgConnection,
    oldest: i64,
    done: &mut Maintained,
) -> Result<(), StoreError> {
    let day = oldest.div_euclid(DAY_MS);
    let mut kept = Vec::new();
    for (partition, of) in partitions(connection, JOBS).await? {
        if of >= day {
            continue;
        }
        let fate = drop_finished(connection, &partition, of, oldest).await?;
        match fate {
            Fate::Dropped => done.dropped += 1,
            Fate::Unfinished => done.kept_unfinished += 1,
            Fate::Recent => done.kept_recent += 1,
        }
        if fate != Fate::Dropped {
            kept.push(of);
        }
    }
    for table in [RESULTS, ERRORS] {
        for (partition, of) in partitions(connection, table).await? {
            if of < day && !kept.contains(&of) {
                let mut tx = begin(connection).await?;
                drop_table(&mut tx, table, &partition).await?;
                tx.commit().await.map_err(unavailable)?;
                done.dropped += 1;
            }
        }
    }
    Ok(())
}

/// What became of a day's jobs.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Fate {
    Dropped,
    /// One is not over: they stay.
    Unfinished,
    /// One was not over at the time that counts: they stay.
    Recent,
}

/// Drops a day's partition of jobs if all were over before `oldest`.
async fn drop_finished(
    connection: &mut PgConnection,
    name: &str,
    day: i64,
    oldest: i64,
) -> Result<Fate, StoreError> {
    let mut tx = begin(connection).await?;
    if exists(&mut tx, name).await? {
        // Looked at before it is closed, so that one that must stay holds nobody up.
        if has_unfinished(&mut tx, name).await? {
            return Ok(Fate::Unfinished);
        }
        // Jobs that are all over get no further results: to look once, after that, is enough.
        if has_ended_since(&mut tx, day, oldest).await? {
            return Ok(Fate::Recent);
        }
        close(&mut tx, &format!("ONLY jobs, {name}")).await?;
        if has_unfinished(&mut tx, name).await? {
            return Ok(Fate::Unfinished);
        }
        drop_table(&mut tx, JOBS, name).await?;
    }
    tx.commit().await.map_err(unavailable)?;
    Ok(Fate::Dropped)
}

/// Whether a job of a day ended at that time or later. Reads the day's results without their texts,
/// which lie elsewhere.
async fn has_ended_since(tx: &mut PgConnection, day: i64, oldest: i64) -> Result<bool, StoreError> {
    let row = sqlx::query(
        "SELECT EXISTS (SELECT FROM results
                        WHERE job_id >= $1 AND job_id < $2 AND finished_at >= $3) AS found",
    )
    .bind(first_id(day))
    .bind(first_id(day + 1))
    .bind(oldest)
    .fetch_one(tx)
    .await
    .map_err(unavailable)?;
    row.try_get("found").map_err(unavailable)
}

async fn drop_table(tx: &mut PgConnection, table: Table, name: &str) -> Result<(), StoreError> {
    // The whole table first, as every statement locks it before its partitions.
    close(tx, &format!("ONLY {}", table.name)).await?;
    sqlx::raw_sql(AssertSqlSafe(format!("DROP TABLE IF EXISTS {name}")))
        .execute(tx)
        .await
        .map_err(unavailable)?;
    Ok(())
}

/// Whether a partition holds a job that is not over: one look into each partial index.
async fn has_unfinished(connection: &mut PgConnection, name: &str) -> Result<bool, StoreError> {
    let row = sqlx::query(AssertSqlSafe(format!(
        "SELECT EXISTS (SELECT FROM {name} WHERE state = 'queued')
             OR EXISTS (SELECT FROM {name} WHERE state = 'running')
             OR EXISTS (SELECT FROM {name} WHERE state IN ('scheduled', 'retrying')) AS found"
    )))
    .fetch_one(connection)
    .await
    .map_err(unavailable)?;
    row.try_get("found").map_err(unavailable)
}
