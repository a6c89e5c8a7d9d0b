//! Queues with their jobs and workers.

use std::collections::BTreeMap;

use super::{
    SqliteStore,
    calls::query,
    queue_settings::settings,
    rows::{self, milliseconds},
    workers,
};
use crate::{
    job::{JobState, QueueName, Timestamp},
    store::{
        StoreError,
        queue_settings::{QueueOverview, QueueState},
        workers::{SILENT_ALIVE_MAX, Worker},
    },
};

/// Returns every queue that has jobs or settings.
pub(super) async fn overviews(store: &SqliteStore) -> Result<Vec<QueueOverview>, StoreError> {
    let mut tx = store.begin().await?;
    let now = store.clock_parameter();
    let mut overviews: BTreeMap<QueueName, QueueOverview> = BTreeMap::new();
    for row in &query("SELECT * FROM queues").fetch_all(&mut *tx).await? {
        let settings = settings(row)?;
        overviews.insert(settings.queue.clone(), QueueOverview::from_state(settings));
    }
    let counts = query(
        "SELECT model, format, state, count(*) AS jobs, min(submitted_at) AS oldest,
                count(*) FILTER (WHERE expires_at <= $1) AS overdue,
                coalesce(sum(prompt_tokens), 0) AS prompt_tokens,
                coalesce(sum(completion_tokens), 0) AS completion_tokens
         FROM jobs LEFT JOIN results ON job_id = id GROUP BY model, format, state",
    );
    for row in &counts.bind(now).fetch_all(&mut *tx).await? {
        let (queue, state) = (rows::queue(row)?, rows::state(row)?);
        let overview = overviews
            .entry(queue.clone())
            .or_insert_with(|| QueueOverview::from_state(QueueState::with_defaults(queue)));
        *overview.progress.counter(state) = rows::count(row, "jobs")?;
        overview.progress.prompt_tokens += rows::count(row, "prompt_tokens")?;
        overview.progress.completion_tokens += rows::count(row, "completion_tokens")?;
        if state == JobState::Queued {
            overview.oldest_queued = Some(Timestamp(now).since(rows::time(row, "oldest")?));
        }
        if matches!(state, JobState::Queued | JobState::Scheduled | JobState::Retrying) {
            overview.overdue += rows::count(row, "overdue")?;
        }
    }
    let since = now.saturating_sub(milliseconds(Worker::SILENT_MAX));
    for (queue, workers, _) in workers::serving(&mut tx, since).await? {
        if let Some(overview) = overviews.get_mut(&queue) {
            overview.workers = workers;
        }
    }
    Ok(overviews.into_values().collect())
}

/// Deletes a queue's classes unless it has live workers; returns those workers and the queue's class.
pub(super) async fn reset_class(
    store: &SqliteStore,
    queue: &QueueName,
) -> Result<(Vec<String>, Option<String>), StoreError> {
    let QueueName { model, format } = queue;
    let mut tx = store.begin().await?;
    let alive = query(
        "SELECT owner FROM workers WHERE seen_at >= $3
         AND heartbeat ->> '$.queue.model' = $1 AND heartbeat ->> '$.queue.format' = $2
         ORDER BY owner",
    );
    let since = store.clock_parameter().saturating_sub(milliseconds(SILENT_ALIVE_MAX));
    let alive = alive.bind(model).bind(format).bind(since).fetch_all(&mut *tx).await?;
    if !alive.is_empty() {
        let owners = alive.iter().map(|row| rows::get(row, "owner")).collect::<Result<_, _>>()?;
        return Ok((owners, None));
    }
    let class = query("SELECT numerics_class FROM queues WHERE model = $1 AND format = $2");
    let class = class.bind(model).bind(format).fetch_optional(&mut *tx).await?;
    query(
        "UPDATE queues SET numerics_class = NULL, allowed_classes = '[]'
         WHERE model = $1 AND format = $2",
    )
    .bind(model)
    .bind(format)
    .execute(&mut *tx)
    .await?;
    tx.commit().await?;
    let class = class.map(|row| rows::get(&row, "numerics_class")).transpose()?;
    Ok((Vec::new(), class.flatten()))
}
