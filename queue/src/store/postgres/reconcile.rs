//! Changes of jobs that time causes: expired leases, deadlines, due jobs.
//!
//! Each statement changes a bounded number of jobs and skips jobs that another transaction has
//! locked, so that several reconcilers share the work without waiting for claims or finishes.

use super::{
    PostgresStore,
    announcements::announce_again,
    calls::query,
    ends::{end_jobs, kept_columns},
    rows::{self, milliseconds},
};
use crate::{
    outcome::Outcome,
    store::{
        Reconciled, StoreError,
        attempts::{AWAY_AFTER, AWAY_LEASE, lease_lost, signature},
    },
    wire,
};

/// Jobs that one statement changes.
const BATCH: i32 = 1000;

/// Extends leases if the store was away: if no reconciler reached it for a while, no worker could renew.
const PULSE: &str = "
WITH clock AS (SELECT store_now_ms($1) AS now), before AS MATERIALIZED (
    SELECT at FROM pulse FOR NO KEY UPDATE
), beat AS (
    UPDATE pulse SET at = (SELECT now FROM clock) FROM before
), workers_extended AS (
    UPDATE worker_leases SET until = (SELECT now FROM clock) + $3
    WHERE (SELECT at FROM before) + $2 < (SELECT now FROM clock)
      AND until < (SELECT now FROM clock) + $3
)
UPDATE open_jobs SET lease_until = (SELECT now FROM clock) + $3
WHERE (SELECT at FROM before) + $2 < (SELECT now FROM clock)
  AND state = 'running' AND lease_until < (SELECT now FROM clock) + $3";

/// Notes that the store was reached: see [`PULSE`].
async fn pulse(store: &PostgresStore) -> Result<(), StoreError> {
    let pulse = query(PULSE).bind(store.clock_parameter());
    let pulse = pulse.bind(milliseconds(AWAY_AFTER)).bind(milliseconds(AWAY_LEASE));
    let extended = store.execute(pulse).await?;
    if extended > 0 {
        tracing::warn!(jobs = extended, "the store was away: leases are extended");
    }
    Ok(())
}

/// Takes jobs with an expired lease from their workers: they are queued again. Only a job that ran alone
/// is charged an attempt, and becomes a dead letter when it was its last one.
const LAPSE: &str = concat!(
    "
WITH clock AS (SELECT store_now_ms($1) AS now), due AS MATERIALIZED (
    SELECT id FROM open_jobs
    WHERE state = 'running' AND coalesce(lease_until, (
              SELECT until FROM worker_leases WHERE worker_leases.owner = open_jobs.owner
          ), 0) <= (SELECT now FROM clock)
    ORDER BY id LIMIT $2 FOR NO KEY UPDATE OF open_jobs SKIP LOCKED
), queued AS (
    UPDATE open_jobs
    SET state = 'queued', attempts = attempts + alone::integer, losses = losses + 1,
        lease_until = NULL, error_code = convert_from($5, 'UTF8'),
        error_signature = convert_from($6, 'UTF8')
    FROM due WHERE open_jobs.id = ANY(ARRAY(SELECT id FROM due)) AND open_jobs.id = due.id
               AND NOT (alone AND attempts + 1 >= attempts_max)
    RETURNING open_jobs.id, epoch, state, tenant, model, format, priority, cost, shard_key, expires_at, tier, owner, claimed_at
), ended AS (
    DELETE FROM open_jobs USING due
    WHERE open_jobs.id = ANY(ARRAY(SELECT id FROM due)) AND open_jobs.id = due.id
      AND alone AND attempts + 1 >= attempts_max
    RETURNING open_jobs.id, epoch, owner, ",
    kept_columns!(),
    ", 'failed' AS state, attempts + 1 AS attempts,
              convert_from($5, 'UTF8') AS error_code, convert_from($6, 'UTF8') AS error_signature,
              $4 AS outcome, 0 AS prompt_tokens, 0 AS cached_tokens, 0 AS completion_tokens,
              NULL::bigint AS first_token_ms, epoch AS claim_epoch, owner AS claim_owner,
              claimed_at AS claim_at",
    end_jobs!(),
    announce_again!("queued"),
    ", moved AS (
    SELECT id, epoch, state, tenant, model, format, priority, cost, shard_key, expires_at, tier, owner, claimed_at FROM queued
    UNION ALL
    SELECT id, epoch, state, tenant, model, format, priority, cost, shard_key, expires_at, tier, owner, claimed_at FROM ended
), errors AS (
    INSERT INTO attempt_errors (job_id, epoch, at, error, owner, claimed_at)
    SELECT id, epoch, now, $3, owner, claimed_at FROM moved, clock ON CONFLICT DO NOTHING
)
SELECT id, state, tenant, model, format, priority, cost, shard_key, expires_at, tier FROM moved ORDER BY id"
);

/// Expires unclaimed jobs past their deadline; ordered like [`PROMOTE`].
const EXPIRE: &str = concat!(
    "
WITH clock AS (SELECT store_now_ms($1) AS now), due AS MATERIALIZED (
    SELECT id FROM open_jobs
    WHERE expires_at <= (SELECT now FROM clock) AND state IN ('scheduled', 'queued', 'retrying')
    ORDER BY expires_at LIMIT $2 FOR UPDATE SKIP LOCKED
), ended AS (
    DELETE FROM open_jobs USING due
    WHERE open_jobs.id = ANY(ARRAY(SELECT id FROM due)) AND open_jobs.id = due.id
    RETURNING open_jobs.id, epoch, owner, ",
    kept_columns!(),
    ", 'expired' AS state, attempts, error_code, error_signature, $3 AS outcome,
              0 AS prompt_tokens, 0 AS cached_tokens, 0 AS completion_tokens, NULL::bigint AS first_token_ms,
              NULL::bigint AS claim_epoch, NULL AS claim_owner, NULL::bigint AS claim_at",
    end_jobs!(),
    "
SELECT id, state, tenant, model, format, priority, cost, shard_key, expires_at, tier FROM ended ORDER BY id"
);

/// Queues scheduled and retrying jobs that are due, in the order of their index. In the order of ids, a
/// planner without statistics may scan a million jobs without a match. Locked rows are skipped, so the
/// order does not matter for deadlocks.
const PROMOTE: &str = concat!(
    "
WITH clock AS (SELECT store_now_ms($1) AS now), due AS MATERIALIZED (
    SELECT id FROM open_jobs
    WHERE state IN ('scheduled', 'retrying') AND run_at <= (SELECT now FROM clock)
    ORDER BY run_at LIMIT $2 FOR NO KEY UPDATE SKIP LOCKED
), moved AS (
    UPDATE open_jobs SET state = 'queued', run_at = NULL
    FROM due WHERE open_jobs.id = ANY(ARRAY(SELECT id FROM due)) AND open_jobs.id = due.id
    RETURNING open_jobs.id, state, tenant, model, format, priority, cost, shard_key, expires_at, tier
)",
    announce_again!("moved"),
    "
SELECT id, state, tenant, model, format, priority, cost, shard_key, expires_at, tier FROM moved ORDER BY id"
);

/// Applies all changes that are due; returns what changed.
pub(super) async fn reconcile(store: &PostgresStore) -> Result<Reconciled, StoreError> {
    let error = lease_lost();
    let (code, signature) = (error.code.clone().into_bytes(), signature(&error).into_bytes());
    let values = [wire::encode(&error), wire::encode(&Outcome::Error(error)), code, signature];
    pulse(store).await?;
    let mut done = Reconciled::default();
    repeat(store, LAPSE, &values, &mut done).await?;
    done.lapsed = done.moved;
    repeat(store, EXPIRE, &[wire::encode(&Outcome::Expired)], &mut done).await?;
    repeat(store, PROMOTE, &[], &mut done).await?;
    done.queued.sort_by_key(|entry| entry.id);
    Ok(done)
}

/// Repeats a statement until it finds fewer jobs than it may change.
async fn repeat(
    store: &PostgresStore,
    statement: &'static str,
    values: &[Vec<u8>],
    done: &mut Reconciled,
) -> Result<(), StoreError> {
    loop {
        let change = query(statement).bind(store.clock_parameter()).bind(BATCH);
        let change = values.iter().fold(change, |change, value| change.bind(value));
        let changed = store.fetch_all(change).await?;
        let queued = changed.iter().map(rows::queued).collect::<Result<Vec<_>, _>>()?;
        done.extend(changed.len() as u64, queued.into_iter().flatten());
        if changed.len() < BATCH as usize {
            return Ok(());
        }
    }
}
