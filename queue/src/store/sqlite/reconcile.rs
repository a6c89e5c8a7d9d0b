//! Changes of jobs that time causes: expired leases, deadlines, due jobs.

use super::{
    SqliteStore,
    calls::{Connection, Row, query},
    rows::{self, milliseconds, to_json},
};
use crate::{
    outcome::Outcome,
    store::{
        Reconciled, StoreError,
        attempts::{AWAY_AFTER, AWAY_LEASE, lease_lost, signature},
    },
};

/// Applies all changes that are due; returns what changed.
pub(super) async fn reconcile(store: &SqliteStore) -> Result<Reconciled, StoreError> {
    let now = store.clock_parameter();
    let mut tx = store.begin().await?;
    pulse(&mut tx, now).await?;
    let mut done = Reconciled::default();
    for row in lapse(&mut tx, now).await? {
        done.extend(1, rows::queued(&row)?);
        done.lapsed += 1;
    }
    done.extend(expire(&mut tx, now).await?, None);
    for row in promote(&mut tx, now).await? {
        done.extend(1, rows::queued(&row)?);
    }
    tx.commit().await?;
    Ok(done)
}

/// Extends leases if the process was stopped for a while, as with a laptop that slept.
async fn pulse(tx: &mut Connection, now: i64) -> Result<(), StoreError> {
    query(
        "UPDATE jobs SET lease_until = $2
         WHERE (SELECT at FROM pulse WHERE at > 0) < $1 - $3
           AND state = 'running' AND lease_until < $2",
    )
    .bind(now)
    .bind(now.saturating_add(milliseconds(AWAY_LEASE)))
    .bind(milliseconds(AWAY_AFTER))
    .execute(&mut *tx)
    .await?;
    query("UPDATE pulse SET at = $1").bind(now).execute(tx).await?;
    Ok(())
}

/// Takes jobs with an expired lease from their workers: they are queued again. Only a job that ran alone
/// is charged an attempt, and becomes a dead letter when it was its last one.
async fn lapse(tx: &mut Connection, now: i64) -> Result<Vec<Row>, StoreError> {
    let error = to_json(&lease_lost());
    let outcome = to_json(&Outcome::Error(lease_lost()));
    query(
        "INSERT INTO attempt_errors (job_id, epoch, at, error, owner, claimed_at)
         SELECT id, epoch, $1, $2, owner, claimed_at FROM jobs
         WHERE state = 'running' AND lease_until <= $1",
    )
    .bind(now)
    .bind(error)
    .execute(&mut *tx)
    .await?;
    query(
        "INSERT INTO results (job_id, outcome, finished_at, claim_epoch, claim_owner, claim_at)
         SELECT id, $2, $1, epoch, owner, claimed_at FROM jobs
         WHERE state = 'running' AND lease_until <= $1 AND alone AND attempts + 1 >= attempts_max",
    )
    .bind(now)
    .bind(outcome)
    .execute(&mut *tx)
    .await?;
    let lapsed = query(
        "UPDATE jobs
         SET state = CASE WHEN alone AND attempts + 1 >= attempts_max THEN 'failed' ELSE 'queued' END,
             checkpoint = CASE WHEN NOT alone OR attempts + 1 < attempts_max THEN checkpoint END,
             attempts = attempts + alone, losses = losses + 1, lease_until = NULL, error_code = $2,
             error_signature = $3
         WHERE state = 'running' AND lease_until <= $1
         RETURNING id, state, model, format, tenant, priority, 1 AS cost, 0 AS shard_key, expires_at, tier",
    )
    .bind(now)
    .bind(lease_lost().code)
    .bind(signature(&lease_lost()))
    .fetch_all(tx)
    .await?;
    Ok(lapsed)
}

/// Expires unclaimed jobs past their deadline. The states are listed so that the partial index is
/// used.
async fn expire(tx: &mut Connection, now: i64) -> Result<u64, StoreError> {
    query(
        "INSERT INTO results (job_id, outcome, finished_at)
         SELECT id, $2, $1 FROM jobs
         WHERE expires_at <= $1 AND state IN ('scheduled', 'queued', 'retrying')",
    )
    .bind(now)
    .bind(to_json(&Outcome::Expired))
    .execute(&mut *tx)
    .await?;
    let done = query(
        "UPDATE jobs SET state = 'expired', run_at = NULL, checkpoint = NULL
         WHERE expires_at <= $1 AND state IN ('scheduled', 'queued', 'retrying')",
    )
    .bind(now)
    .execute(tx)
    .await?;
    Ok(done.rows_affected())
}

/// Queues scheduled and retrying jobs that are due.
async fn promote(tx: &mut Connection, now: i64) -> Result<Vec<Row>, StoreError> {
    let promoted = query(
        "UPDATE jobs SET state = 'queued', run_at = NULL
         WHERE state IN ('scheduled', 'retrying') AND run_at <= $1
         RETURNING id, state, model, format, tenant, priority, 1 AS cost, 0 AS shard_key, expires_at, tier",
    )
    .bind(now)
    .fetch_all(tx)
    .await?;
    Ok(promoted)
}
