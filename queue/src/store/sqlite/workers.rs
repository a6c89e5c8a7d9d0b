//! Who lives: one row per process incarnation, written by its heartbeats.

use sqlx::{Row as _, SqliteConnection, SqlitePool, sqlite::SqliteRow};

use super::{
    classes::classes,
    job_queries::{queue, time},
    rows::{self, from_json, text, to_json},
    unavailable,
};
use crate::{
    job::{QueueName, Timestamp},
    store::{
        StoreError,
        operations::{Directive, Heartbeat, Integrity, Worker},
    },
};

pub(super) async fn heartbeat(
    tx: &mut SqliteConnection,
    heartbeat: &Heartbeat,
    now: Timestamp,
) -> Result<Directive, StoreError> {
    let row = sqlx::query(
        "INSERT INTO workers (owner, started_at, seen_at, heartbeat) VALUES (?1, ?2, ?2, ?3)
         ON CONFLICT (owner) DO UPDATE
         SET seen_at = excluded.seen_at, heartbeat = excluded.heartbeat
         RETURNING drain_requested",
    )
    .bind(&heartbeat.owner)
    .bind(now.0)
    .bind(to_json(heartbeat)?)
    .fetch_one(&mut *tx)
    .await
    .map_err(unavailable)?;
    let drain: bool = row.try_get("drain_requested").map_err(unavailable)?;
    let QueueName { model, format } = &heartbeat.queue;
    let row = sqlx::query(
        "SELECT paused, numerics_class, allowed_classes FROM queues
         WHERE model = ?1 AND format = ?2",
    )
    .bind(model)
    .bind(format)
    .fetch_optional(tx)
    .await
    .map_err(unavailable)?;
    let Some(row) = row else { return Ok(Directive { drain, paused: false }) };
    let withdrawn = classes(&row)?.must_drain(&heartbeat.metrics.numerics_class);
    let paused = row.try_get("paused").map_err(unavailable)?;
    Ok(Directive { drain: drain || withdrawn, paused })
}

pub(super) async fn list(pool: &SqlitePool, now: Timestamp) -> Result<Vec<Worker>, StoreError> {
    let found = sqlx::query("SELECT * FROM workers ORDER BY owner")
        .fetch_all(pool)
        .await
        .map_err(unavailable)?;
    let worker = |row: &SqliteRow| {
        Ok(Worker {
            heartbeat: from_json("heartbeat", &text(row, "heartbeat")?)?,
            started_at: time(row, "started_at")?,
            silent: now.since(time(row, "seen_at")?),
            drain_requested: row.try_get("drain_requested").map_err(unavailable)?,
        })
    };
    found.iter().map(worker).collect()
}

pub(super) async fn request_drain(pool: &SqlitePool, owner: &str) -> Result<bool, StoreError> {
    let done = sqlx::query("UPDATE workers SET drain_requested = 1 WHERE owner = ?1")
        .bind(owner)
        .execute(pool)
        .await
        .map_err(unavailable)?;
    Ok(done.rows_affected() == 1)
}

/// Forgets the worker of this name, or those that were heard of last before a time; what they counted
/// is added to the sums of those that are gone.
pub(super) async fn forget_where(
    tx: &mut SqliteConnection,
    owner: Option<&str>,
    seen_before: Option<Timestamp>,
) -> Result<(), StoreError> {
    let gone =
        sqlx::query("DELETE FROM workers WHERE owner = ?1 OR seen_at < ?2 RETURNING heartbeat")
            .bind(owner)
            .bind(seen_before.map(|at| at.0))
            .fetch_all(&mut *tx)
            .await
            .map_err(unavailable)?;
    for row in &gone {
        let heartbeat: Heartbeat = from_json("heartbeat", &text(row, "heartbeat")?)?;
        for (name, count) in heartbeat.metrics.integrity.named() {
            sqlx::query(
                "INSERT INTO integrity (name, count) VALUES (?1, ?2)
                 ON CONFLICT (name) DO UPDATE SET count = count + excluded.count",
            )
            .bind(name)
            .bind(i64::try_from(count).unwrap_or(i64::MAX))
            .execute(&mut *tx)
            .await
            .map_err(unavailable)?;
        }
    }
    Ok(())
}

/// What all counted, the living and the gone.
pub(super) async fn integrity(pool: &SqlitePool) -> Result<Integrity, StoreError> {
    let row = sqlx::query(
        "SELECT coalesce(json_group_object(name, count), '{}') AS integrity FROM integrity",
    )
    .fetch_one(pool)
    .await
    .map_err(unavailable)?;
    let mut sum: Integrity = from_json("integrity", &text(&row, "integrity")?)?;
    for worker in list(pool, Timestamp::default()).await? {
        sum.merge(&worker.heartbeat.metrics.integrity);
    }
    Ok(sum)
}

/// Which queues workers that were heard of since a time serve, and how many jobs they have room for.
pub(super) async fn serving(
    tx: &mut SqliteConnection,
    since: Timestamp,
) -> Result<Vec<(QueueName, u64, u64)>, StoreError> {
    let found = sqlx::query(
        "SELECT heartbeat ->> '$.queue.model' AS model, heartbeat ->> '$.queue.format' AS format,
                count(*) AS workers, sum(heartbeat ->> '$.slots') AS slots
         FROM workers WHERE seen_at >= ?1 GROUP BY 1, 2",
    )
    .bind(since.0)
    .fetch_all(tx)
    .await
    .map_err(unavailable)?;
    found
        .iter()
        .map(|row| {
            let (workers, slots) = (rows::count(row, "workers")?, rows::count(row, "slots")?);
            Ok((queue(row)?, u64::from(workers), u64::from(slots)))
        })
        .collect()
}
