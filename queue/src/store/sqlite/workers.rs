//! Workers: one row per process incarnation.

use async_trait::async_trait;

use super::{
    SqliteStore,
    calls::{Connection, Row, query},
    classes::classes,
    rows,
};
use crate::{
    job::{QueueName, Timestamp},
    store::{
        Serving, StoreError,
        workers::{Directive, Heartbeat, Integrity, Leadership, Worker, Workers},
    },
};

#[async_trait]
impl Workers for SqliteStore {
    async fn heartbeat(&self, heartbeat: &Heartbeat) -> Result<Directive, StoreError> {
        let beat = query(
            "INSERT INTO workers (owner, started_at, seen_at, heartbeat) VALUES ($2, $1, $1, $3)
             ON CONFLICT (owner) DO UPDATE
             SET seen_at = excluded.seen_at, heartbeat = excluded.heartbeat
             RETURNING drain_requested",
        );
        let beat = beat.bind(self.clock_parameter()).bind(&heartbeat.owner);
        let row = self.fetch_one(beat.bind(rows::to_json(heartbeat))).await?;
        let drain: bool = rows::get(&row, "drain_requested")?;
        let QueueName { model, format } = &heartbeat.queue;
        let found = query(
            "SELECT paused, numerics_class, allowed_classes FROM queues
             WHERE model = $1 AND format = $2",
        );
        let row = self.fetch_optional(found.bind(model).bind(format)).await?;
        // One process serves the file.
        let leads = if heartbeat.draining { Leadership::default() } else { Leadership::ALL };
        let Some(row) = row else { return Ok(Directive { drain, paused: false, leads }) };
        let is_withdrawn = classes(&row)?.must_drain(&heartbeat.metrics.numerics_class);
        let paused = rows::get(&row, "paused")?;
        Ok(Directive { drain: drain || is_withdrawn, paused, leads })
    }

    async fn workers(&self) -> Result<Vec<Worker>, StoreError> {
        let now = Timestamp(self.clock_parameter());
        let worker = |row: &Row| {
            Ok(Worker {
                heartbeat: rows::document(row, "heartbeat")?,
                started_at: rows::time(row, "started_at")?,
                silent: now.since(rows::time(row, "seen_at")?),
                drain_requested: rows::get(row, "drain_requested")?,
            })
        };
        let found = query("SELECT * FROM workers ORDER BY owner");
        self.fetch_all(found).await?.iter().map(worker).collect()
    }

    async fn serving(&self, queue: &QueueName) -> Result<Serving, StoreError> {
        let found = query(
            "SELECT $1 AS now, count(*) AS workers,
                    count(*) FILTER (WHERE heartbeat ->> '$.measured.device' LIKE 'cuda%')
                        AS gpu_workers,
                    coalesce(sum(slots), 0) AS slots, coalesce(sum(running), 0) AS running,
                    coalesce(sum(slots) FILTER (WHERE rate IS NOT NULL), 0) AS measured_slots,
                    sum(rate) FILTER (WHERE slots > 0) AS rate,
                    coalesce(sum(heartbeat ->> '$.measured.kv_blocks_used'), 0) AS blocks_used,
                    coalesce(sum(heartbeat ->> '$.measured.kv_blocks_total'), 0) AS blocks_total
             FROM (SELECT heartbeat, heartbeat ->> '$.slots' AS slots,
                          heartbeat ->> '$.running' AS running,
                          CAST(heartbeat ->> '$.measured.drain_tokens_per_s' AS REAL) AS rate
                   FROM workers WHERE heartbeat ->> '$.queue.model' = $2
                     AND heartbeat ->> '$.queue.format' = $3 AND NOT heartbeat ->> '$.draining'
                     AND seen_at >= $1 - $4)",
        );
        let found = found.bind(self.clock_parameter()).bind(&queue.model).bind(&queue.format);
        let found = found.bind(rows::milliseconds(Worker::SILENT_MAX));
        rows::serving(&self.fetch_one(found).await?)
    }

    async fn request_drain(&self, owner: &str) -> Result<bool, StoreError> {
        let request = query("UPDATE workers SET drain_requested = 1 WHERE owner = $1");
        Ok(self.execute(request.bind(owner)).await? == 1)
    }

    async fn forget_worker(&self, owner: &str) -> Result<(), StoreError> {
        let mut tx = self.begin().await?;
        forget(&mut tx, Some(owner), None).await?;
        Ok(tx.commit().await?)
    }

    async fn integrity(&self) -> Result<Integrity, StoreError> {
        let sums = query(
            "SELECT coalesce(json_group_object(name, count), '{}') AS integrity FROM integrity",
        );
        let mut sum: Integrity = rows::document(&self.fetch_one(sums).await?, "integrity")?;
        for worker in self.workers().await? {
            sum.merge(&worker.heartbeat.metrics.integrity);
        }
        Ok(sum)
    }
}

/// Deletes the worker of this name, or those with a last heartbeat before a time, and adds their fault
/// counters to the totals.
pub(super) async fn forget(
    tx: &mut Connection,
    owner: Option<&str>,
    seen_before: Option<i64>,
) -> Result<(), StoreError> {
    let gone = query("DELETE FROM workers WHERE owner = $1 OR seen_at < $2 RETURNING heartbeat")
        .bind(owner)
        .bind(seen_before)
        .fetch_all(&mut *tx)
        .await?;
    for row in &gone {
        let heartbeat: Heartbeat = rows::document(row, "heartbeat")?;
        for (name, count) in heartbeat.metrics.integrity.named() {
            query(
                "INSERT INTO integrity (name, count) VALUES ($1, $2)
                 ON CONFLICT (name) DO UPDATE SET count = count + excluded.count",
            )
            .bind(name)
            .bind(rows::stored(count))
            .execute(&mut *tx)
            .await?;
        }
    }
    Ok(())
}

/// Returns the queues with workers that sent a heartbeat since a time, each with the number of its
/// workers and of their slots.
pub(super) async fn serving(
    tx: &mut Connection,
    since: i64,
) -> Result<Vec<(QueueName, u64, u64)>, StoreError> {
    let found = query(
        "SELECT heartbeat ->> '$.queue.model' AS model, heartbeat ->> '$.queue.format' AS format,
                count(*) AS workers, sum(heartbeat ->> '$.slots') AS slots
         FROM workers WHERE seen_at >= $1 GROUP BY 1, 2",
    )
    .bind(since)
    .fetch_all(tx)
    .await?;
    found
        .iter()
        .map(|row| {
            Ok((rows::queue(row)?, rows::count(row, "workers")?, rows::count(row, "slots")?))
        })
        .collect()
}
