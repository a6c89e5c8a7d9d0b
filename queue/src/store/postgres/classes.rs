//! Numerics classes of queues.

use sqlx::{PgConnection, PgPool, postgres::PgRow};

use super::{PostgresStore, milliseconds, rows, unavailable};
use crate::{
    job::QueueName,
    store::{
        StoreError,
        classes::{ClassError, Classes, ResetClassError},
        operations::SILENT_ALIVE_MAX,
    },
};

/// What a queue's row says of them.
pub(super) fn classes(row: &PgRow) -> Result<Classes, StoreError> {
    let registered = rows::get(row, "numerics_class")?;
    Ok(Classes { registered, allowed: rows::get(row, "allowed_classes")? })
}

pub(super) async fn register(
    store: &PostgresStore,
    queue: &QueueName,
    class: &str,
) -> Result<(), ClassError> {
    let row = sqlx::query(
        // Written even when it is known, since only what is written is returned.
        "INSERT INTO queues (model, format, numerics_class, registered_at)
         VALUES ($2, $3, $4, store_now_ms($1))
         ON CONFLICT (model, format) DO UPDATE
         SET numerics_class = coalesce(queues.numerics_class, excluded.numerics_class),
             registered_at = coalesce(queues.registered_at, excluded.registered_at)
         RETURNING numerics_class, allowed_classes",
    )
    .bind(store.given_now())
    .bind(&queue.model)
    .bind(&queue.format)
    .bind(class)
    .fetch_one(&store.pool)
    .await
    .map_err(unavailable)?;
    classes(&row)?.admit(queue, class)
}

pub(super) async fn allow(
    store: &PostgresStore,
    queue: &QueueName,
    class: &str,
) -> Result<bool, StoreError> {
    change(&store.pool, queue, |classes| classes.allow(class)).await
}

pub(super) async fn withdraw(
    store: &PostgresStore,
    queue: &QueueName,
    class: &str,
) -> Result<bool, StoreError> {
    change(&store.pool, queue, |classes| Ok(classes.withdraw(class))).await
}

/// Reads a queue's classes, changes them and writes what is allowed then, while nobody else does.
async fn change(
    pool: &PgPool,
    queue: &QueueName,
    how: impl FnOnce(&mut Classes) -> Result<bool, StoreError>,
) -> Result<bool, StoreError> {
    let mut tx = pool.begin().await.map_err(unavailable)?;
    let mut classes = locked(&mut tx, queue).await?;
    let changed = how(&mut classes)?;
    sqlx::query("UPDATE queues SET allowed_classes = $3 WHERE model = $1 AND format = $2")
        .bind(&queue.model)
        .bind(&queue.format)
        .bind(&classes.allowed)
        .execute(&mut *tx)
        .await
        .map_err(unavailable)?;
    tx.commit().await.map_err(unavailable)?;
    Ok(changed)
}

/// The classes of a queue, whose row is made if need be and held until the transaction ends.
async fn locked(tx: &mut PgConnection, queue: &QueueName) -> Result<Classes, StoreError> {
    sqlx::query("INSERT INTO queues (model, format) VALUES ($1, $2) ON CONFLICT DO NOTHING")
        .bind(&queue.model)
        .bind(&queue.format)
        .execute(&mut *tx)
        .await
        .map_err(unavailable)?;
    let row = sqlx::query(
        "SELECT numerics_class, allowed_classes FROM queues WHERE model = $1 AND format = $2
         FOR UPDATE",
    )
    .bind(&queue.model)
    .bind(&queue.format)
    .fetch_one(tx)
    .await
    .map_err(unavailable)?;
    classes(&row)
}

pub(super) async fn reset(
    store: &PostgresStore,
    queue: &QueueName,
) -> Result<Option<String>, ResetClassError> {
    // One statement: a worker's heartbeat comes before or after it, not in between.
    let row = sqlx::query(
        "WITH alive AS (
             SELECT owner FROM workers
             WHERE model = $2 AND format = $3 AND seen_at >= store_now_ms($1) - $4
         ), had AS (
             SELECT numerics_class FROM queues WHERE model = $2 AND format = $3
         ), reset AS (
             UPDATE queues SET numerics_class = NULL, allowed_classes = '{}'
             WHERE model = $2 AND format = $3 AND NOT EXISTS (SELECT FROM alive)
         )
         SELECT (SELECT numerics_class FROM had) AS numerics_class,
                ARRAY(SELECT owner FROM alive ORDER BY owner) AS workers",
    )
    .bind(store.given_now())
    .bind(&queue.model)
    .bind(&queue.format)
    .bind(milliseconds(SILENT_ALIVE_MAX))
    .fetch_one(&store.pool)
    .await
    .map_err(unavailable)?;
    let workers: Vec<String> = rows::get(&row, "workers")?;
    if workers.is_empty() {
        return Ok(rows::get(&row, "numerics_class")?);
    }
    Err(ResetClassError::Served { queue: queue.clone(), workers })
}
