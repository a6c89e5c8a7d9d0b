//! Daily partitions of the big tables: created ahead, dropped whole when they are past the retention.
//!
//! A day's partition holds the ids of that day (a UUIDv7 begins with its milliseconds). Ids of a day
//! without a partition go to the default partition until the next maintenance creates it and moves them.
//! Open jobs are in no partition. A job that ends when the partition of its day was dropped goes to the
//! default partition, and its day gets a partition again.
//! A partition of jobs is dropped when every job in it finished longer ago than the database's retention
//! (`retention_ms` in `settings`: one value for all processes); the partitions of results and errors are
//! dropped after it.
//!
//! Each step is a transaction of its own under one advisory lock, and checks again under the lock:
//! several processes may maintain at once. Steps wait only briefly for the tables and fail rather than
//! block the traffic behind them; the next maintenance tries again.

use async_trait::async_trait;
use sqlx::{AssertSqlSafe, Connection as _, PgConnection, PgTransaction};
use uuid::Uuid;

use super::{
    PostgresStore,
    calls::query,
    claims, history, idempotency,
    rows::{self, milliseconds},
    settings, tenants, workers,
};
use crate::{
    job::{JobId, Tenant},
    store::{
        StoreError,
        maintenance::{ErasedJobs, Maintained, Maintenance},
        workers::SILENT_KEPT,
    },
};

/// Days after today that have a partition.
const DAYS_AHEAD: i64 = 3;
/// The first valid day: 2020-01-01. An earlier id is not a UUIDv7.
const DAY_FIRST: i64 = 18_262;
const DAY_MS: i64 = 24 * 60 * 60 * 1000;
/// Advisory lock of processes that change partitions; an arbitrary number.
const LOCK: i64 = 0x7472_6974_6d69_6c6c;
/// Longest wait for a table: other statements wait behind this one.
const TABLE_WAIT: &str = "SET LOCAL lock_timeout = '50ms'";

/// A partitioned table.
#[derive(Clone, Copy)]
struct Table {
    name: &'static str,
    /// Column of the job's id.
    key: &'static str,
    /// Storage parameters: rows of jobs leave room for their updates.
    storage: &'static str,
}

const JOBS: Table = Table {
    name: "jobs",
    key: "id",
    storage: "fillfactor = 80, autovacuum_vacuum_scale_factor = 0.05",
};
const RESULTS: Table = Table { name: "results", key: "job_id", storage: "fillfactor = 100" };
const ERRORS: Table = Table { name: "attempt_errors", key: "job_id", storage: "fillfactor = 100" };

#[async_trait]
impl Maintenance for PostgresStore {
    async fn maintain(&self) -> Result<Maintained, StoreError> {
        // The first maintenance after a long pause may drop many partitions.
        self.without_limit(maintain(self)).await
    }

    async fn erase_jobs(&self, tenant: &Tenant) -> Result<ErasedJobs, StoreError> {
        tenants::erase_jobs(self, tenant).await
    }

    async fn delete_jobs(&self, ids: &[JobId]) -> Result<u64, StoreError> {
        claims::delete(self, ids).await
    }
}

async fn maintain(store: &PostgresStore) -> Result<Maintained, StoreError> {
    let mut connection = store.acquire().await?;
    let done = maintain_on(&mut connection, store.clock_parameter()).await;
    store.release(connection, done)
}

async fn maintain_on(
    connection: &mut PgConnection,
    given: Option<i64>,
) -> Result<Maintained, StoreError> {
    let retention = settings::retention(connection).await?;
    let created = create_ahead(connection, given).await?;
    let mut done = Maintained { created, ..Maintained::default() };
    let now = now(connection, given).await?;
    let oldest = now.saturating_sub(milliseconds(retention));
    drop_before(connection, oldest, &mut done).await?;
    idempotency::forget(connection, oldest).await?;
    let silent_since = now.saturating_sub(milliseconds(SILENT_KEPT));
    workers::forget(connection, None, Some(silent_since)).await?;
    workers::forget_leases(connection, silent_since).await?;
    history::sweep(connection, now).await?;
    Ok(done)
}

async fn now(connection: &mut PgConnection, given: Option<i64>) -> Result<i64, StoreError> {
    let now = query("SELECT store_now_ms($1) AS now").bind(given);
    rows::integer(&now.fetch_one(connection).await?, "now")
}

/// Creates the partitions of today and the coming days, and of every day with ids in a default
/// partition; returns how many.
pub(super) async fn create_ahead(
    connection: &mut PgConnection,
    given: Option<i64>,
) -> Result<u32, StoreError> {
    let today = now(&mut *connection, given).await?.div_euclid(DAY_MS);
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
    let mut days: Vec<i64> = sqlx::query_scalar(AssertSqlSafe(format!(
        "SELECT DISTINCT ('x' || left(replace({key}::text, '-', ''), 12))::bit(48)::bigint / $1
                AS day
         FROM {name}_default",
    )))
    .bind(DAY_MS)
    .fetch_all(connection)
    .await?;
    days.retain(|day| (DAY_FIRST..=last).contains(day));
    Ok(days)
}

/// Returns the table's daily partitions and their days.
async fn partitions(
    connection: &mut PgConnection,
    table: Table,
) -> Result<Vec<(String, i64)>, StoreError> {
    let found = query(
        "SELECT relname::text AS name,
                (to_date(right(relname, 8), 'YYYYMMDD') - DATE '1970-01-01')::bigint AS day
         FROM pg_inherits JOIN pg_class ON pg_class.oid = inhrelid
         WHERE inhparent = $1::regclass AND relname ~ '_p[0-9]{8}$' ORDER BY day",
    )
    .bind(table.name)
    .fetch_all(connection)
    .await?;
    found.iter().map(|row| Ok((rows::get(row, "name")?, rows::integer(row, "day")?))).collect()
}

/// Begins a transaction that holds the lock of processes that change partitions.
async fn begin(connection: &mut PgConnection) -> Result<PgTransaction<'_>, StoreError> {
    let mut tx = connection.begin().await?;
    query("SELECT pg_advisory_xact_lock($1)").bind(LOCK).execute(&mut *tx).await?;
    query(TABLE_WAIT).execute(&mut *tx).await?;
    Ok(tx)
}

async fn exists(tx: &mut PgConnection, name: &str) -> Result<bool, StoreError> {
    let row = query("SELECT to_regclass($1) IS NOT NULL AS there").bind(name).fetch_one(tx).await?;
    rows::get(&row, "there")
}

/// Returns the first id of a day.
fn first_id(day: i64) -> Uuid {
    let ms = u64::try_from(day.saturating_mul(DAY_MS)).unwrap_or(0);
    Uuid::from_u128(u128::from(ms) << 80)
}

/// Creates a day's partition and moves that day's rows from the default partition into it; returns
/// false if the partition exists.
async fn create(connection: &mut PgConnection, table: Table, day: i64) -> Result<bool, StoreError> {
    let Table { name, key, storage } = table;
    let mut tx = begin(connection).await?;
    let row = query("SELECT to_char(DATE '1970-01-01' + $1::integer, 'YYYYMMDD') AS date")
        .bind(day)
        .fetch_one(&mut *tx)
        .await?;
    let date: String = rows::get(&row, "date")?;
    let partition = format!("{name}_p{date}");
    if exists(&mut tx, &partition).await? {
        return Ok(false);
    }
    let (from, to) = (first_id(day), first_id(day + 1));
    if has_rows(&mut tx, table, day).await? {
        // A statement planned before the move would look for the rows in the default partition: it
        // must end before, or wait for the table and be planned after.
        lock(&mut tx, &format!("ONLY {name}")).await?;
    }
    lock(&mut tx, &format!("{name}_default")).await?;
    // The partition is attached only when it is filled: until then the table itself usually stays
    // open to traffic.
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
    sqlx::raw_sql(AssertSqlSafe(statements)).execute(&mut *tx).await?;
    tx.commit().await?;
    Ok(true)
}

/// Returns whether the default partition holds rows of a day.
async fn has_rows(tx: &mut PgConnection, table: Table, day: i64) -> Result<bool, StoreError> {
    let Table { name, key, .. } = table;
    let row = query(AssertSqlSafe(format!(
        "SELECT EXISTS (SELECT FROM {name}_default WHERE {key} >= $1 AND {key} < $2) AS found"
    )))
    .bind(first_id(day))
    .bind(first_id(day + 1))
    .fetch_one(tx)
    .await?;
    rows::get(&row, "found")
}

/// Locks tables against all other transactions until this one ends.
async fn lock(tx: &mut PgConnection, tables: &str) -> Result<(), StoreError> {
    let lock = format!("LOCK TABLE {tables} IN ACCESS EXCLUSIVE MODE");
    sqlx::raw_sql(AssertSqlSafe(lock)).execute(tx).await?;
    Ok(())
}

/// Drops the partitions of days before a time if their jobs also finished before it.
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
        if drop_finished(connection, &partition, of, oldest).await? {
            done.dropped += 1;
        } else {
            done.kept_recent += 1;
            kept.push(of);
        }
    }
    for table in [RESULTS, ERRORS] {
        for (partition, of) in partitions(connection, table).await? {
            if of >= day || kept.contains(&of) {
                continue;
            }
            let mut tx = begin(connection).await?;
            lock(&mut tx, &format!("ONLY {}", table.name)).await?;
            // A job that was open until now may have ended since its day's partition was dropped.
            if has_finished_since(&mut tx, of, oldest).await? {
                kept.push(of);
                continue;
            }
            drop_table(&mut tx, table, &partition).await?;
            tx.commit().await?;
            done.dropped += 1;
        }
    }
    Ok(())
}

/// Drops a day's partition of jobs if all finished before `oldest`; returns whether they did.
async fn drop_finished(
    connection: &mut PgConnection,
    name: &str,
    day: i64,
    oldest: i64,
) -> Result<bool, StoreError> {
    let mut tx = begin(connection).await?;
    if exists(&mut tx, name).await? {
        // Checked before the lock, so that a partition that is kept blocks no traffic. Finished jobs get no further
        // results: one check is enough.
        if has_finished_since(&mut tx, day, oldest).await? {
            return Ok(false);
        }
        drop_table(&mut tx, JOBS, name).await?;
    }
    tx.commit().await?;
    Ok(true)
}

/// Returns whether a job of a day finished at that time or later. Reads the day's results without
/// their texts, which are stored apart.
async fn has_finished_since(
    tx: &mut PgConnection,
    day: i64,
    oldest: i64,
) -> Result<bool, StoreError> {
    let row = query(
        "SELECT EXISTS (SELECT FROM results
                        WHERE job_id >= $1 AND job_id < $2 AND finished_at >= $3) AS found",
    )
    .bind(first_id(day))
    .bind(first_id(day + 1))
    .bind(oldest)
    .fetch_one(tx)
    .await?;
    rows::get(&row, "found")
}

async fn drop_table(tx: &mut PgConnection, table: Table, name: &str) -> Result<(), StoreError> {
    // Locks the table first, since every statement locks it before its partitions.
    lock(tx, &format!("ONLY {}", table.name)).await?;
    sqlx::raw_sql(AssertSqlSafe(format!("DROP TABLE IF EXISTS {name}"))).execute(tx).await?;
    Ok(())
}
