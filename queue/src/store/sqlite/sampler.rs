//! Sampling of the queues: one transaction each. Finished jobs are found in the order of commits.

use std::ops::RangeInclusive;

use super::{
    SqliteStore,
    calls::{Connection, query},
    history::{names, observe},
    rows::{self, milliseconds},
    workers,
};
use crate::{
    job::{JobState, QueueName, Timestamp},
    store::{
        StoreError,
        history::{BUCKETS_MS, DEPTH_MAX, Period, Sample, Subject},
        sampler::{self, Observations, SUBJECTS_MAX, State, Subjects},
        workers::Worker,
    },
};

/// Samples the queues if a sample is due.
pub(super) async fn sample(store: &SqliteStore) -> Result<bool, StoreError> {
    let now = Timestamp(store.clock_parameter());
    let mut tx = store.begin().await?;
    let row = query("SELECT taken_at, state FROM sampler").fetch_optional(&mut *tx).await?;
    let (mut state, taken_at) = match row {
        Some(row) => (rows::document(&row, "state")?, rows::time(&row, "taken_at")?),
        // Jobs that finished earlier are not counted.
        None => (State { cursor: last_result(&mut tx).await?, ..State::default() }, Timestamp(0)),
    };
    if !state.is_due(taken_at, now) {
        return Ok(false);
    }
    let mut observed = Observations::new();
    observe_open(&mut tx, &mut observed).await?;
    let since = now.0.saturating_sub(milliseconds(Worker::SILENT_MAX));
    for (queue, _, slots) in workers::serving(&mut tx, since).await? {
        observed.entry(queue).or_default().slots = slots;
    }
    let end = last_result(&mut tx).await?;
    let (covered_ms, mut subjects) = (sampler::covered_ms(taken_at, now), Subjects::default());
    observe_finished(&mut tx, state.cursor..=end, &mut observed, &mut subjects).await?;
    observe_loads(&mut tx, since, covered_ms, &mut subjects).await?;
    state.cursor = end;
    state.took(Timestamp(store.clock_parameter()).since(now));
    let samples = sampler::advance(&mut state, taken_at, now, observed);
    for period in Period::ALL {
        for (queue, sample) in &samples {
            add(&mut tx, queue.as_ref(), period, period.begin(now), sample).await?;
        }
    }
    for (subject, sample) in subjects.samples(covered_ms) {
        for period in Subject::PERIODS {
            add_subject(&mut tx, &subject, period, period.begin(now), &sample).await?;
        }
    }
    query(
        "INSERT INTO sampler (id, taken_at, state) VALUES (1, $1, $2)
         ON CONFLICT (id) DO UPDATE SET taken_at = excluded.taken_at, state = excluded.state",
    )
    .bind(now.0)
    .bind(rows::to_json(&state))
    .execute(&mut *tx)
    .await?;
    tx.commit().await?;
    Ok(true)
}

/// Returns the number of the latest result.
async fn last_result(tx: &mut Connection) -> Result<i64, StoreError> {
    let last = query("SELECT coalesce(max(seq), 0) AS seq FROM results");
    rows::integer(&last.fetch_one(tx).await?, "seq")
}

/// Counts unfinished jobs along the index by queue and state.
async fn observe_open(tx: &mut Connection, observed: &mut Observations) -> Result<(), StoreError> {
    let queues = query(
        // Each step is one search of the index, however many jobs a queue has.
        "WITH RECURSIVE models (model) AS (
             SELECT min(model) FROM jobs
             UNION ALL
             SELECT (SELECT min(model) FROM jobs WHERE jobs.model > models.model)
             FROM models WHERE models.model IS NOT NULL
         ), queues (model, format) AS (
             SELECT model, (SELECT min(format) FROM jobs WHERE jobs.model = models.model)
             FROM models WHERE model IS NOT NULL
             UNION ALL
             SELECT model, (SELECT min(format) FROM jobs
                            WHERE jobs.model = queues.model AND jobs.format > queues.format)
             FROM queues WHERE format IS NOT NULL
         )
         SELECT model, format FROM queues WHERE format IS NOT NULL",
    )
    .fetch_all(&mut *tx)
    .await?;
    for row in &queues {
        let queue = rows::queue(row)?;
        let depth = &mut observed.entry(queue.clone()).or_default().depth;
        for state in [JobState::Queued, JobState::Running, JobState::Scheduled, JobState::Retrying]
        {
            let row = query(
                "SELECT count(*) AS jobs FROM (
                     SELECT 1 FROM jobs WHERE model = $1 AND format = $2 AND state = $3 LIMIT $4
                 )",
            )
            .bind(&queue.model)
            .bind(&queue.format)
            .bind(state.as_str())
            .bind(DEPTH_MAX)
            .fetch_one(&mut *tx)
            .await?;
            sampler::open(depth, state, rows::count(&row, "jobs")?, DEPTH_MAX.unsigned_abs());
        }
        let oldest = query(
            "SELECT submitted_at FROM jobs WHERE model = $1 AND format = $2 AND state = 'queued'
             ORDER BY id LIMIT 1",
        )
        .bind(&queue.model)
        .bind(&queue.format)
        .fetch_optional(&mut *tx)
        .await?;
        depth.oldest_queued_at = oldest.map(|row| rows::time(&row, "submitted_at")).transpose()?;
    }
    Ok(())
}

/// Counts the results after the first number of a range and up to its last.
async fn observe_finished(
    tx: &mut Connection,
    range: RangeInclusive<i64>,
    observed: &mut Observations,
    subjects: &mut Subjects,
) -> Result<(), StoreError> {
    let bounds: Vec<String> = (0..)
        .zip(BUCKETS_MS)
        .map(|(bucket, ms)| format!("WHEN ms <= {ms} THEN {bucket}"))
        .collect();
    let statement = format!(
        "WITH told AS (
             SELECT model, format, tenant, claim_owner, state, prompt_tokens, completion_tokens,
                    submitted_at, started_at, finished_at, claim_at, first_token_ms
             FROM results JOIN jobs ON jobs.id = job_id WHERE seq > $1 AND seq <= $2
         ), latencies AS (
             SELECT model, format, tenant, claim_owner, 'start' AS name, started_at - submitted_at AS ms
             FROM told WHERE started_at IS NOT NULL
             UNION ALL
             SELECT model, format, tenant, claim_owner, 'run', finished_at - claim_at
             FROM told WHERE state = 'completed' AND claim_at IS NOT NULL
             UNION ALL
             SELECT model, format, tenant, claim_owner, 'first_token', claim_at + first_token_ms - submitted_at
             FROM told WHERE state = 'completed' AND claim_at + first_token_ms IS NOT NULL
         )
         SELECT model, format, tenant, claim_owner, state AS name, -1 AS bucket, count(*) AS jobs,
                sum(prompt_tokens) AS prompt_tokens, sum(completion_tokens) AS completion_tokens
         FROM told GROUP BY model, format, tenant, claim_owner, state
         UNION ALL
         SELECT model, format, tenant, claim_owner, name, CASE {} ELSE {} END AS bucket, count(*),
                max(0, sum(ms)), 0
         FROM latencies GROUP BY model, format, tenant, claim_owner, name, bucket",
        bounds.join(" "),
        BUCKETS_MS.len()
    );
    let found = query(sqlx::AssertSqlSafe(statement)).bind(*range.start()).bind(*range.end());
    for row in &found.fetch_all(tx).await? {
        let mut sample = Sample::default();
        observe(row, usize::try_from(rows::integer(row, "bucket")?).ok(), &mut sample)?;
        subjects.ended(rows::get(row, "tenant")?, rows::get(row, "claim_owner")?, &sample);
        observed.entry(rows::queue(row)?).or_default().ended.merge(&sample);
    }
    Ok(())
}

/// Adds what the workers report of the present.
async fn observe_loads(
    tx: &mut Connection,
    since: i64,
    covered_ms: u64,
    subjects: &mut Subjects,
) -> Result<(), StoreError> {
    let found = query(
        "SELECT owner, heartbeat ->> '$.running' AS running, heartbeat ->> '$.slots' AS slots,
                coalesce(heartbeat ->> '$.measured.kv_blocks_used', 0) AS kv_used,
                coalesce(heartbeat ->> '$.measured.kv_blocks_total', 0) AS kv_total,
                CAST(coalesce(heartbeat ->> '$.measured.prefill_tokens_per_s', 0) AS REAL) AS prefill,
                CAST(coalesce(heartbeat ->> '$.measured.decode_tokens_per_s', 0) AS REAL) AS decode,
                CAST(coalesce(heartbeat ->> '$.measured.report.utilisation', 0) AS REAL) AS busy
         FROM workers WHERE seen_at >= $1 AND heartbeat ->> '$.slots' > 0
         ORDER BY heartbeat ->> '$.running' DESC LIMIT $2",
    );
    let found = found.bind(since).bind(SUBJECTS_MAX as i64).fetch_all(tx).await?;
    for row in &found {
        subjects.load(rows::get(row, "owner")?, rows::load(row)?, covered_ms);
    }
    Ok(())
}

/// Adds the sample of a tenant or worker to a period.
async fn add_subject(
    tx: &mut Connection,
    subject: &Subject,
    period: Period,
    at: Timestamp,
    sample: &Sample,
) -> Result<(), StoreError> {
    let period_s = period.length().as_secs() as i64;
    let known = query(
        "SELECT sample FROM subject_samples
         WHERE kind = $1 AND name = $2 AND period_s = $3 AND at = $4",
    );
    let known = known.bind(subject.kind()).bind(subject.name()).bind(period_s).bind(at.0);
    let known = known.fetch_optional(&mut *tx).await?;
    let mut whole: Sample = match &known {
        Some(row) => rows::document(row, "sample")?,
        None => Sample::default(),
    };
    whole.merge(sample);
    query(
        "INSERT OR REPLACE INTO subject_samples (kind, name, period_s, at, sample)
         VALUES ($1, $2, $3, $4, $5)",
    )
    .bind(subject.kind())
    .bind(subject.name())
    .bind(period_s)
    .bind(at.0)
    .bind(rows::to_json(&whole))
    .execute(tx)
    .await?;
    Ok(())
}

/// Adds a sample to a period.
async fn add(
    tx: &mut Connection,
    queue: Option<&QueueName>,
    period: Period,
    at: Timestamp,
    sample: &Sample,
) -> Result<(), StoreError> {
    let (model, format) = names(queue);
    let period_s = period.length().as_secs() as i64;
    let known = query(
        "SELECT sample FROM samples
         WHERE model = $1 AND format = $2 AND period_s = $3 AND at = $4",
    )
    .bind(model)
    .bind(format)
    .bind(period_s)
    .bind(at.0)
    .fetch_optional(&mut *tx)
    .await?;
    let mut whole: Sample = match &known {
        Some(row) => rows::document(row, "sample")?,
        None => Sample::default(),
    };
    whole.merge(sample);
    query(
        "INSERT OR REPLACE INTO samples (model, format, period_s, at, sample)
         VALUES ($1, $2, $3, $4, $5)",
    )
    .bind(model)
    .bind(format)
    .bind(period_s)
    .bind(at.0)
    .bind(rows::to_json(&whole))
    .execute(tx)
    .await?;
    Ok(())
}
