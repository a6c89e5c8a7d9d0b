//! Jobs that failed for good: read, submitted again, or deleted.

use std::collections::HashMap;

use sqlx::PgPool;
use uuid::Uuid;

use super::{claims, reads, rows, unavailable};
use crate::{
    job::{Job, JobId, QueueName},
    store::{
        StoreError,
        operations::{DeadLetter, Pace, Replay},
    },
};

pub(super) async fn list(
    pool: &PgPool,
    queue: &QueueName,
    limit: u32,
    after: Option<JobId>,
) -> Result<Vec<DeadLetter>, StoreError> {
    let found = sqlx::query(
        "SELECT id, replay_of FROM jobs
         WHERE model = $1 AND format = $2 AND state = 'failed' AND id > $3
         ORDER BY id LIMIT $4",
    )
    .bind(&queue.model)
    .bind(&queue.format)
    .bind(reads::after(after))
    .bind(i64::from(limit))
    .fetch_all(pool)
    .await
    .map_err(unavailable)?;
    let mut replay_of: HashMap<JobId, Option<JobId>> = HashMap::with_capacity(found.len());
    for row in &found {
        let origin: Option<Uuid> = rows::get(row, "replay_of")?;
        replay_of.insert(rows::id(row, "id")?, origin.map(JobId::from));
    }
    let records = reads::records(pool, &rows::ids(&found)?).await?;
    let letter = |record: crate::store::JobRecord| DeadLetter {
        replay_of: replay_of.get(&record.job.id).copied().flatten(),
        record,
    };
    Ok(records.into_iter().map(letter).collect())
}

pub(super) async fn replay(
    pool: &PgPool,
    ids: &[JobId],
    pace: Option<Pace>,
    now: Option<i64>,
) -> Result<Vec<Replay>, StoreError> {
    let mut tx = pool.begin().await.map_err(unavailable)?;
    let dead = sqlx::query(
        // Held, so that no purge comes between.
        "SELECT id, job FROM jobs WHERE id = ANY($1) AND state = 'failed'
         ORDER BY id FOR SHARE",
    )
    .bind(rows::sorted(ids.iter().copied()))
    .fetch_all(&mut *tx)
    .await
    .map_err(unavailable)?;
    let mut replays = Vec::with_capacity(dead.len());
    for row in &dead {
        let job: Job = match rows::decode(row, "job") {
            Ok(job) => job,
            // It stays dead; the others are replayed.
            Err(error @ StoreError::Damaged { .. }) => {
                tracing::warn!(job = %rows::id(row, "id")?, %error, "not replayed");
                continue;
            }
            Err(error) => return Err(error),
        };
        let run_at = pace.map(|pace| pace.due(replays.len()));
        let job = Job { id: JobId::generate(), run_at, expires_at: None, ..job };
        replays.push(Replay { replay_of: rows::id(row, "id")?, job });
    }
    let jobs: Vec<Job> = replays.iter().map(|replay| replay.job.clone()).collect();
    let origins: Vec<Uuid> = replays.iter().map(|replay| Uuid::from(replay.replay_of)).collect();
    claims::insert_jobs(&mut tx, &jobs, Some(&origins), now).await?;
    tx.commit().await.map_err(unavailable)?;
    Ok(replays)
}

pub(super) async fn purge(pool: &PgPool, ids: &[JobId]) -> Result<u64, StoreError> {
    let row = sqlx::query(
        "WITH purged AS (
             DELETE FROM jobs WHERE id = ANY($1) AND state = 'failed' RETURNING id
         ), unrecorded AS (
             DELETE FROM results USING purged WHERE job_id = ANY($1) AND job_id = purged.id
         ), forgiven AS (
             DELETE FROM attempt_errors USING purged WHERE job_id = ANY($1) AND job_id = purged.id
         )
         SELECT count(*) AS jobs FROM purged",
    )
    .bind(rows::sorted(ids.iter().copied()))
    .fetch_one(pool)
    .await
    .map_err(unavailable)?;
    rows::count(&row, "jobs")
}
