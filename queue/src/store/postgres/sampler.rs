//! Samples of the queues. Whoever samples holds the one row of `sampler` until its transaction ends, so
//! that what it adds to a period is added once; others pass over it.
//!
//! What ended is found by its time. Times are those of statements' begins, and a statement may commit
//! later than one that began after it: so nothing is counted that ended after the oldest transaction
//! under way began, and the next look counts it.

use std::time::Instant;

use sqlx::{PgConnection, PgPool, postgres::PgRow};

use super::{rows, unavailable};
use crate::{
    job::{QueueName, Timestamp},
    store::{
        StoreError,
        history::{BUCKETS_MS, DEPTH_MAX, Period, Point, SAMPLE_EVERY, Sample, Snapshot},
        operations::Worker,
        sampler::{self, Looks, State},
    },
};

/// Jobs of the fewer kinds that are counted over all queues.
const SET_ASIDE_MAX: i64 = 100_000;
/// A transaction that has been open for longer is nobody's that writes results.
const OPEN_MS_MAX: i64 = 60_000;

/// Takes the sampler's row, if it is free and due: its state, when it was written, and the time.
async fn take(
    tx: &mut PgConnection,
    now: Option<i64>,
) -> Result<Option<(State, Timestamp, Timestamp)>, StoreError> {
    sqlx::query(
        "INSERT INTO sampler (taken_at, state)
         SELECT now, jsonb_build_object('cursor', now, 'queues', '[]'::jsonb)
         FROM (SELECT store_now_ms($1) AS now) AS clock
         WHERE NOT EXISTS (SELECT FROM sampler) ON CONFLICT DO NOTHING",
    )
    .bind(now)
    .execute(&mut *tx)
    .await
    .map_err(unavailable)?;
    let row = sqlx::query(
        "SELECT taken_at, state::text, store_now_ms($1) AS now FROM sampler
         WHERE taken_at <= store_now_ms($1) - $2 FOR UPDATE SKIP LOCKED",
    )
    .bind(now)
    .bind(super::milliseconds(SAMPLE_EVERY))
    .fetch_optional(tx)
    .await
    .map_err(unavailable)?;
    let Some(row) = row else { return Ok(None) };
    let state: State = serde_json::from_str(rows::get(&row, "state")?)
        .map_err(|error| rows::damaged("sampler", error))?;
    let (taken_at, now) = (rows::time(&row, "taken_at")?, rows::time(&row, "now")?);
    Ok(state.is_due(taken_at, now).then_some((state, taken_at, now)))
}

/// Looks at the queues, if it is time to.
pub(super) async fn sample(pool: &PgPool, given: Option<i64>) -> Result<bool, StoreError> {
    let mut tx = pool.begin().await.map_err(unavailable)?;
    let Some((mut state, taken_at, now)) = take(&mut tx, given).await? else {
        // Also keeps the first row, which is due only later.
        tx.commit().await.map_err(unavailable)?;
        return Ok(false);
    };
    let started = Instant::now();
    let mut looks = Looks::new();
    look_at_open(&mut tx, &mut looks).await?;
    look_at_slots(&mut tx, now, &mut looks).await?;
    let horizon = horizon(&mut tx, given, now).await?;
    if horizon > state.cursor {
        look_at_ended(&mut tx, state.cursor, horizon, &mut looks).await?;
        state.cursor = horizon;
    }
    if given.is_none() {
        state.took(started.elapsed());
    }
    let samples = sampler::advance(&mut state, taken_at, now, looks);
    for period in Period::ALL {
        add(&mut tx, period, period.begin(now), &samples).await?;
    }
    sqlx::query("UPDATE sampler SET taken_at = $1, state = $2::text::jsonb")
        .bind(now.0)
        .bind(serde_json::to_string(&state).expect("numbers and texts"))
        .execute(&mut *tx)
        .await
        .map_err(unavailable)?;
    tx.commit().await.map_err(unavailable)?;
    Ok(true)
}

/// Up to when everything that ended is to be seen.
async fn horizon(
    tx: &mut PgConnection,
    given: Option<i64>,
    now: Timestamp,
) -> Result<i64, StoreError> {
    if given.is_some() {
        return Ok(now.0);
    }
    let row = sqlx::query(
        "SELECT least($1, coalesce(min((extract(epoch FROM xact_start) * 1000)::bigint), $1) - 1)
                AS horizon
         FROM pg_stat_activity
         WHERE datname = current_database() AND pid <> pg_backend_pid()
           AND xact_start > clock_timestamp() - $2 * interval '1 ms'",
    )
    .bind(now.0)
    .bind(OPEN_MS_MAX as f64)
    .fetch_one(tx)
    .await
    .map_err(unavailable)?;
    rows::integer(&row, "horizon")
}

/// Counts what is not over: queued jobs queue by queue along their index, of the others all.
async fn look_at_open(tx: &mut PgConnection, looks: &mut Looks) -> Result<(), StoreError> {
    let queued = sqlx::query(
        "WITH RECURSIVE queue AS (
             (SELECT model, format FROM jobs WHERE state = 'queued'
              ORDER BY model, format LIMIT 1)
             UNION ALL
             SELECT next.model, next.format FROM queue, LATERAL (
                 SELECT model, format FROM jobs
                 WHERE state = 'queued' AND (model, format) > (queue.model, queue.format)
                 ORDER BY model, format LIMIT 1
             ) AS next
         )
         SELECT queue.model, queue.format, jobs, submitted_at FROM queue, LATERAL (
             SELECT count(*) AS jobs FROM (
                 SELECT FROM jobs WHERE state = 'queued' AND model = queue.model
                                  AND format = queue.format LIMIT $1 + 1
             ) AS counted_one_by_one
         ) AS counted, LATERAL (
             SELECT submitted_at FROM jobs
             WHERE state = 'queued' AND model = queue.model AND format = queue.format
             ORDER BY id LIMIT 1
         ) AS oldest",
    )
    .bind(DEPTH_MAX)
    .fetch_all(&mut *tx)
    .await
    .map_err(unavailable)?;
    for row in &queued {
        let depth = &mut looks.entry(rows::queue(row)?).or_default().depth;
        depth.queued = rows::count(row, "jobs")?.min(DEPTH_MAX.unsigned_abs());
        depth.or_more = rows::integer(row, "jobs")? > DEPTH_MAX;
        depth.oldest_queued_at = Some(rows::time(row, "submitted_at")?);
    }
    let others = sqlx::query(
        "SELECT model, format, state, count(*) AS jobs FROM (
             SELECT model, format, state FROM jobs WHERE state = 'running'
             UNION ALL
             (SELECT model, format, state FROM jobs WHERE state IN ('scheduled', 'retrying')
              LIMIT $1)
         ) AS open GROUP BY model, format, state",
    )
    .bind(SET_ASIDE_MAX)
    .fetch_all(tx)
    .await
    .map_err(unavailable)?;
    for row in &others {
        let depth = &mut looks.entry(rows::queue(row)?).or_default().depth;
        let jobs = rows::count(row, "jobs")?;
        sampler::open(depth, rows::state(row)?, jobs, SET_ASIDE_MAX.unsigned_abs());
    }
    Ok(())
}

/// Adds what the workers have room for.
async fn look_at_slots(
    tx: &mut PgConnection,
    now: Timestamp,
    looks: &mut Looks,
) -> Result<(), StoreError> {
    let found = sqlx::query(
        "SELECT model, format, sum(slots)::bigint AS slots FROM workers WHERE seen_at >= $1
         GROUP BY model, format",
    )
    .bind(now.0 - super::milliseconds(Worker::SILENT_MAX))
    .fetch_all(tx)
    .await
    .map_err(unavailable)?;
    for row in &found {
        looks.entry(rows::queue(row)?).or_default().slots = rows::count(row, "slots")?;
    }
    Ok(())
}

/// Counts what ended after `from` and up to `to`.
async fn look_at_ended(
    tx: &mut PgConnection,
    from: i64,
    to: i64,
    looks: &mut Looks,
) -> Result<(), StoreError> {
    let found = sqlx::query(
        "WITH ended AS MATERIALIZED (
             SELECT job_id, model, format, outcome IS NULL AS is_cancelled, prompt_tokens,
                    completion_tokens, finished_at, claim_at, first_token_ms
             FROM results WHERE finished_at > $1 AND finished_at <= $2
         ), told AS (
             SELECT ended.*, state, submitted_at, started_at
             FROM ended JOIN jobs ON jobs.id = job_id
             WHERE jobs.id = ANY(ARRAY(SELECT job_id FROM ended))
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
         SELECT model, format, state AS name, NULL AS bucket, count(*) AS jobs,
                sum(prompt_tokens)::bigint AS prompt_tokens,
                sum(completion_tokens)::bigint AS completion_tokens
         FROM told GROUP BY model, format, state
         UNION ALL
         -- A bound is of its own bucket, and width_bucket counts it to the next.
         SELECT model, format, name, width_bucket(ms - 1, $3), count(*),
                greatest(0, sum(ms))::bigint, 0
         FROM latencies GROUP BY 1, 2, 3, 4",
    )
    .bind(from)
    .bind(to)
    .bind(BUCKETS_MS.as_slice())
    .fetch_all(tx)
    .await
    .map_err(unavailable)?;
    for row in &found {
        let sample = &mut looks.entry(rows::queue(row)?).or_default().ended;
        let (name, jobs): (&str, u64) = (rows::get(row, "name")?, rows::count(row, "jobs")?);
        match rows::get::<Option<i32>>(row, "bucket")? {
            Some(bucket) => {
                let sum_ms = rows::count(row, "prompt_tokens")?;
                sampler::latency(sample, name, bucket.unsigned_abs() as usize, jobs, sum_ms);
            }
            None => {
                sample.prompt_tokens += rows::count(row, "prompt_tokens")?;
                sample.completion_tokens += rows::count(row, "completion_tokens")?;
                sampler::end(sample, name, jobs);
            }
        }
    }
    Ok(())
}

fn names(queue: Option<&QueueName>) -> (&str, &str) {
    queue.map_or(("", ""), |queue| (&queue.model, &queue.format))
}

/// Adds samples to a period.
async fn add(
    tx: &mut PgConnection,
    period: Period,
    at: Timestamp,
    samples: &[(Option<QueueName>, Sample)],
) -> Result<(), StoreError> {
    let period_s = period.length().as_secs() as i64;
    let (models, formats): (Vec<&str>, Vec<&str>) =
        samples.iter().map(|(queue, _)| names(queue.as_ref())).unzip();
    let there = sqlx::query(
        "SELECT model, format, sample::text FROM samples
         JOIN UNNEST($1::text[], $2::text[]) AS wanted (model, format) USING (model, format)
         WHERE period_s = $3 AND at = $4",
    )
    .bind(&models)
    .bind(&formats)
    .bind(period_s)
    .bind(at.0)
    .fetch_all(&mut *tx)
    .await
    .map_err(unavailable)?;
    let mut before = std::collections::HashMap::with_capacity(there.len());
    for row in &there {
        let queue = rows::queue(row)?;
        before.insert((queue.model, queue.format), stored(row)?);
    }
    let merged: Vec<String> = samples
        .iter()
        .map(|(queue, sample)| {
            let (model, format) = names(queue.as_ref());
            let known = before.remove(&(model.to_owned(), format.to_owned()));
            let mut whole = known.unwrap_or_default();
            whole.merge(sample);
            serde_json::to_string(&whole).expect("numbers under texts")
        })
        .collect();
    sqlx::query(
        "INSERT INTO samples (model, format, period_s, at, sample)
         SELECT model, format, $4, $5, sample::jsonb
         FROM UNNEST($1::text[], $2::text[], $3::text[]) AS added (model, format, sample)
         ON CONFLICT (model, format, period_s, at) DO UPDATE SET sample = excluded.sample",
    )
    .bind(models)
    .bind(formats)
    .bind(merged)
    .bind(period_s)
    .bind(at.0)
    .execute(tx)
    .await
    .map_err(unavailable)?;
    Ok(())
}

fn stored(row: &PgRow) -> Result<Sample, StoreError> {
    serde_json::from_str(rows::get(row, "sample")?).map_err(|error| rows::damaged("sample", error))
}

/// The queues as they were sampled last.
pub(super) async fn sampled(pool: &PgPool) -> Result<Option<Snapshot>, StoreError> {
    let row = sqlx::query("SELECT taken_at, state::text FROM sampler")
        .fetch_optional(pool)
        .await
        .map_err(unavailable)?;
    let Some(row) = row else { return Ok(None) };
    let state: State = serde_json::from_str(rows::get(&row, "state")?)
        .map_err(|error| rows::damaged("sampler", error))?;
    Ok(Some(Snapshot { at: rows::time(&row, "taken_at")?, queues: state.queues }))
}

/// A queue's samples, or those of all together.
pub(super) async fn read(
    pool: &PgPool,
    queue: Option<&QueueName>,
    period: Period,
    from: Timestamp,
    to: Timestamp,
) -> Result<Vec<Point>, StoreError> {
    let (model, format) = names(queue);
    let found = sqlx::query(
        "SELECT at, sample::text FROM samples
         WHERE model = $1 AND format = $2 AND period_s = $3 AND at >= $4 AND at < $5 ORDER BY at",
    )
    .bind(model)
    .bind(format)
    .bind(period.length().as_secs() as i64)
    .bind(period.begin(from).0)
    .bind(to.0)
    .fetch_all(pool)
    .await
    .map_err(unavailable)?;
    found.iter().map(|row| Ok(Point { at: rows::time(row, "at")?, sample: stored(row)? })).collect()
}

/// Deletes samples that are as old as theirs are kept.
pub(super) async fn sweep(connection: &mut PgConnection, now: i64) -> Result<(), StoreError> {
    for period in Period::ALL {
        sqlx::query("DELETE FROM samples WHERE period_s = $1 AND at < $2")
            .bind(period.length().as_secs() as i64)
            .bind(now.saturating_sub(super::milliseconds(period.kept())))
            .execute(&mut *connection)
            .await
            .map_err(unavailable)?;
    }
    Ok(())
}
