//! What others ask about jobs.

use std::collections::HashMap;

use sqlx::PgPool;
use uuid::Uuid;

use super::{rows, unavailable};
use crate::{
    dispatch::Entry,
    job::{JobId, QueueName, Timestamp},
    outcome::{JobError, Outcome},
    store::{FinishedJob, JobRecord, Progress, StoreError},
};

/// The id below every other, for a first page.
pub(super) fn after(id: Option<JobId>) -> Uuid {
    id.map_or_else(Uuid::nil, Uuid::from)
}

/// The time, on the server's clock.
pub(super) async fn now(pool: &PgPool, given: Option<i64>) -> Result<Timestamp, StoreError> {
    let row = sqlx::query("SELECT store_now_ms($1) AS now").bind(given).fetch_one(pool).await;
    Ok(Timestamp(rows::integer(&row.map_err(unavailable)?, "now")?))
}

/// A page of a queue's queued jobs.
pub(super) async fn queued(
    pool: &PgPool,
    queue: &QueueName,
    last: Option<JobId>,
    limit: u32,
) -> Result<Vec<Entry>, StoreError> {
    let found = sqlx::query(
        "SELECT id, tenant, priority, cost FROM jobs
         WHERE model = $1 AND format = $2 AND state = 'queued' AND id > $3
         ORDER BY id LIMIT $4",
    )
    .bind(&queue.model)
    .bind(&queue.format)
    .bind(after(last))
    .bind(i64::from(limit))
    .fetch_all(pool)
    .await
    .map_err(unavailable)?;
    found.iter().map(|row| rows::entry(row, queue)).collect()
}

/// The whole stories of the jobs that are known, in order of id.
pub(super) async fn records(pool: &PgPool, ids: &[JobId]) -> Result<Vec<JobRecord>, StoreError> {
    let ids = rows::sorted(ids.iter().copied());
    let found = sqlx::query(
        "SELECT id, jobs.model, jobs.format, jobs.tenant, priority, attempts_max, job, state, epoch,
                attempts, outcome, finished_at
         FROM jobs LEFT JOIN results ON results.job_id = jobs.id AND results.job_id = ANY($1)
         WHERE id = ANY($1) ORDER BY id",
    )
    .bind(&ids)
    .fetch_all(pool)
    .await
    .map_err(unavailable)?;
    let errors = sqlx::query(
        "SELECT job_id, error FROM attempt_errors WHERE job_id = ANY($1) ORDER BY job_id, epoch",
    )
    .bind(&ids)
    .fetch_all(pool)
    .await
    .map_err(unavailable)?;
    let mut errors_of: HashMap<JobId, Vec<JobError>> = HashMap::new();
    for row in &errors {
        errors_of.entry(rows::id(row, "job_id")?).or_default().push(rows::attempt_error(row)?);
    }
    let record = |row| {
        let finished_at: Option<i64> = rows::get(row, "finished_at")?;
        let mut errors = errors_of.remove(&rows::id(row, "id")?).unwrap_or_default();
        let (job, unreadable) = rows::job(row)?;
        // Said once, if its attempts have said it.
        errors.extend(unreadable.filter(|error| errors.last() != Some(error)));
        Ok(JobRecord {
            job,
            state: rows::state(row)?,
            epoch: rows::integer(row, "epoch")?,
            attempts: rows::attempts(row)?,
            outcome: rows::outcome(row)?.0,
            finished_at: finished_at.map(Timestamp),
            errors,
        })
    };
    found.iter().map(record).collect()
}

/// Those that are over, and how. One whose outcome is of a later release is left out: whoever waits for
/// it gets it with that release, and its neighbours now.
pub(super) async fn ended(pool: &PgPool, ids: &[JobId]) -> Result<Vec<FinishedJob>, StoreError> {
    let ids = rows::sorted(ids.iter().copied());
    let found = sqlx::query(
        "SELECT id, state, outcome
         FROM jobs LEFT JOIN results ON results.job_id = jobs.id AND results.job_id = ANY($1)
         WHERE id = ANY($1) AND state IN ('completed', 'failed', 'cancelled', 'expired')",
    )
    .bind(&ids)
    .fetch_all(pool)
    .await
    .map_err(unavailable)?;
    let mut ended = Vec::with_capacity(found.len());
    for row in &found {
        let (id, (outcome, is_later)) = (rows::id(row, "id")?, rows::outcome(row)?);
        match outcome {
            Some(Outcome::Error(error)) if is_later => {
                tracing::warn!(job = %id, %error, "an outcome of a later release");
            }
            outcome => ended.push(FinishedJob { id, state: rows::state(row)?, outcome }),
        }
    }
    Ok(ended)
}

/// How many jobs of a queue are not over: one count for each partial index that knows.
pub(super) async fn unfinished(pool: &PgPool, queue: &QueueName) -> Result<u64, StoreError> {
    let row = sqlx::query(
        "SELECT (SELECT count(*) FROM jobs
                 WHERE state = 'queued' AND model = $1 AND format = $2)
              + (SELECT count(*) FROM jobs
                 WHERE state = 'running' AND model = $1 AND format = $2)
              + (SELECT count(*) FROM jobs
                 WHERE state IN ('scheduled', 'retrying') AND model = $1 AND format = $2)
              AS jobs",
    )
    .bind(&queue.model)
    .bind(&queue.format)
    .fetch_one(pool)
    .await
    .map_err(unavailable)?;
    rows::count(&row, "jobs")
}

/// Counts over one queue, or over everything. Reads every job.
pub(super) async fn progress(
    pool: &PgPool,
    queue: Option<&QueueName>,
) -> Result<Progress, StoreError> {
    let (model, format) = queue.map_or((None, None), |q| (Some(&q.model), Some(&q.format)));
    let found = sqlx::query(
        "SELECT state, count(*) AS jobs FROM jobs
         WHERE ($1 IS NULL OR (model = $1 AND format = $2)) GROUP BY state",
    )
    .bind(model)
    .bind(format)
    .fetch_all(pool)
    .await
    .map_err(unavailable)?;
    let mut progress = Progress::default();
    for row in &found {
        *progress.counter(rows::state(row)?) = rows::count(row, "jobs")?;
    }
    let row = sqlx::query(
        "SELECT coalesce(sum(prompt_tokens), 0)::bigint AS prompt,
                coalesce(sum(completion_tokens), 0)::bigint AS completion
         FROM results WHERE $1 IS NULL OR (model = $1 AND format = $2)",
    )
    .bind(model)
    .bind(format)
    .fetch_one(pool)
    .await
    .map_err(unavailable)?;
    progress.prompt_tokens = rows::count(&row, "prompt")?;
    progress.completion_tokens = rows::count(&row, "completion")?;
    Ok(progress)
}
