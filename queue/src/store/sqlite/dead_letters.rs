//! Jobs that failed for good: read, submitted again, or deleted.

use sqlx::{Row as _, SqliteConnection};

use super::{SqliteStore, claims, rows, unavailable};
use crate::{
    job::{Job, JobId, QueueName},
    store::{
        Store as _, StoreError,
        operations::{DeadLetter, Pace, Replay},
    },
};

pub(super) async fn list(
    store: &SqliteStore,
    queue: &QueueName,
    limit: u32,
    after: Option<JobId>,
) -> Result<Vec<DeadLetter>, StoreError> {
    let found = sqlx::query(
        "SELECT id, replay_of FROM jobs
         WHERE model = ?1 AND format = ?2 AND state = 'failed' AND id > ?3 ORDER BY id LIMIT ?4",
    )
    .bind(&queue.model)
    .bind(&queue.format)
    .bind(after.map_or(Vec::new(), |id| id.as_bytes().to_vec()))
    .bind(limit)
    .fetch_all(&store.pool)
    .await
    .map_err(unavailable)?;
    let mut letters = Vec::with_capacity(found.len());
    for row in &found {
        let replay_of: Option<Vec<u8>> = row.try_get("replay_of").map_err(unavailable)?;
        let replay_of = replay_of.and_then(|bytes| JobId::from_bytes(&bytes));
        let record = store.job(rows::id(row, "id")?).await?;
        letters.extend(record.map(|record| DeadLetter { record, replay_of }));
    }
    Ok(letters)
}

pub(super) async fn replay(
    store: &SqliteStore,
    ids: &[JobId],
    pace: Option<Pace>,
) -> Result<Vec<Replay>, StoreError> {
    let mut tx = store.begin().await?;
    let dead = sqlx::query(
        "SELECT id, job FROM jobs
         WHERE id IN (SELECT unhex(value) FROM json_each(?1)) AND state = 'failed' ORDER BY id",
    )
    .bind(rows::ids_json(ids))
    .fetch_all(&mut *tx)
    .await
    .map_err(unavailable)?;
    let mut replays = Vec::with_capacity(dead.len());
    for row in &dead {
        let job: Job = match rows::from_json("job", &rows::text(row, "job")?) {
            Ok(job) => job,
            // It stays dead; the others are replayed.
            Err(error) => {
                tracing::warn!(job = %rows::id(row, "id")?, %error, "not replayed");
                continue;
            }
        };
        let run_at = pace.map(|pace| pace.due(replays.len()));
        let job = Job { id: JobId::generate(), run_at, expires_at: None, ..job };
        replays.push(Replay { replay_of: rows::id(row, "id")?, job });
    }
    let (origins, jobs): (Vec<JobId>, Vec<Job>) =
        replays.iter().map(|replay| (replay.replay_of, replay.job.clone())).unzip();
    claims::insert_jobs(&mut tx, &jobs, Some(&origins), store.now()).await?;
    tx.commit().await.map_err(unavailable)?;
    Ok(replays)
}

/// Results and errors go with their jobs.
pub(super) async fn purge(tx: &mut SqliteConnection, ids: &[JobId]) -> Result<u64, StoreError> {
    let done = sqlx::query(
        "DELETE FROM jobs
         WHERE id IN (SELECT unhex(value) FROM json_each(?1)) AND state = 'failed'",
    )
    .bind(rows::ids_json(ids))
    .execute(tx)
    .await
    .map_err(unavailable)?;
    Ok(done.rows_affected())
}
