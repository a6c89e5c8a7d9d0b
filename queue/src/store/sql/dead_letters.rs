//! Dead letters.

use std::collections::HashMap;

use async_trait::async_trait;
use uuid::Uuid;

use super::{SqlStore, calls::query, claims, dialect, rows, store::records};
use crate::{
    job::{Job, JobId, QueueName},
    store::{
        JobRecord, StoreError,
        dead_letters::{DeadLetter, DeadLetters, Pace, Replay},
    },
};

#[async_trait]
impl DeadLetters for SqlStore {
    async fn dead_letters(
        &self,
        queue: &QueueName,
        limit: u32,
        after: Option<JobId>,
    ) -> Result<Vec<DeadLetter>, StoreError> {
        let found = query(
            "SELECT id, replay_of FROM jobs
             WHERE model = $1 AND format = $2 AND state = 'failed' AND id > $3
             ORDER BY id LIMIT $4",
        )
        .bind(&queue.model)
        .bind(&queue.format)
        .bind(after.map_or_else(Uuid::nil, Uuid::from))
        .bind(i64::from(limit));
        let found = self.fetch_all(found).await?;
        let mut replay_of: HashMap<JobId, Option<Uuid>> = HashMap::with_capacity(found.len());
        for row in &found {
            replay_of.insert(rows::id(row, "id")?, rows::get(row, "replay_of")?);
        }
        let records = records(self, &rows::ids(&found)?).await?;
        let letter = |record: JobRecord| DeadLetter {
            replay_of: replay_of.get(&record.job.id).copied().flatten().map(JobId::from),
            record,
        };
        Ok(records.into_iter().map(letter).collect())
    }

    async fn replay(&self, ids: &[JobId], pace: Option<Pace>) -> Result<Vec<Replay>, StoreError> {
        self.within(replay(self, ids, pace)).await
    }

    async fn purge(&self, ids: &[JobId]) -> Result<u64, StoreError> {
        claims::purge(self, ids).await
    }
}

async fn replay(
    store: &SqlStore,
    ids: &[JobId],
    pace: Option<Pace>,
) -> Result<Vec<Replay>, StoreError> {
    // The rows are locked so that no purge deletes them meanwhile.
    let dead = concat!(
        "SELECT id, model, format, job FROM jobs WHERE id ",
        any_of!("$1"),
        " AND state = 'failed' ORDER BY id",
        for_share!()
    );
    let mut tx = store.begin().await?;
    let dead = query(dead).bind(dialect::id_list(ids.iter().copied()));
    let dead = dead.fetch_all(&mut *tx).await?;
    let mut replays = Vec::with_capacity(dead.len());
    for row in &dead {
        let replay_of = rows::id(row, "id")?;
        let job: Job = match rows::stored_job(row) {
            Ok(job) => job,
            // This job stays a dead letter; the others are replayed.
            Err(error @ StoreError::Damaged { .. }) => {
                tracing::warn!(job = %replay_of, %error, "not replayed");
                continue;
            }
            Err(error) => return Err(error),
        };
        let run_at = pace.map(|pace| pace.due(replays.len()));
        let job = Job { id: JobId::generate(), run_at, expires_at: None, ..job };
        replays.push(Replay { replay_of, job });
    }
    let (origins, jobs): (Vec<JobId>, Vec<Job>) =
        replays.iter().map(|replay| (replay.replay_of, replay.job.clone())).unzip();
    claims::insert_jobs(store, &mut tx, &jobs, Some(&origins)).await?;
    tx.commit().await?;
    Ok(replays)
}
