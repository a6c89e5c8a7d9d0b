//! Numerics classes of queues: as in the servers' store.

use sqlx::{Row as _, SqliteConnection, sqlite::SqliteRow};

use super::{
    SqliteStore,
    rows::{from_json, text, to_json},
    unavailable,
};
use crate::{
    job::QueueName,
    store::{
        StoreError,
        classes::{ClassError, Classes, ResetClassError},
        operations::SILENT_ALIVE_MAX,
    },
};

/// What a queue's row says of them.
pub(super) fn classes(row: &SqliteRow) -> Result<Classes, StoreError> {
    Ok(Classes {
        registered: row.try_get("numerics_class").map_err(unavailable)?,
        allowed: from_json("allowed_classes", &text(row, "allowed_classes")?)?,
    })
}

pub(super) async fn register(
    store: &SqliteStore,
    queue: &QueueName,
    class: &str,
) -> Result<(), ClassError> {
    let row = sqlx::query(
        // Written even when it is known, since only what is written is returned.
        "INSERT INTO queues (model, format, numerics_class, registered_at)
         VALUES (?1, ?2, ?3, ?4)
         ON CONFLICT (model, format) DO UPDATE
         SET numerics_class = coalesce(numerics_class, excluded.numerics_class),
             registered_at = coalesce(registered_at, excluded.registered_at)
         RETURNING numerics_class, allowed_classes",
    )
    .bind(&queue.model)
    .bind(&queue.format)
    .bind(class)
    .bind(store.now().0)
    .fetch_one(&store.pool)
    .await
    .map_err(unavailable)?;
    classes(&row)?.admit(queue, class)
}

pub(super) async fn allow(
    store: &SqliteStore,
    queue: &QueueName,
    class: &str,
) -> Result<bool, StoreError> {
    change(store, queue, |classes| classes.allow(class)).await
}

pub(super) async fn withdraw(
    store: &SqliteStore,
    queue: &QueueName,
    class: &str,
) -> Result<bool, StoreError> {
    change(store, queue, |classes| Ok(classes.withdraw(class))).await
}

/// Reads a queue's classes, changes them and writes what is allowed then, in one transaction.
async fn change(
    store: &SqliteStore,
    queue: &QueueName,
    how: impl FnOnce(&mut Classes) -> Result<bool, StoreError>,
) -> Result<bool, StoreError> {
    let mut tx = store.begin().await?;
    let found = read(&mut tx, queue).await?;
    let mut classes = found.unwrap_or(Classes { registered: None, allowed: Vec::new() });
    let changed = how(&mut classes)?;
    sqlx::query(
        "INSERT INTO queues (model, format, allowed_classes) VALUES (?1, ?2, ?3)
         ON CONFLICT (model, format) DO UPDATE SET allowed_classes = excluded.allowed_classes",
    )
    .bind(&queue.model)
    .bind(&queue.format)
    .bind(to_json(&classes.allowed)?)
    .execute(&mut *tx)
    .await
    .map_err(unavailable)?;
    tx.commit().await.map_err(unavailable)?;
    Ok(changed)
}

async fn read(tx: &mut SqliteConnection, queue: &QueueName) -> Result<Option<Classes>, StoreError> {
    let row = sqlx::query(
        "SELECT numerics_class, allowed_classes FROM queues WHERE model = ?1 AND format = ?2",
    )
    .bind(&queue.model)
    .bind(&queue.format)
    .fetch_optional(tx)
    .await
    .map_err(unavailable)?;
    row.as_ref().map(classes).transpose()
}

pub(super) async fn reset(
    store: &SqliteStore,
    queue: &QueueName,
) -> Result<Option<String>, ResetClassError> {
    let mut tx = store.begin().await?;
    let alive = sqlx::query(
        "SELECT owner FROM workers WHERE seen_at >= ?3
         AND heartbeat ->> '$.queue.model' = ?1 AND heartbeat ->> '$.queue.format' = ?2
         ORDER BY owner",
    )
    .bind(&queue.model)
    .bind(&queue.format)
    .bind(store.now().before(SILENT_ALIVE_MAX).0)
    .fetch_all(&mut *tx)
    .await
    .map_err(unavailable)?;
    if !alive.is_empty() {
        let workers = alive.iter().map(|row| text(row, "owner")).collect::<Result<_, _>>()?;
        return Err(ResetClassError::Served { queue: queue.clone(), workers });
    }
    let had = read(&mut tx, queue).await?;
    sqlx::query(
        "UPDATE queues SET numerics_class = NULL, allowed_classes = '[]'
         WHERE model = ?1 AND format = ?2",
    )
    .bind(&queue.model)
    .bind(&queue.format)
    .execute(&mut *tx)
    .await
    .map_err(unavailable)?;
    tx.commit().await.map_err(unavailable)?;
    Ok(had.and_then(|classes| classes.registered))
}
