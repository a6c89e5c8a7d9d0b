//! Samples of the queues: each one a transaction. What ended is found by the order of commits.

use sqlx::{SqliteConnection, SqlitePool, sqlite::SqliteRow};

use super::{
    SqliteStore,
    job_queries::{count, queue, time},
    rows::{from_json, integer, text, to_json},
    unavailable, workers,
};
use crate::{
    job::{JobState, QueueName, Timestamp},
    store::{
        StoreError,
        history::{BUCKETS_MS, DEPTH_MAX, Period, Point, Sample, Snapshot},
        operations::Worker,
        sampler::{self, Looks, State},
    },
};

/// Looks at the queues, if it is time to.
pub(super) async fn sample(store: &SqliteStore) -> Result<bool, StoreError> {
    let now = store.now();
    let mut tx = store.begin().await?;
    let row = sqlx::query("SELECT taken_at, state FROM sampler").fetch_optional(&mut *tx).await;
    let (mut state, taken_at) = match row.map_err(unavailable)? {
        Some(row) => (from_json("sampler", &text(&row, "state")?)?, time(&row, "taken_at")?),
        // What ended before is not looked at.
        None => (State { cursor: last_end(&mut tx).await?, ..State::default() }, Timestamp(0)),
    };
    if !state.is_due(taken_at, now) {
        return Ok(false);
    }
    let mut looks = Looks::new();
    look_at_open(&mut tx, &mut looks).await?;
    for (queue, _, slots) in workers::serving(&mut tx, now.before(Worker::SILENT_MAX)).await? {
        looks.entry(queue).or_default().slots = slots;
    }
    let end = last_end(&mut tx).await?;
    look_at_ended(&mut tx, state.cursor, end, &mut looks).await?;
    state.cursor = end;
    state.took(store.now().since(now));
    let samples = sampler::advance(&mut state, taken_at, now, looks);
    for period in Period::ALL {
        for (queue, sample) in &samples {
            add(&mut tx, queue.as_ref(), period, period.begin(now), sample).await?;
        }
    }
    sqlx::query(
        "INSERT INTO sampler (id, taken_at, state) VALUES (1, ?1, ?2)
         ON CONFLICT (id) DO UPDATE SET taken_at = excluded.taken_at, state = excluded.state",
    )
    .bind(now.0)
    .bind(to_json(&state)?)
    .execute(&mut *tx)
    .await
    .map_err(unavailable)?;
    tx.commit().await.map_err(unavailable)?;
    Ok(true)
}

/// The number of the latest result.
async fn last_end(tx: &mut SqliteConnection) -> Result<i64, StoreError> {
    let row = sqlx::query("SELECT coalesce(max(seq), 0) AS seq FROM results").fetch_one(tx).await;
    integer(&row.map_err(unavailable)?, "seq")
}

/// Counts what is not over, along the index by queue and state.
async fn look_at_open(tx: &mut SqliteConnection, looks: &mut Looks) -> Result<(), StoreError> {
    let queues = sqlx::query(
        "WITH RECURSIVE queue (model, format) AS (
             SELECT * FROM (SELECT model, format FROM jobs ORDER BY model, format LIMIT 1)
             UNION ALL
             SELECT (SELECT model FROM jobs WHERE (model, format) > (queue.model, queue.format)
                     ORDER BY model, format LIMIT 1),
                    (SELECT format FROM jobs WHERE (model, format) > (queue.model, queue.format)
                     ORDER BY model, format LIMIT 1)
             FROM queue WHERE queue.model IS NOT NULL
         )
         SELECT model, format FROM queue WHERE model IS NOT NULL",
    )
    .fetch_all(&mut *tx)
    .await
    .map_err(unavailable)?;
    for row in &queues {
        let queue = queue(row)?;
        let depth = &mut looks.entry(queue.clone()).or_default().depth;
        for state in [JobState::Queued, JobState::Running, JobState::Scheduled, JobState::Retrying]
        {
            let row = sqlx::query(
                "SELECT count(*) AS jobs FROM (
                     SELECT 1 FROM jobs WHERE model = ?1 AND format = ?2 AND state = ?3 LIMIT ?4
                 )",
            )
            .bind(&queue.model)
            .bind(&queue.format)
            .bind(state.as_str())
            .bind(DEPTH_MAX)
            .fetch_one(&mut *tx)
            .await
            .map_err(unavailable)?;
            sampler::open(depth, state, count(&row, "jobs")?, DEPTH_MAX.unsigned_abs());
        }
        let oldest = sqlx::query(
            "SELECT submitted_at FROM jobs WHERE model = ?1 AND format = ?2 AND state = 'queued'
             ORDER BY id LIMIT 1",
        )
        .bind(&queue.model)
        .bind(&queue.format)
        .fetch_optional(&mut *tx)
        .await
        .map_err(unavailable)?;
        depth.oldest_queued_at = oldest.map(|row| time(&row, "submitted_at")).transpose()?;
    }
    Ok(())
}

/// Counts the results after one and up to another.
async fn look_at_ended(
    tx: &mut SqliteConnection,
    after: i64,
    last: i64,
    looks: &mut Looks,
) -> Result<(), StoreError> {
    let bounds: Vec<String> = (0..)
        .zip(BUCKETS_MS)
        .map(|(bucket, ms)| format!("WHEN ms <= {ms} THEN {bucket}"))
        .collect();
    let statement = format!(
        "WITH told AS (
             SELECT model, format, state, prompt_tokens, completion_tokens, submitted_at,
                    started_at, finished_at, claim_at, first_token_ms
             FROM results JOIN jobs ON jobs.id = job_id WHERE seq > ?1 AND seq <= ?2
         ), latencies AS (
             SELECT model, format, 'start' AS name, started_at - submitted_at AS ms
             FROM told WHERE started_at IS NOT NULL
             UNION ALL
             SELECT model, format, 'run', finished_at - claim_at
             FROM told WHERE state = 'completed' AND claim_at IS NOT NULL
             UNION ALL
             SELECT model, format, 'first_token', claim_at + first_token_ms - submitted_at
             FROM told WHERE state = 'completed' AND claim_at + first_token_ms IS NOT NULL
         )
         SELECT model, format, state AS name, -1 AS bucket, count(*) AS jobs,
                sum(prompt_tokens) AS prompt_tokens, sum(completion_tokens) AS completion_tokens
         FROM told GROUP BY model, format, state
         UNION ALL
         SELECT model, format, name, CASE {} ELSE {} END AS bucket, count(*),
                max(0, sum(ms)), 0
         FROM latencies GROUP BY model, format, name, bucket",
        bounds.join(" "),
        BUCKETS_MS.len()
    );
    let found = sqlx::query(sqlx::AssertSqlSafe(statement))
        .bind(after)
        .bind(last)
        .fetch_all(tx)
        .await
        .map_err(unavailable)?;
    for row in &found {
        let sample = &mut looks.entry(queue(row)?).or_default().ended;
        let (name, jobs) = (text(row, "name")?, count(row, "jobs")?);
        match usize::try_from(integer(row, "bucket")?) {
            Ok(bucket) => {
                let sum_ms = count(row, "prompt_tokens")?;
                sampler::latency(sample, &name, bucket, jobs, sum_ms);
            }
            Err(_) => {
                sample.prompt_tokens += count(row, "prompt_tokens")?;
                sample.completion_tokens += count(row, "completion_tokens")?;
                sampler::end(sample, &name, jobs);
            }
        }
    }
    Ok(())
}

fn names(queue: Option<&QueueName>) -> (&str, &str) {
    queue.map_or(("", ""), |queue| (&queue.model, &queue.format))
}

/// Adds a sample to a period.
async fn add(
    tx: &mut SqliteConnection,
    queue: Option<&QueueName>,
    period: Period,
    at: Timestamp,
    sample: &Sample,
) -> Result<(), StoreError> {
    let (model, format) = names(queue);
    let period_s = period.length().as_secs() as i64;
    let known = sqlx::query(
        "SELECT sample FROM samples
         WHERE model = ?1 AND format = ?2 AND period_s = ?3 AND at = ?4",
    )
    .bind(model)
    .bind(format)
    .bind(period_s)
    .bind(at.0)
    .fetch_optional(&mut *tx)
    .await
    .map_err(unavailable)?;
    let mut whole = known.as_ref().map(stored).transpose()?.unwrap_or_default();
    whole.merge(sample);
    sqlx::query(
        "INSERT OR REPLACE INTO samples (model, format, period_s, at, sample)
         VALUES (?1, ?2, ?3, ?4, ?5)",
    )
    .bind(model)
    .bind(format)
    .bind(period_s)
    .bind(at.0)
    .bind(to_json(&whole)?)
    .execute(tx)
    .await
    .map_err(unavailable)?;
    Ok(())
}

fn stored(row: &SqliteRow) -> Result<Sample, StoreError> {
    from_json("sample", &text(row, "sample")?)
}

/// The queues as they were sampled last.
pub(super) async fn sampled(pool: &SqlitePool) -> Result<Option<Snapshot>, StoreError> {
    let row = sqlx::query("SELECT taken_at, state FROM sampler").fetch_optional(pool).await;
    let Some(row) = row.map_err(unavailable)? else { return Ok(None) };
    let state: State = from_json("sampler", &text(&row, "state")?)?;
    Ok(Some(Snapshot { at: time(&row, "taken_at")?, queues: state.queues }))
}

/// A queue's samples, or those of all together.
pub(super) async fn read(
    pool: &SqlitePool,
    queue: Option<&QueueName>,
    period: Period,
    from: Timestamp,
    to: Timestamp,
) -> Result<Vec<Point>, StoreError> {
    let (model, format) = names(queue);
    let found = sqlx::query(
        "SELECT at, sample FROM samples
         WHERE model = ?1 AND format = ?2 AND period_s = ?3 AND at >= ?4 AND at < ?5 ORDER BY at",
    )
    .bind(model)
    .bind(format)
    .bind(period.length().as_secs() as i64)
    .bind(period.begin(from).0)
    .bind(to.0)
    .fetch_all(pool)
    .await
    .map_err(unavailable)?;
    found.iter().map(|row| Ok(Point { at: time(row, "at")?, sample: stored(row)? })).collect()
}

/// Deletes samples that are as old as theirs are kept.
pub(super) async fn sweep(tx: &mut SqliteConnection, now: Timestamp) -> Result<(), StoreError> {
    for period in Period::ALL {
        sqlx::query("DELETE FROM samples WHERE period_s = ?1 AND at < ?2")
            .bind(period.length().as_secs() as i64)
            .bind(now.before(period.kept()).0)
            .execute(&mut *tx)
            .await
            .map_err(unavailable)?;
    }
    Ok(())
}
