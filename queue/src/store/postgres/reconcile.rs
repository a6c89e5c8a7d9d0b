//! The moves that time makes: leases that run out, deadlines, jobs that are due.
//!
//! Each statement moves a bounded number of jobs and passes over those that somebody else holds at
//! the moment, so that several reconcilers share the work and none waits for a claim or a finish.

use sqlx::PgPool;

use super::{rows, unavailable};
use crate::{
    job::JobState,
    outcome::Outcome,
    store::{
        Reconciled, StoreError,
        attempts::{lease_lost, signature},
    },
    wire,
};

/// Jobs that one statement moves.
const BATCH: i32 = 1000;

/// Ends running attempts whose lease is over: back to queued, or a dead letter.
const LAPSE: &str = "
WITH clock AS (SELECT store_now_ms($1) AS now), due AS MATERIALIZED (
    SELECT id FROM jobs WHERE state = 'running' AND lease_until <= (SELECT now FROM clock)
    ORDER BY id LIMIT $2 FOR NO KEY UPDATE SKIP LOCKED
), moved AS (
    UPDATE jobs
    SET state = CASE WHEN attempts + 1 >= attempts_max THEN 'failed' ELSE 'queued' END,
        checkpoint = CASE WHEN attempts + 1 < attempts_max THEN checkpoint END,
        attempts = attempts + 1, lease_until = NULL, error_code = convert_from($5, 'UTF8'),
        error_signature = convert_from($6, 'UTF8')
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

/// Ends waiting jobs whose deadline has passed; ordered as [`PROMOTE`] is.
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

/// Queues scheduled and retrying jobs whose time has come. In the order of their index: in that of
/// ids, a planner without figures walks through a million jobs to find none. Locked rows are
/// skipped, so no order is needed against deadlocks.
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

/// Moves what time has moved, and says what.
pub(super) async fn reconcile(pool: &PgPool, now: Option<i64>) -> Result<Reconciled, StoreError> {
    let error = lease_lost();
    let (code, signature) = (error.code.clone().into_bytes(), signature(&error).into_bytes());
    let values = [wire::encode(&error), wire::encode(&Outcome::Error(error)), code, signature];
    let mut done = Reconciled::default();
    repeat(pool, LAPSE, now, &values, &mut done).await?;
    done.lapsed = done.moved;
    repeat(pool, EXPIRE, now, &[wire::encode(&Outcome::Expired)], &mut done).await?;
    repeat(pool, PROMOTE, now, &[], &mut done).await?;
    Ok(done)
}

/// Repeats a statement until it finds less than it may move.
async fn repeat(
    pool: &PgPool,
    statement: &'static str,
    now: Option<i64>,
    values: &[Vec<u8>],
    done: &mut Reconciled,
) -> Result<(), StoreError> {
    loop {
        let query = sqlx::query(statement).bind(now).bind(BATCH);
        let query = values.iter().fold(query, |query, value| query.bind(value));
        let moved = query.fetch_all(pool).await.map_err(unavailable)?;
        let mut queued = Vec::new();
        for row in &moved {
            if rows::state(row)? == JobState::Queued {
                queued.push(rows::entry(row, &rows::queue(row)?)?);
            }
        }
        done.extend(moved.len() as u64, queued);
        if moved.len() < BATCH as usize {
            return Ok(());
        }
    }
}
