//! The ends of jobs: attempts that finished, and cancels.
//!
//! A job that ends leaves `open_jobs`: one statement moves its row to `jobs`, records its result, and adds
//! to `recent_ends` what the sampler counts.

use std::collections::{HashMap, HashSet};

use uuid::Uuid;

use super::{
    PostgresStore,
    calls::{Query, query},
    dialect::id_list,
    rows::{self, milliseconds, stored},
};
use crate::{
    job::{JobId, JobState},
    outcome::{JobError, Outcome, Usage},
    store::{FinishedAttempt, Settled, StoreError, attempts},
    wire,
};

/// The columns of an open job that its ended row keeps as they are.
macro_rules! kept_columns {
    () => {
        "model, format, tenant, priority, cost, shard_key, attempts_max, expires_at, submitted_at,
         replay_of, job, custom_id, line_key, line_shape, metadata, tier, api_key, started_at,
         claimed_at"
    };
}

/// The rest of a statement that deletes rows of `open_jobs` in a CTE `ended`. Its columns are `id`, the
/// [`kept_columns`], what follows below, and those of the result. Needs a CTE `clock`.
macro_rules! end_jobs {
    () => {
        concat!(
            "
), kept AS (
    INSERT INTO jobs (id, state, epoch, attempts, owner, error_code, error_signature, ",
            kept_columns!(),
            ")
    SELECT id, state, epoch, attempts, owner, error_code, error_signature, ",
            kept_columns!(),
            "
    FROM ended ON CONFLICT (id) DO NOTHING
), charged AS (
    SELECT ended.*, prices.currency, ",
            charge_of_ended!(),
            " AS charge FROM ended",
            price_of_ended!(),
            "
), recorded AS (
    INSERT INTO results (job_id, tenant, model, format, outcome, prompt_tokens, cached_tokens,
                         completion_tokens, finished_at, claim_epoch, claim_owner, claim_at,
                         first_token_ms, charge, currency)
    SELECT id, tenant, model, format, outcome, prompt_tokens, cached_tokens, completion_tokens, now,
           claim_epoch, claim_owner, claim_at, first_token_ms, charge, currency
    FROM charged, clock ON CONFLICT (job_id) DO NOTHING
), counted AS (
    INSERT INTO recent_ends (model, format, state, tenant, owner, api_key, tier, currency, day, jobs,
                             prompt_tokens, cached_tokens, completion_tokens, charge, start_ms,
                             run_ms, first_token_ms)
    SELECT model, format, state, tenant, claim_owner, api_key, tier, currency, now / 86400000,
           count(*), sum(prompt_tokens), sum(cached_tokens), sum(completion_tokens), sum(charge),
           array_agg(started_at - submitted_at) FILTER (WHERE started_at IS NOT NULL),
           array_agg(now - claim_at) FILTER (WHERE state = 'completed' AND claim_at IS NOT NULL),
           array_agg(claim_at + first_token_ms - submitted_at)
               FILTER (WHERE state = 'completed' AND claim_at + first_token_ms IS NOT NULL)
    FROM charged, clock
    GROUP BY model, format, state, tenant, claim_owner, api_key, tier, currency, now
)"
        )
    };
}
pub(super) use end_jobs;
pub(super) use kept_columns;

/// Records the attempts with a valid claim: state, result, usage and error at once. A claim that lost its
/// lease is valid until the job is claimed again. The other attempts are fenced out. The statement
/// completes the verdict, since it reads the number of attempts: after an error, a job without attempts
/// left has failed.
const FINISH: &str = concat!(
    "
WITH clock AS (SELECT store_now_ms($1) AS now), done AS MATERIALIZED (
    SELECT * FROM UNNEST($2::uuid[], $3::bigint[], $4::text[], $5::bytea[], $6::bytea[],
                         $7::bigint[], $8::bigint[], $9::float8[], $13::text[], $14::text[],
                         $15::bigint[], $16::bigint[], $18::bigint[])
           AS done (id, epoch, verdict, outcome, error, prompt_tokens, completion_tokens, jitter,
                    code, signature, first_token_ms, claim_id, cached_tokens)
), retrying AS (
    UPDATE open_jobs
    SET state = 'retrying',
        run_at = (SELECT now FROM clock)
                 + (least($10 * 2 ^ least(attempts, $12), $11) * jitter)::bigint,
        attempts = attempts + 1, error_code = code, error_signature = signature, claim_id = NULL,
        lease_until = NULL, checkpoint = NULL
    FROM done
    WHERE $17 AND open_jobs.id = ANY($2) AND open_jobs.id = done.id AND open_jobs.epoch = done.epoch
      AND open_jobs.claim_id = done.claim_id AND open_jobs.state IN ('running', 'queued')
      AND verdict = 'retrying' AND attempts + 1 < attempts_max
    RETURNING open_jobs.id, open_jobs.epoch, owner, claimed_at, error
), ended AS (
    DELETE FROM open_jobs USING done
    WHERE open_jobs.id = ANY($2) AND open_jobs.id = done.id AND open_jobs.epoch = done.epoch
      AND open_jobs.claim_id = done.claim_id AND open_jobs.state IN ('running', 'queued')
      AND (verdict <> 'retrying' OR attempts + 1 >= attempts_max)
    RETURNING open_jobs.id, open_jobs.epoch, owner, ",
    kept_columns!(),
    ", CASE verdict WHEN 'retrying' THEN 'failed' ELSE verdict END AS state,
              attempts + (error IS NOT NULL)::integer AS attempts, code AS error_code,
              signature AS error_signature, error, outcome, prompt_tokens, cached_tokens,
              completion_tokens, first_token_ms, open_jobs.epoch AS claim_epoch, owner AS claim_owner,
              claimed_at AS claim_at",
    end_jobs!(),
    ", failed AS (
    INSERT INTO attempt_errors (job_id, epoch, at, error, owner, claimed_at)
    SELECT id, epoch, now, error, owner, claimed_at
    FROM (SELECT id, epoch, error, owner, claimed_at FROM retrying
          UNION ALL SELECT id, epoch, error, owner, claimed_at FROM ended) AS attempt, clock
    WHERE error IS NOT NULL
    ON CONFLICT (job_id, epoch) DO UPDATE SET at = excluded.at, error = excluded.error
)
SELECT id, state FROM ended UNION ALL SELECT id, 'retrying' FROM retrying"
);

/// Cancels jobs that have not ended.
const CANCEL: &str = concat!(
    "
WITH clock AS (SELECT store_now_ms($1) AS now), ended AS (
    DELETE FROM open_jobs WHERE id = ANY($2)
    RETURNING id, epoch + 1 AS epoch, NULL AS owner, ",
    kept_columns!(),
    ", 'cancelled' AS state, attempts, error_code, error_signature, NULL::bytea AS outcome,
              0 AS prompt_tokens, 0 AS cached_tokens, 0 AS completion_tokens, NULL::bigint AS first_token_ms,
              NULL::bigint AS claim_epoch, NULL AS claim_owner, NULL::bigint AS claim_at",
    end_jobs!(),
    "
SELECT id FROM ended"
);

/// See [`FINISH`].
pub(super) async fn finish(
    store: &PostgresStore,
    finished: &[FinishedAttempt],
) -> Result<Vec<Settled>, StoreError> {
    let mut seen = HashSet::with_capacity(finished.len());
    // If a claim occurs twice, the first occurrence counts.
    let mut done: Vec<&FinishedAttempt> =
        finished.iter().filter(|done| seen.insert(done.claim)).collect();
    done.sort_unstable_by_key(|done| done.claim);
    let settled = store.fetch_hot(finish_statement(store, &done)).await?;
    let mut states: HashMap<JobId, JobState> = settled
        .iter()
        .map(|row| Ok((rows::id(row, "id")?, rows::state(row)?)))
        .collect::<Result<_, StoreError>>()?;
    let settle = |done: &FinishedAttempt| {
        states.remove(&done.claim.id).map(|state| Settled { id: done.claim.id, state })
    };
    Ok(finished.iter().filter_map(settle).collect())
}

fn finish_statement(store: &PostgresStore, done: &[&FinishedAttempt]) -> Query<'static> {
    let usage = |done: &&FinishedAttempt| match &done.outcome {
        Outcome::Completed(completion) => completion.usage,
        Outcome::Error(_) | Outcome::Expired => Usage::default(),
    };
    // A worker never reports more than the prompt has; the charge depends on it.
    let cached = |done: &&FinishedAttempt| usage(done).cached_tokens.min(usage(done).prompt_tokens);
    fn error<'a>(done: &&'a FinishedAttempt) -> Option<&'a JobError> {
        match &done.outcome {
            Outcome::Error(error) => Some(error),
            Outcome::Completed(_) | Outcome::Expired => None,
        }
    }
    let errors = || done.iter().map(error);
    let verdict = |done: &&FinishedAttempt| attempts::verdict(&done.outcome, 0, u32::MAX).as_str();
    query(FINISH)
        .bind(store.clock_parameter())
        .bind(done.iter().map(|done| Uuid::from(done.claim.id)).collect::<Vec<_>>())
        .bind(done.iter().map(|done| done.claim.epoch).collect::<Vec<_>>())
        .bind(done.iter().map(verdict).collect::<Vec<_>>())
        .bind(done.iter().map(|done| wire::encode(&done.outcome)).collect::<Vec<_>>())
        .bind(errors().map(|error| error.map(wire::encode)).collect::<Vec<_>>())
        .bind(done.iter().map(|done| stored(usage(done).prompt_tokens)).collect::<Vec<_>>())
        .bind(done.iter().map(|done| stored(usage(done).completion_tokens)).collect::<Vec<_>>())
        .bind(done.iter().map(|done| attempts::jitter(done.claim.id)).collect::<Vec<_>>())
        .bind(attempts::BACKOFF_BASE.as_secs_f64() * 1000.0)
        .bind(attempts::BACKOFF_MAX.as_secs_f64() * 1000.0)
        .bind(f64::from(attempts::BACKOFF_DOUBLINGS_MAX))
        .bind(errors().map(|error| error.map(|error| &*error.code)).collect::<Vec<_>>())
        .bind(errors().map(|error| error.map(attempts::signature)).collect::<Vec<_>>())
        .bind(done.iter().map(|done| done.first_token.map(milliseconds)).collect::<Vec<_>>())
        .bind(done.iter().map(|done| done.claim.claim_id).collect::<Vec<_>>())
        // Without errors the statement skips what retries jobs.
        .bind(errors().any(|error| error.is_some()))
        .bind(done.iter().map(|done| stored(cached(done))).collect::<Vec<_>>())
}

/// See [`CANCEL`].
pub(super) async fn cancel(store: &PostgresStore, ids: &[JobId]) -> Result<Vec<JobId>, StoreError> {
    let cancel = query(CANCEL).bind(store.clock_parameter()).bind(id_list(ids.iter().copied()));
    rows::ids(&store.fetch_hot(cancel).await?)
}
