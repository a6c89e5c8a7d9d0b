//! Queues with their jobs and workers.

use sqlx::postgres::PgRow;

use super::{
    PostgresStore,
    calls::query,
    queue_settings::settings,
    rows::{self, milliseconds},
};
use crate::{
    job::{JobState, QueueName},
    store::{
        Progress, StoreError,
        queue_settings::QueueOverview,
        workers::{SILENT_ALIVE_MAX, Worker},
    },
};

/// Returns every queue that has jobs or settings.
pub(super) async fn overviews(store: &PostgresStore) -> Result<Vec<QueueOverview>, StoreError> {
    let found = query(
        "WITH counted AS (
             SELECT model, format,
                    count(*) FILTER (WHERE state = 'scheduled') AS scheduled,
                    count(*) FILTER (WHERE state = 'queued') AS queued,
                    count(*) FILTER (WHERE state = 'running') AS running,
                    count(*) FILTER (WHERE state = 'retrying') AS retrying,
                    count(*) FILTER (WHERE state = 'completed') AS completed,
                    count(*) FILTER (WHERE state = 'failed') AS failed,
                    count(*) FILTER (WHERE state = 'cancelled') AS cancelled,
                    count(*) FILTER (WHERE state = 'expired') AS expired,
                    count(*) FILTER (WHERE expires_at <= store_now_ms($1)
                        AND state IN ('scheduled', 'queued', 'retrying')) AS overdue,
                    store_now_ms($1) - min(submitted_at) FILTER (WHERE state = 'queued')
                        AS oldest_queued
             FROM all_jobs GROUP BY model, format
         ), serving AS (
             SELECT model COLLATE \"C\" AS model, format COLLATE \"C\" AS format,
                    count(*) AS workers
             FROM workers WHERE seen_at >= store_now_ms($1) - $2 GROUP BY 1, 2
         ), used AS (
             SELECT model, format, sum(prompt_tokens)::bigint AS prompt_tokens,
                    sum(completion_tokens)::bigint AS completion_tokens
             FROM results GROUP BY model, format
         )
         SELECT model, format, coalesce(paused, false) AS paused, limit_tokens, max_wait_ms,
                numerics_class, coalesce(allowed_classes, '{}') AS allowed_classes, scheduled,
                queued, running, retrying, completed, failed, cancelled, expired, overdue, workers, oldest_queued, prompt_tokens,
                completion_tokens
         FROM counted FULL JOIN queues USING (model, format)
              LEFT JOIN used USING (model, format)
              LEFT JOIN serving USING (model, format)
         ORDER BY model, format",
    );
    let found = found.bind(store.clock_parameter()).bind(milliseconds(Worker::SILENT_MAX));
    store.fetch_all(found).await?.iter().map(overview).collect()
}

fn overview(row: &PgRow) -> Result<QueueOverview, StoreError> {
    // A queue without jobs has no counts.
    let count =
        |column| -> Result<u64, StoreError> { Ok(rows::tokens(row, column)?.unwrap_or_default()) };
    let oldest_queued: Option<i64> = rows::get(row, "oldest_queued")?;
    let mut progress = Progress {
        prompt_tokens: count("prompt_tokens")?,
        completion_tokens: count("completion_tokens")?,
        ..Progress::default()
    };
    for state in JobState::ALL {
        *progress.counter(state) = count(state.as_str())?;
    }
    Ok(QueueOverview {
        settings: settings(row)?,
        progress,
        oldest_queued: oldest_queued.map(rows::duration),
        overdue: count("overdue")?,
        workers: count("workers")?,
    })
}

/// Deletes a queue's classes unless it has live workers; returns those workers and the queue's class.
pub(super) async fn reset_class(
    store: &PostgresStore,
    queue: &QueueName,
) -> Result<(Vec<String>, Option<String>), StoreError> {
    // This is one statement, so that a worker's heartbeat comes before or after it, not in between.
    let reset = query(
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
    .bind(store.clock_parameter())
    .bind(&queue.model)
    .bind(&queue.format)
    .bind(milliseconds(SILENT_ALIVE_MAX));
    let row = store.fetch_one(reset).await?;
    Ok((rows::get(&row, "workers")?, rows::get(&row, "numerics_class")?))
}
