//! Jobs that were queued and may be missing from the dispatcher.
//!
//! A statement that queues jobs leaves one row with their ids for each queue. The producer of new jobs
//! remembers that the dispatcher has them, and deletes the row with its next submission. The leader of the
//! queue enqueues what is left after a few seconds: jobs of a producer that died, or that met a full or
//! absent dispatcher; and once more those that lapsed, became due or were handed back, since the entry
//! that the dispatcher had at that moment may have been the one that a worker acknowledged.

use std::collections::HashMap;

use parking_lot::Mutex;
use uuid::Uuid;

use super::{PostgresStore, calls::query, rows};
use crate::{
    dispatch::Entry,
    job::{JobId, QueueName},
    store::{StoreError, Unannounced},
};

/// Time that a producer has to enqueue what it submitted.
const DUE_AFTER_MS: i64 = 5000;
/// Rows read at a time; each has the jobs of one call.
const ROWS_MAX: i64 = 32;
/// Rows that a producer remembers to delete; others are left to the leader.
const REMEMBERED_MAX: usize = 256;

/// A further CTE that announces the jobs of another one, with the columns `id`, `model` and `format`. Needs a
/// CTE `clock`.
macro_rules! announce_again {
    ($queued:literal) => {
        concat!(
            ", announced AS (
    INSERT INTO announcements (first, again, at, model, format, jobs)
    SELECT (array_agg(id ORDER BY id))[1], true, now, model, format, array_agg(id ORDER BY id)
    FROM ",
            $queued,
            ", clock GROUP BY model, format, now
    ON CONFLICT (first, again, at)
        DO UPDATE SET jobs = announcements.jobs || excluded.jobs
)"
        )
    };
}
pub(super) use announce_again;

/// Rows that this process may delete.
#[derive(Debug, Default)]
pub(super) struct Announced(Mutex<Vec<Uuid>>);

impl Announced {
    /// Returns the rows to delete now.
    pub fn take(&self) -> Vec<Uuid> {
        std::mem::take(&mut self.0.lock())
    }
}

/// Remembers that the dispatcher has the jobs of one submission.
pub(super) fn announced(store: &PostgresStore, entries: &[Entry]) {
    let mut first: HashMap<&QueueName, JobId> = HashMap::new();
    for entry in entries {
        first.entry(&entry.queue).and_modify(|id| *id = entry.id.min(*id)).or_insert(entry.id);
    }
    let mut remembered = store.announced.0.lock();
    if remembered.len() < REMEMBERED_MAX {
        remembered.extend(first.into_values().map(Uuid::from));
    }
}

/// Returns the jobs of a queue that are still queued, of the oldest rows.
pub(super) async fn unannounced(
    store: &PostgresStore,
    queue: &QueueName,
) -> Result<Unannounced, StoreError> {
    let due = query(
        "SELECT first, again, at, jobs FROM announcements
         WHERE model = $2 AND format = $3 AND at <= store_now_ms($1) - $4 ORDER BY at LIMIT $5",
    )
    .bind(store.clock_parameter())
    .bind(&queue.model)
    .bind(&queue.format)
    .bind(DUE_AFTER_MS)
    .bind(ROWS_MAX);
    let due = store.fetch_all(due).await?;
    let (mut rows_read, mut ids) = (Vec::with_capacity(due.len()), Vec::<Uuid>::new());
    for row in &due {
        let first: Uuid = rows::get(row, "first")?;
        rows_read.push((first.into(), rows::get(row, "again")?, rows::time(row, "at")?));
        ids.extend(rows::get::<Vec<Uuid>>(row, "jobs")?);
    }
    let mut entries = Vec::new();
    if !ids.is_empty() {
        let queued = query(
            "SELECT id, tenant, priority, cost, shard_key, expires_at, tier FROM open_jobs
             WHERE id = ANY($1) AND state = 'queued' ORDER BY id",
        );
        for row in &store.fetch_all(queued.bind(ids)).await? {
            entries.push(rows::entry(row, queue.clone())?);
        }
    }
    Ok(Unannounced { entries, more: due.len() >= ROWS_MAX as usize, rows: rows_read })
}

/// Deletes the rows: the dispatcher has their jobs.
pub(super) async fn forget(
    store: &PostgresStore,
    unannounced: &Unannounced,
) -> Result<(), StoreError> {
    let rows = &unannounced.rows;
    let delete = query(
        "DELETE FROM announcements
         USING UNNEST($1::uuid[], $2::boolean[], $3::bigint[]) AS done (first, again, at)
         WHERE announcements.first = ANY($1) AND announcements.first = done.first
           AND announcements.again = done.again AND announcements.at = done.at",
    )
    .bind(rows.iter().map(|(first, _, _)| Uuid::from(*first)).collect::<Vec<_>>())
    .bind(rows.iter().map(|(_, again, _)| *again).collect::<Vec<_>>())
    .bind(rows.iter().map(|(_, _, at)| at.0).collect::<Vec<_>>());
    store.execute(delete).await.map(drop)
}
