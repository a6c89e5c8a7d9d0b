//! Changes of jobs that time causes: expired leases, deadlines, due jobs.

use super::{
    SqliteStore,
    calls::{Connection, Row, query},
    rows::{self, to_json},
};
use crate::{
    outcome::Outcome,
    store::{
        Reconciled, StoreError,
        attempts::{lease_lost, signature},
    },
};

/// Applies all changes that are due; returns what changed.
pub(super) async fn reconcile(store: &SqliteStore) -> Result<Reconciled, StoreError> {
    let now = store.clock_parameter();
    let mut tx = store.begin().await?;
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

/// Ends running attempts with an expired lease: the jobs are queued again or become dead letters.
pub(super) async fn lapse(tx: &mut Connection, now: i64) -> Result<Vec<Row>, StoreError> {
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
         WHERE state = 'running' AND lease_until <= $1 AND attempts + 1 >= attempts_max",
    )
    .bind(now)
    .bind(outcome)
    .execute(&mut *tx)
    .await?;
    let lapsed = query(
        "UPDATE jobs
         SET state = CASE WHEN attempts + 1 >= attempts_max THEN 'failed' ELSE 'queued' END,
             checkpoint = CASE WHEN attempts + 1 < attempts_max THEN checkpoint END,
             attempts = attempts + 1, lease_until = NULL, error_code = $2, error_signature = $3
         WHERE state = 'running' AND lease_until <= $1
         RETURNING id, state, model, format, tenant, priority, 1 AS cost",
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
         RETURNING id, state, model, format, tenant, priority, 1 AS cost",
    )
    .bind(now)
    .fetch_all(tx)
    .await?;
    Ok(promoted)
}
