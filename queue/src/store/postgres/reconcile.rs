//! Changes of jobs that time causes: expired leases, deadlines, due jobs.
//!
//! Each statement changes a bounded number of jobs and skips jobs that another transaction has
//! locked, so that several reconcilers share the work without waiting for claims or finishes.

use super::{
    PostgresStore,
    calls::query,
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
)
UPDATE jobs SET lease_until = (SELECT now FROM clock) + $3
WHERE (SELECT at FROM before) + $2 < (SELECT now FROM clock)
  AND state = 'running' AND lease_until < (SELECT now FROM clock) + $3";

/// Takes jobs with an expired lease from their workers: they are queued again. Only a job that ran alone
/// is charged an attempt, and becomes a dead letter when it was its last one.
const LAPSE: &str = "
WITH clock AS (SELECT store_now_ms($1) AS now), due AS MATERIALIZED (
    SELECT id FROM jobs WHERE state = 'running' AND lease_until <= (SELECT now FROM clock)
    ORDER BY id LIMIT $2 FOR NO KEY UPDATE SKIP LOCKED
), moved AS (
    UPDATE jobs
    SET state = CASE WHEN alone AND attempts + 1 >= attempts_max THEN 'failed' ELSE 'queued' END,
        checkpoint = CASE WHEN NOT alone OR attempts + 1 < attempts_max THEN checkpoint END,
        attempts = attempts + alone::integer, losses = losses + 1, lease_until = NULL,
        error_code = convert_from($5, 'UTF8'), error_signature = convert_from($6, 'UTF8')
    FROM due WHERE jobs.id = ANY(ARRAY(SELECT id FROM due)) AND jobs.id = due.id
    RETURNING jobs.id, epoch, state, tenant, model, format, priority, cost, owner, claimed_at
), errors AS (
    INSERT INTO attempt_errors (job_id, epoch, at, error, owner, claimed_at)
    SELECT id, epoch, now, $3, owner, claimed_at FROM moved, clock ON CONFLICT DO NOTHING
), recorded AS (
    INSERT INTO results (job_id, tenant, model, format, outcome, finished_at, claim_epoch, claim_owner,
                         claim_at)
    SELECT id, tenant, model, format, $4, now, epoch, owner, claimed_at
    FROM moved, clock WHERE state = 'failed'
)
SELECT id, state, tenant, model, format, priority, cost FROM moved ORDER BY id";

/// Expires unclaimed jobs past their deadline; ordered like [`PROMOTE`].
const EXPIRE: &str = "
WITH clock AS (SELECT store_now_ms($1) AS now), due AS MATERIALIZED (
    SELECT id FROM jobs
    WHERE expires_at <= (SELECT now FROM clock) AND state IN ('scheduled', 'queued', 'retrying')
    ORDER BY expires_at LIMIT $2 FOR NO KEY UPDATE SKIP LOCKED
), moved AS (
    UPDATE jobs SET state = 'expired', run_at = NULL, checkpoint = NULL
    FROM due WHERE jobs.id = ANY(ARRAY(SELECT id FROM due)) AND jobs.id = due.id
    RETURNING jobs.id, state, tenant, model, format, priority, cost
), recorded AS (
    INSERT INTO results (job_id, tenant, model, format, outcome, finished_at)
    SELECT id, tenant, model, format, $3, now FROM moved, clock
)
SELECT id, state, tenant, model, format, priority, cost FROM moved ORDER BY id";

/// Queues scheduled and retrying jobs that are due, in the order of their index. In the order of ids, a
/// planner without statistics may scan a million jobs without a match. Locked rows are skipped, so the
/// order does not matter for deadlocks.
const PROMOTE: &str = "
WITH due AS MATERIALIZED (
    SELECT id FROM jobs
    WHERE state IN ('scheduled', 'retrying') AND run_at <= (SELECT store_now_ms($1))
    ORDER BY run_at LIMIT $2 FOR NO KEY UPDATE SKIP LOCKED
), moved AS (
    UPDATE jobs SET state = 'queued', run_at = NULL
    FROM due WHERE jobs.id = ANY(ARRAY(SELECT id FROM due)) AND jobs.id = due.id
    RETURNING jobs.id, state, tenant, model, format, priority, cost
)
SELECT id, state, tenant, model, format, priority, cost FROM moved ORDER BY id";

/// Applies all changes that are due; returns what changed.
pub(super) async fn reconcile(store: &PostgresStore) -> Result<Reconciled, StoreError> {
    let error = lease_lost();
    let (code, signature) = (error.code.clone().into_bytes(), signature(&error).into_bytes());
    let values = [wire::encode(&error), wire::encode(&Outcome::Error(error)), code, signature];
    let pulse = query(PULSE).bind(store.clock_parameter());
    let pulse = pulse.bind(milliseconds(AWAY_AFTER)).bind(milliseconds(AWAY_LEASE));
    let extended = store.execute(pulse).await?;
    if extended > 0 {
        tracing::warn!(jobs = extended, "the store was away: leases are extended");
    }
    let mut done = Reconciled::default();
    repeat(store, LAPSE, &values, &mut done).await?;
    done.lapsed = done.moved;
    repeat(store, EXPIRE, &[wire::encode(&Outcome::Expired)], &mut done).await?;
    repeat(store, PROMOTE, &[], &mut done).await?;
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
