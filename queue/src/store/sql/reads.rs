//! Reads of jobs by id or queue.

use std::collections::HashMap;

use uuid::Uuid;

use super::{SqlStore, calls::query, dialect, rows};
use crate::{
    dispatch::Entry,
    job::{JobId, JobState, QueueName},
    outcome::{JobError, Outcome},
    store::{FinishedJob, JobRecord, Progress, StoreError},
};

/// Returns a page of a queue's queued jobs.
pub(super) async fn queued(
    store: &SqlStore,
    queue: &QueueName,
    after: Option<JobId>,
    limit: u32,
) -> Result<Vec<Entry>, StoreError> {
    let found = query(concat!(
        "SELECT id, tenant, priority, ",
        cost!(),
        " FROM jobs WHERE model = $1 AND format = $2 AND state = 'queued' AND id > $3
         ORDER BY id LIMIT $4"
    ))
    .bind(&queue.model)
    .bind(&queue.format)
    .bind(after.map_or_else(Uuid::nil, Uuid::from))
    .bind(i64::from(limit));
    store.fetch_all(found).await?.iter().map(|row| rows::entry(row, queue.clone())).collect()
}

/// Returns the state of a job.
pub(super) async fn state(store: &SqlStore, id: JobId) -> Result<Option<JobState>, StoreError> {
    let found = query("SELECT state FROM jobs WHERE id = $1").bind(Uuid::from(id));
    store.fetch_optional(found).await?.as_ref().map(rows::state).transpose()
}

/// Returns the records of the jobs that are known, in order of id.
pub(super) async fn records(store: &SqlStore, ids: &[JobId]) -> Result<Vec<JobRecord>, StoreError> {
    let ids = dialect::id_list(ids.iter().copied());
    let found = query(concat!(
        "SELECT id, jobs.model, jobs.format, jobs.tenant, priority, attempts_max, job, state, epoch,
                attempts, outcome, finished_at
         FROM jobs LEFT JOIN results ON results.job_id = jobs.id AND results.job_id ",
        any_of!("$1"),
        " WHERE id ",
        any_of!("$1"),
        " ORDER BY id"
    ));
    let found = store.fetch_all(found.bind(&ids)).await?;
    let errors = query(concat!(
        "SELECT job_id, error FROM attempt_errors WHERE job_id ",
        any_of!("$1"),
        " ORDER BY job_id, epoch"
    ));
    let mut errors_of: HashMap<JobId, Vec<JobError>> = HashMap::new();
    for row in &store.fetch_all(errors.bind(&ids)).await? {
        errors_of.entry(rows::id(row, "job_id")?).or_default().push(rows::attempt_error(row)?);
    }
    let record = |row| {
        let mut errors = errors_of.remove(&rows::id(row, "id")?).unwrap_or_default();
        let (job, unreadable) = rows::job(row)?;
        // Not added again if the last attempt ended with the same error.
        errors.extend(unreadable.filter(|error| errors.last() != Some(error)));
        Ok(JobRecord {
            job,
            state: rows::state(row)?,
            epoch: rows::integer(row, "epoch")?,
            attempts: rows::attempts(row, "attempts")?,
            outcome: dialect::outcome(row)?.0,
            finished_at: rows::time_or_none(row, "finished_at")?,
            errors,
        })
    };
    found.iter().map(record).collect()
}

/// Returns the jobs in a terminal state, with their outcomes. A job with an outcome written by a
/// later release is left out: a process of that release returns it.
pub(super) async fn finished(
    store: &SqlStore,
    ids: &[JobId],
) -> Result<Vec<FinishedJob>, StoreError> {
    let found = query(concat!(
        "SELECT id, state, outcome
         FROM jobs LEFT JOIN results ON results.job_id = jobs.id AND results.job_id ",
        any_of!("$1"),
        " WHERE state IN ('completed', 'failed', 'cancelled', 'expired') AND id ",
        any_of!("$1")
    ));
    let found = store.fetch_all(found.bind(dialect::id_list(ids.iter().copied()))).await?;
    let mut finished = Vec::with_capacity(found.len());
    for row in &found {
        let (id, (outcome, is_later)) = (rows::id(row, "id")?, dialect::outcome(row)?);
        match outcome {
            Some(Outcome::Error(error)) if is_later => {
                tracing::warn!(job = %id, %error, "an outcome of a later release");
            }
            outcome => finished.push(FinishedJob { id, state: rows::state(row)?, outcome }),
        }
    }
    Ok(finished)
}

/// Returns the number of unfinished jobs of a queue: one count along each partial index.
pub(super) async fn unfinished(store: &SqlStore, queue: &QueueName) -> Result<u64, StoreError> {
    let count = query(
        "SELECT (SELECT count(*) FROM jobs
                 WHERE state = 'queued' AND model = $1 AND format = $2)
              + (SELECT count(*) FROM jobs
                 WHERE state = 'running' AND model = $1 AND format = $2)
              + (SELECT count(*) FROM jobs
                 WHERE state IN ('scheduled', 'retrying') AND model = $1 AND format = $2)
              AS jobs",
    );
    let row = store.fetch_one(count.bind(&queue.model).bind(&queue.format)).await?;
    rows::count(&row, "jobs")
}

/// Counts over one queue, or over all. Reads every job.
pub(super) async fn progress(
    store: &SqlStore,
    queue: Option<&QueueName>,
) -> Result<Progress, StoreError> {
    let (model, format) = queue.map_or((None, None), |q| (Some(&q.model), Some(&q.format)));
    let counts = query(
        "SELECT state, count(*) AS jobs FROM jobs
         WHERE ($1 IS NULL OR (model = $1 AND format = $2)) GROUP BY state",
    );
    let mut progress = Progress::default();
    for row in &store.fetch_all(counts.bind(model).bind(format)).await? {
        *progress.counter(rows::state(row)?) = rows::count(row, "jobs")?;
    }
    let tokens = query(concat!(
        "SELECT CAST(coalesce(sum(prompt_tokens), 0) AS bigint) AS prompt,
                CAST(coalesce(sum(completion_tokens), 0) AS bigint) AS completion
         FROM results WHERE $1 IS NULL OR ",
        of_queue!()
    ));
    let row = store.fetch_one(tokens.bind(model).bind(format)).await?;
    progress.prompt_tokens = rows::count(&row, "prompt")?;
    progress.completion_tokens = rows::count(&row, "completion")?;
    Ok(progress)
}
