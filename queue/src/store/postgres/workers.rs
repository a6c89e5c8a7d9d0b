//! Who lives: one row per process incarnation, written by its heartbeats. What one counted is added
//! to the sums of those that are gone by the statement that forgets it: never twice.

use sqlx::{PgConnection, PgPool, postgres::PgRow};

use super::{classes::classes, rows, unavailable};
use crate::store::{
    StoreError,
    operations::{Directive, Heartbeat, Integrity, Worker, WorkerMetrics},
};

pub(super) async fn heartbeat(
    pool: &PgPool,
    heartbeat: &Heartbeat,
    now: Option<i64>,
) -> Result<Directive, StoreError> {
    let row = sqlx::query(
        "WITH beat AS (
             INSERT INTO workers (owner, model, format, host, pid, started_at, seen_at, running,
                                  slots, draining, tokens_per_s, vitals)
             SELECT $2, $3, $4, $5, $6, now, now, $7, $8, $9, $10, $11::text::jsonb
             FROM (SELECT store_now_ms($1) AS now) AS clock
             ON CONFLICT (owner) DO UPDATE
             SET seen_at = excluded.seen_at, running = excluded.running, slots = excluded.slots,
                 draining = excluded.draining, tokens_per_s = excluded.tokens_per_s,
                 vitals = excluded.vitals
             RETURNING drain_requested
         )
         SELECT drain_requested, coalesce(paused, false) AS paused, numerics_class,
                coalesce(allowed_classes, '{}') AS allowed_classes
         FROM beat LEFT JOIN queues ON queues.model = $3 AND queues.format = $4",
    )
    .bind(now)
    .bind(&heartbeat.owner)
    .bind(&heartbeat.queue.model)
    .bind(&heartbeat.queue.format)
    .bind(&heartbeat.host)
    .bind(i64::from(heartbeat.pid))
    .bind(i64::from(heartbeat.running))
    .bind(i64::from(heartbeat.slots))
    .bind(heartbeat.draining)
    .bind(heartbeat.tokens_per_s)
    .bind(serde_json::to_string(&heartbeat.metrics).expect("numbers and texts"))
    .fetch_one(pool)
    .await
    .map_err(unavailable)?;
    let withdrawn = classes(&row)?.must_drain(&heartbeat.metrics.numerics_class);
    let drain = rows::get::<bool>(&row, "drain_requested")? || withdrawn;
    Ok(Directive { drain, paused: rows::get(&row, "paused")? })
}

pub(super) async fn list(pool: &PgPool, now: Option<i64>) -> Result<Vec<Worker>, StoreError> {
    let found = sqlx::query(
        "SELECT owner, model, format, host, pid, started_at, store_now_ms($1) - seen_at AS silent,
                running, slots, draining, drain_requested, tokens_per_s, vitals::text
         FROM workers ORDER BY owner",
    )
    .bind(now)
    .fetch_all(pool)
    .await
    .map_err(unavailable)?;
    found.iter().map(worker).collect()
}

fn worker(row: &PgRow) -> Result<Worker, StoreError> {
    Ok(Worker {
        heartbeat: Heartbeat {
            owner: rows::get(row, "owner")?,
            queue: rows::queue(row)?,
            host: rows::get(row, "host")?,
            pid: rows::small(row, "pid")?,
            running: rows::small(row, "running")?,
            slots: rows::small(row, "slots")?,
            draining: rows::get(row, "draining")?,
            tokens_per_s: rows::get(row, "tokens_per_s")?,
            metrics: measured(row)?,
        },
        started_at: rows::time(row, "started_at")?,
        silent: rows::duration(rows::integer(row, "silent")?),
        drain_requested: rows::get(row, "drain_requested")?,
    })
}

fn measured(row: &PgRow) -> Result<WorkerMetrics, StoreError> {
    let text: Option<&str> = rows::get(row, "vitals")?;
    text.map_or_else(
        || Ok(WorkerMetrics::default()),
        |text| serde_json::from_str(text).map_err(|error| rows::damaged("vitals", error)),
    )
}

pub(super) async fn request_drain(pool: &PgPool, owner: &str) -> Result<bool, StoreError> {
    let done = sqlx::query("UPDATE workers SET drain_requested = true WHERE owner = $1")
        .bind(owner)
        .execute(pool)
        .await
        .map_err(unavailable)?;
    Ok(done.rows_affected() == 1)
}

pub(super) async fn forget(pool: &PgPool, owner: &str) -> Result<(), StoreError> {
    let mut connection = pool.acquire().await.map_err(unavailable)?;
    forget_where(&mut connection, Some(owner), None).await
}

/// Forgets the worker of this name, or those that were heard of last before a time.
pub(super) async fn forget_where(
    connection: &mut PgConnection,
    owner: Option<&str>,
    seen_before: Option<i64>,
) -> Result<(), StoreError> {
    sqlx::query(
        "WITH gone AS (
             DELETE FROM workers WHERE owner = $1 OR seen_at < $2 RETURNING vitals
         )
         INSERT INTO integrity (name, count)
         SELECT name, sum(value::bigint) FROM gone, jsonb_each_text(vitals -> 'integrity')
                AS counted (name, value)
         GROUP BY name
         ON CONFLICT (name) DO UPDATE SET count = integrity.count + excluded.count",
    )
    .bind(owner)
    .bind(seen_before)
    .execute(connection)
    .await
    .map_err(unavailable)?;
    Ok(())
}

/// What all counted, the living and the gone.
pub(super) async fn integrity(pool: &PgPool) -> Result<Integrity, StoreError> {
    let row = sqlx::query(
        "SELECT coalesce(jsonb_object_agg(name, count), '{}')::text AS integrity FROM (
             SELECT name, sum(count)::bigint AS count FROM (
                 SELECT name, count FROM integrity
                 UNION ALL
                 SELECT name, value::bigint FROM workers, jsonb_each_text(vitals -> 'integrity')
                        AS counted (name, value)
             ) AS counts GROUP BY name
         ) AS sums",
    )
    .fetch_one(pool)
    .await
    .map_err(unavailable)?;
    serde_json::from_str(rows::get(&row, "integrity")?)
        .map_err(|error| rows::damaged("integrity", error))
}
