//! Sampling of the queues. The sampling process holds the only row of `sampler` until its transaction
//! ends, so that each sample is added to a period once; other processes skip it.
//!
//! Statements that end jobs leave a row in `recent_ends`, which the sampler deletes as it counts it.

use std::{collections::HashMap, time::Instant};

use sqlx::PgConnection;

use super::{
    PostgresStore,
    calls::query,
    history::{names, observe},
    rows::{self, milliseconds},
};
use crate::{
    job::{QueueName, Timestamp},
    store::{
        StoreError,
        history::{BUCKETS_MS, DEPTH_MAX, Period, SAMPLE_EVERY, Sample, Subject},
        sampler::{self, Observations, SUBJECTS_MAX, State, Subjects},
        workers::Worker,
    },
};

/// Maximum number of scheduled and retrying jobs that are counted, over all queues.
const SET_ASIDE_MAX: i64 = 100_000;

/// Locks the sampler's row if it is free and due; returns its state, the time of the last sample and the
/// present time.
async fn lock(
    tx: &mut PgConnection,
    now: Option<i64>,
) -> Result<Option<(State, Timestamp, Timestamp)>, StoreError> {
    let first = query(
        "INSERT INTO sampler (taken_at, state)
         SELECT now, jsonb_build_object('cursor', now, 'queues', '[]'::jsonb)
         FROM (SELECT store_now_ms($1) AS now) AS clock
         WHERE NOT EXISTS (SELECT FROM sampler) ON CONFLICT DO NOTHING",
    )
    .bind(now)
    .execute(&mut *tx)
    .await?;
    if first.rows_affected() > 0 {
        // Jobs that ended earlier are charged, and counted nowhere else.
        query(TAKE_ENDS).execute(&mut *tx).await?;
    }
    let row = query(
        "SELECT taken_at, state::text, store_now_ms($1) AS now FROM sampler
         WHERE taken_at <= store_now_ms($1) - $2 FOR UPDATE SKIP LOCKED",
    )
    .bind(now)
    .bind(milliseconds(SAMPLE_EVERY))
    .fetch_optional(tx)
    .await?;
    let Some(row) = row else { return Ok(None) };
    let state: State = rows::document(&row, "state")?;
    let (taken_at, now) = (rows::time(&row, "taken_at")?, rows::time(&row, "now")?);
    Ok(state.is_due(taken_at, now).then_some((state, taken_at, now)))
}

/// Samples the queues if a sample is due.
pub(super) async fn sample(store: &PostgresStore) -> Result<bool, StoreError> {
    let given = store.clock_parameter();
    let mut tx = store.begin().await?;
    let Some((mut state, taken_at, now)) = lock(&mut tx, given).await? else {
        // Also commits the first row, which is not due yet.
        tx.commit().await?;
        return Ok(false);
    };
    let started = Instant::now();
    let mut observed = Observations::new();
    observe_open(&mut tx, &mut observed).await?;
    observe_unannounced(&mut tx, &mut observed).await?;
    observe_slots(&mut tx, now, &mut observed).await?;
    measure_workers(&mut tx, now).await?;
    let (covered_ms, mut subjects) = (sampler::covered_ms(taken_at, now), Subjects::default());
    observe_ends(&mut tx, &mut observed, &mut subjects).await?;
    observe_loads(&mut tx, now, covered_ms, &mut subjects).await?;
    if given.is_none() {
        state.took(started.elapsed());
    }
    let samples = sampler::advance(&mut state, taken_at, now, observed);
    for period in Period::ALL {
        add(&mut tx, period, period.begin(now), &samples).await?;
    }
    let samples = subjects.samples(covered_ms);
    for period in Subject::PERIODS {
        add_subjects(&mut tx, period, period.begin(now), &samples).await?;
    }
    query("UPDATE sampler SET taken_at = $1, state = $2::text::jsonb")
        .bind(now.0)
        .bind(rows::to_json(&state))
        .execute(&mut *tx)
        .await?;
    tx.commit().await?;
    Ok(true)
}

/// Counts unfinished jobs: queued ones along the index of each queue, the others all together.
async fn observe_open(
    tx: &mut PgConnection,
    observed: &mut Observations,
) -> Result<(), StoreError> {
    let queued = query(
        "WITH RECURSIVE queue AS (
             (SELECT model, format FROM open_jobs WHERE state = 'queued'
              ORDER BY model, format LIMIT 1)
             UNION ALL
             SELECT next.model, next.format FROM queue, LATERAL (
                 SELECT model, format FROM open_jobs
                 WHERE state = 'queued' AND (model, format) > (queue.model, queue.format)
                 ORDER BY model, format LIMIT 1
             ) AS next
         )
         SELECT queue.model, queue.format, jobs, submitted_at FROM queue, LATERAL (
             SELECT count(*) AS jobs FROM (
                 SELECT FROM open_jobs WHERE state = 'queued' AND model = queue.model
                                  AND format = queue.format LIMIT $1 + 1
             ) AS counted_one_by_one
         ) AS counted, LATERAL (
             SELECT submitted_at FROM open_jobs
             WHERE state = 'queued' AND model = queue.model AND format = queue.format
             ORDER BY id LIMIT 1
         ) AS oldest",
    )
    .bind(DEPTH_MAX)
    .fetch_all(&mut *tx)
    .await?;
    for row in &queued {
        let depth = &mut observed.entry(rows::queue(row)?).or_default().depth;
        depth.queued = rows::count(row, "jobs")?.min(DEPTH_MAX.unsigned_abs());
        depth.or_more = rows::integer(row, "jobs")? > DEPTH_MAX;
        depth.oldest_queued_at = Some(rows::time(row, "submitted_at")?);
    }
    let others = query(
        "SELECT model, format, state, count(*) AS jobs FROM (
             SELECT model, format, state FROM open_jobs WHERE state = 'running'
             UNION ALL
             (SELECT model, format, state FROM open_jobs WHERE state IN ('scheduled', 'retrying')
              LIMIT $1)
         ) AS open GROUP BY model, format, state",
    )
    .bind(SET_ASIDE_MAX)
    .fetch_all(tx)
    .await?;
    for row in &others {
        let depth = &mut observed.entry(rows::queue(row)?).or_default().depth;
        let jobs = rows::count(row, "jobs")?;
        sampler::open(depth, rows::state(row)?, jobs, SET_ASIDE_MAX.unsigned_abs());
    }
    Ok(())
}

/// Adds the time of each queue's oldest announcement, with one look at the index for each queue.
async fn observe_unannounced(
    tx: &mut PgConnection,
    observed: &mut Observations,
) -> Result<(), StoreError> {
    let oldest = query(
        "WITH RECURSIVE oldest AS (
             (SELECT model, format, at FROM announcements ORDER BY model, format, at LIMIT 1)
             UNION ALL
             SELECT next.model, next.format, next.at FROM oldest, LATERAL (
                 SELECT model, format, at FROM announcements
                 WHERE (model, format) > (oldest.model, oldest.format)
                 ORDER BY model, format, at LIMIT 1
             ) AS next
         )
         SELECT model, format, at FROM oldest",
    );
    for row in &oldest.fetch_all(tx).await? {
        let depth = &mut observed.entry(rows::queue(row)?).or_default().depth;
        depth.unannounced_since = Some(rows::time(row, "at")?);
    }
    Ok(())
}

/// Adds the slots of the workers.
async fn observe_slots(
    tx: &mut PgConnection,
    now: Timestamp,
    observed: &mut Observations,
) -> Result<(), StoreError> {
    let found = query(
        "SELECT model, format, sum(slots)::bigint AS slots FROM workers WHERE seen_at >= $1
         GROUP BY model, format",
    )
    .bind(now.0 - milliseconds(Worker::SILENT_MAX))
    .fetch_all(tx)
    .await?;
    for row in &found {
        observed.entry(rows::queue(row)?).or_default().slots = rows::count(row, "slots")?;
    }
    Ok(())
}

/// Measures the rate of a worker that is at least half full, in prompt and generated tokens per second; for
/// `wanted_workers`.
async fn measure_workers(tx: &mut PgConnection, now: Timestamp) -> Result<(), StoreError> {
    query(
        "UPDATE queues
         SET worker_tokens_per_s = 0.9 * coalesce(worker_tokens_per_s, busy.rate) + 0.1 * busy.rate
         FROM (SELECT model, format,
                      avg((vitals ->> 'prefill_tokens_per_s')::float8
                          + (vitals ->> 'decode_tokens_per_s')::float8) AS rate
               FROM workers WHERE seen_at >= $1 AND running * 2 >= slots GROUP BY model, format
              ) AS busy
         WHERE queues.model = busy.model AND queues.format = busy.format AND busy.rate > 0",
    )
    .bind(now.0 - milliseconds(Worker::SILENT_MAX))
    .execute(tx)
    .await?;
    Ok(())
}

/// Deletes what statements that end jobs left, and adds the charges of answers to their day.
const TAKE_ENDS: &str = "
WITH ends AS (
    DELETE FROM recent_ends
    RETURNING model, format, state, tenant, owner, api_key, tier, currency, day, jobs, prompt_tokens,
              cached_tokens, completion_tokens, charge, start_ms, run_ms, first_token_ms
), charged AS (
    INSERT INTO charges (tenant, day, api_key, model, tier, currency, answers, prompt_tokens, cached_tokens,
                         completion_tokens, charge)
    SELECT tenant, day, coalesce(api_key, ''), model, coalesce(tier, 'default'), coalesce(currency, ''),
           sum(jobs), sum(prompt_tokens), sum(cached_tokens), sum(completion_tokens),
           coalesce(sum(charge), 0)
    FROM ends WHERE state = 'completed' AND tenant IS NOT NULL AND day IS NOT NULL
    GROUP BY 1, 2, 3, 4, 5, 6 ORDER BY 1, 2, 3, 4, 5, 6
    ON CONFLICT (tenant, day, api_key, model, tier, currency) DO UPDATE SET
        answers = charges.answers + excluded.answers,
        prompt_tokens = charges.prompt_tokens + excluded.prompt_tokens,
        cached_tokens = charges.cached_tokens + excluded.cached_tokens,
        completion_tokens = charges.completion_tokens + excluded.completion_tokens,
        charge = charges.charge + excluded.charge
)
SELECT model, format, state AS name, tenant, owner, jobs, prompt_tokens, completion_tokens, start_ms,
       run_ms, first_token_ms
FROM ends";

/// Counts the jobs that ended since the last sample, and deletes what it has counted.
async fn observe_ends(
    tx: &mut PgConnection,
    observed: &mut Observations,
    subjects: &mut Subjects,
) -> Result<(), StoreError> {
    for row in &query(TAKE_ENDS).fetch_all(tx).await? {
        let mut sample = Sample::default();
        observe(row, None, &mut sample)?;
        for (name, column) in
            [("start", "start_ms"), ("run", "run_ms"), ("first_token", "first_token_ms")]
        {
            for ms in rows::get::<Option<Vec<i64>>>(row, column)?.unwrap_or_default() {
                // A value equal to a bound belongs to that bucket.
                let bucket = BUCKETS_MS.partition_point(|bound| *bound < ms);
                sampler::latency(&mut sample, name, bucket, 1, u64::try_from(ms).unwrap_or(0));
            }
        }
        subjects.ended(rows::get(row, "tenant")?, rows::get(row, "owner")?, &sample);
        observed.entry(rows::queue(row)?).or_default().ended.merge(&sample);
    }
    Ok(())
}

/// Adds what the workers report of the present.
async fn observe_loads(
    tx: &mut PgConnection,
    now: Timestamp,
    covered_ms: u64,
    subjects: &mut Subjects,
) -> Result<(), StoreError> {
    let found = query(
        "SELECT owner, running, slots,
                coalesce((vitals ->> 'kv_blocks_used')::bigint, 0) AS kv_used,
                coalesce((vitals ->> 'kv_blocks_total')::bigint, 0) AS kv_total,
                coalesce((vitals ->> 'prefill_tokens_per_s')::float8, 0) AS prefill,
                coalesce((vitals ->> 'decode_tokens_per_s')::float8, 0) AS decode,
                coalesce((vitals -> 'report' ->> 'utilisation')::float8, 0) AS busy
         FROM workers WHERE seen_at >= $1 AND slots > 0 ORDER BY running DESC LIMIT $2",
    )
    .bind(now.0 - milliseconds(Worker::SILENT_MAX))
    .bind(SUBJECTS_MAX as i64)
    .fetch_all(tx)
    .await?;
    for row in &found {
        subjects.load(rows::get(row, "owner")?, rows::load(row)?, covered_ms);
    }
    Ok(())
}

/// Adds samples of tenants and workers to a period.
async fn add_subjects(
    tx: &mut PgConnection,
    period: Period,
    at: Timestamp,
    samples: &[(Subject, Sample)],
) -> Result<(), StoreError> {
    let period_s = period.length().as_secs() as i64;
    let (kinds, subjects): (Vec<&str>, Vec<&str>) =
        samples.iter().map(|(subject, _)| (subject.kind(), subject.name())).unzip();
    let there = query(
        "SELECT kind, name, sample::text FROM subject_samples
         JOIN UNNEST($1::text[], $2::text[]) AS wanted (kind, name) USING (kind, name)
         WHERE period_s = $3 AND at = $4",
    )
    .bind(&kinds)
    .bind(&subjects)
    .bind(period_s)
    .bind(at.0)
    .fetch_all(&mut *tx)
    .await?;
    let mut before: HashMap<(String, String), Sample> = HashMap::with_capacity(there.len());
    for row in &there {
        let of = (rows::get(row, "kind")?, rows::get(row, "name")?);
        before.insert(of, rows::document(row, "sample")?);
    }
    let merged = samples.iter().map(|(subject, sample)| {
        let of = (subject.kind().to_owned(), subject.name().to_owned());
        let mut whole = before.remove(&of).unwrap_or_default();
        whole.merge(sample);
        rows::to_json(&whole)
    });
    let merged: Vec<String> = merged.collect();
    query(
        "INSERT INTO subject_samples (kind, name, period_s, at, sample)
         SELECT kind, name, $4, $5, sample::jsonb
         FROM UNNEST($1::text[], $2::text[], $3::text[]) AS added (kind, name, sample)
         ON CONFLICT (kind, name, period_s, at) DO UPDATE SET sample = excluded.sample",
    )
    .bind(kinds)
    .bind(subjects)
    .bind(merged)
    .bind(period_s)
    .bind(at.0)
    .execute(tx)
    .await?;
    Ok(())
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
    let there = query(
        "SELECT model, format, sample::text FROM samples
         JOIN UNNEST($1::text[], $2::text[]) AS wanted (model, format) USING (model, format)
         WHERE period_s = $3 AND at = $4",
    )
    .bind(&models)
    .bind(&formats)
    .bind(period_s)
    .bind(at.0)
    .fetch_all(&mut *tx)
    .await?;
    let mut before = HashMap::with_capacity(there.len());
    for row in &there {
        let queue = rows::queue(row)?;
        before.insert((queue.model, queue.format), rows::document(row, "sample")?);
    }
    let merged: Vec<String> = samples
        .iter()
        .map(|(queue, sample)| {
            let (model, format) = names(queue.as_ref());
            let known = before.remove(&(model.to_owned(), format.to_owned()));
            let mut whole: Sample = known.unwrap_or_default();
            whole.merge(sample);
            rows::to_json(&whole)
        })
        .collect();
    query(
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
    .await?;
    Ok(())
}
