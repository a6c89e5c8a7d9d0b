//! The moves of a job's life as SQL, each inside the caller's transaction.

use std::collections::HashMap;

use serde_json::json;
use sqlx::{Row, SqliteConnection, sqlite::SqliteRow};

use super::{
    rows::{self, to_json},
    unavailable,
};
use crate::{
    job::{Job, JobId, JobState, Timestamp},
    outcome::Outcome,
    store::{
        Claim, ClaimRef, Claimant, FinishedAttempt, Settled, StoreError,
        attempts::{backoff, lease_lost, signature, verdict},
    },
};

/// Records jobs as queued or scheduled; known ids stay as they are. `replay_of` names the dead
/// letter that each one repeats.
pub(super) async fn insert_jobs(
    tx: &mut SqliteConnection,
    jobs: &[Job],
    replay_of: Option<&[JobId]>,
    now: Timestamp,
) -> Result<(), StoreError> {
    let mut rows = Vec::with_capacity(jobs.len());
    for (at, job) in jobs.iter().enumerate() {
        let later = job.run_at.is_some_and(|at| at > now);
        let state = if later { JobState::Scheduled } else { JobState::Queued };
        rows.push(json!({
            "id": rows::hex(job.id.as_bytes()),
            "model": job.queue.model,
            "format": job.queue.format,
            "tenant": job.tenant,
            "priority": job.priority,
            "state": state,
            "attempts_max": job.attempts_max.max(1),
            "run_at": job.run_at.filter(|_| later),
            "expires_at": job.expires_at,
            "job": to_json(job)?,
            "custom_id": job.custom_id,
            "replay_of": replay_of.and_then(|ids| ids.get(at)).map(|id| rows::hex(id.as_bytes())),
        }));
    }
    sqlx::query(
        "INSERT INTO jobs (id, model, format, tenant, priority, state, attempts_max, run_at,
                           expires_at, submitted_at, job, custom_id, replay_of)
         SELECT unhex(value ->> 'id'), value ->> 'model', value ->> 'format', value ->> 'tenant',
                value ->> 'priority', value ->> 'state', value ->> 'attempts_max',
                value ->> 'run_at', value ->> 'expires_at', ?2, value ->> 'job',
                value ->> 'custom_id', unhex(value ->> 'replay_of')
         FROM json_each(?1) WHERE true
         ON CONFLICT (id) DO NOTHING",
    )
    .bind(to_json(&rows)?)
    .bind(now.0)
    .execute(tx)
    .await
    .map_err(unavailable)?;
    Ok(())
}

/// Claims those of `ids` that are queued, in the order given.
pub(super) async fn claim(
    tx: &mut SqliteConnection,
    ids: &[JobId],
    by: Claimant<'_>,
    now: Timestamp,
) -> Result<Vec<Claim>, StoreError> {
    let rows = sqlx::query(
        "UPDATE jobs SET state = 'running', epoch = epoch + 1, owner = ?1, lease_until = ?2,
                         claimed_at = ?4, started_at = coalesce(started_at, ?4)
         WHERE id IN (SELECT unhex(value) FROM json_each(?3))
           AND state = 'queued' AND (expires_at IS NULL OR expires_at > ?4)
         RETURNING id, epoch, attempts, job, checkpoint",
    )
    .bind(by.owner)
    .bind(now.after(by.lease).0)
    .bind(rows::ids_json(ids))
    .bind(now.0)
    .fetch_all(tx)
    .await
    .map_err(unavailable)?;
    let mut claims = HashMap::with_capacity(rows.len());
    for row in &rows {
        let job: Job = rows::from_json("job", &rows::text(row, "job")?)?;
        let claim = Claim {
            expires_in: job.expires_at.map(|at| at.since(now)),
            job,
            epoch: rows::integer(row, "epoch")?,
            attempts: rows::count(row, "attempts")?,
            checkpoint: row.try_get("checkpoint").map_err(unavailable)?,
        };
        claims.insert(rows::id(row, "id")?, claim);
    }
    Ok(ids.iter().filter_map(|id| claims.remove(id)).collect())
}

/// Saves the work of the claims that hold; returns the others.
pub(super) async fn checkpoint(
    tx: &mut SqliteConnection,
    saved: &[(ClaimRef, Vec<u8>)],
) -> Result<Vec<ClaimRef>, StoreError> {
    let mut lost = Vec::new();
    // One by one: bytes would have to be spelled in JSON to travel together, and nothing waits.
    for (held, bytes) in saved {
        let done = sqlx::query(
            "UPDATE jobs SET checkpoint = ?3
             WHERE id = ?1 AND epoch = ?2 AND state = 'running'",
        )
        .bind(held.id.as_bytes().as_slice())
        .bind(held.epoch)
        .bind(bytes.as_slice())
        .execute(&mut *tx)
        .await
        .map_err(unavailable)?;
        if done.rows_affected() == 0 {
            lost.push(*held);
        }
    }
    Ok(lost)
}

/// Ends running attempts whose lease is over: back to queued, or a dead letter.
pub(super) async fn lapse(
    tx: &mut SqliteConnection,
    now: Timestamp,
) -> Result<Vec<SqliteRow>, StoreError> {
    let error = to_json(&lease_lost())?;
    let outcome = to_json(&Outcome::Error(lease_lost()))?;
    sqlx::query(
        "INSERT INTO attempt_errors (job_id, epoch, at, error, owner, claimed_at)
         SELECT id, epoch, ?1, ?2, owner, claimed_at FROM jobs WHERE state = 'running' AND lease_until <= ?1",
    )
    .bind(now.0)
    .bind(error)
    .execute(&mut *tx)
    .await
    .map_err(unavailable)?;
    sqlx::query(
        "INSERT INTO results (job_id, outcome, finished_at, claim_epoch, claim_owner, claim_at)
         SELECT id, ?2, ?1, epoch, owner, claimed_at FROM jobs
         WHERE state = 'running' AND lease_until <= ?1 AND attempts + 1 >= attempts_max",
    )
    .bind(now.0)
    .bind(outcome)
    .execute(&mut *tx)
    .await
    .map_err(unavailable)?;
    sqlx::query(
        "UPDATE jobs
         SET state = CASE WHEN attempts + 1 >= attempts_max THEN 'failed' ELSE 'queued' END,
             checkpoint = CASE WHEN attempts + 1 < attempts_max THEN checkpoint END,
             attempts = attempts + 1, lease_until = NULL, error_code = ?2, error_signature = ?3
         WHERE state = 'running' AND lease_until <= ?1
         RETURNING id, state, model, format, tenant, priority",
    )
    .bind(now.0)
    .bind(lease_lost().code)
    .bind(signature(&lease_lost()))
    .fetch_all(tx)
    .await
    .map_err(unavailable)
}

/// Ends waiting jobs whose deadline has passed. The states are spelled out, since only then does the
/// partial index serve.
pub(super) async fn expire(tx: &mut SqliteConnection, now: Timestamp) -> Result<u64, StoreError> {
    sqlx::query(
        "INSERT INTO results (job_id, outcome, finished_at)
         SELECT id, ?2, ?1 FROM jobs
         WHERE expires_at <= ?1 AND state IN ('scheduled', 'queued', 'retrying')",
    )
    .bind(now.0)
    .bind(to_json(&Outcome::Expired)?)
    .execute(&mut *tx)
    .await
    .map_err(unavailable)?;
    let done = sqlx::query(
        "UPDATE jobs SET state = 'expired', run_at = NULL, checkpoint = NULL
         WHERE expires_at <= ?1 AND state IN ('scheduled', 'queued', 'retrying')",
    )
    .bind(now.0)
    .execute(tx)
    .await
    .map_err(unavailable)?;
    Ok(done.rows_affected())
}

/// Queues scheduled and retrying jobs whose time has come.
pub(super) async fn promote(
    tx: &mut SqliteConnection,
    now: Timestamp,
) -> Result<Vec<SqliteRow>, StoreError> {
    sqlx::query(
        "UPDATE jobs SET state = 'queued', run_at = NULL
         WHERE state IN ('scheduled', 'retrying') AND run_at <= ?1
         RETURNING id, state, model, format, tenant, priority",
    )
    .bind(now.0)
    .fetch_all(tx)
    .await
    .map_err(unavailable)
}

/// Withdraws jobs that are not over.
pub(super) async fn cancel(
    tx: &mut SqliteConnection,
    ids: &[JobId],
    now: Timestamp,
) -> Result<Vec<JobId>, StoreError> {
    let rows = sqlx::query(
        "UPDATE jobs SET state = 'cancelled', epoch = epoch + 1, owner = NULL, lease_until = NULL,
                         run_at = NULL, checkpoint = NULL
         WHERE id IN (SELECT unhex(value) FROM json_each(?1))
           AND state IN ('scheduled', 'queued', 'running', 'retrying')
         RETURNING id",
    )
    .bind(rows::ids_json(ids))
    .fetch_all(&mut *tx)
    .await
    .map_err(unavailable)?;
    let cancelled: Vec<JobId> = rows::ids(&rows)?.into_iter().collect();
    sqlx::query(
        "INSERT INTO results (job_id, finished_at) SELECT unhex(value), ?2 FROM json_each(?1)",
    )
    .bind(rows::ids_json(&cancelled))
    .bind(now.0)
    .execute(tx)
    .await
    .map_err(unavailable)?;
    Ok(cancelled)
}

/// Attempts and limit of the jobs that are still running under the epochs given.
async fn still_held(
    tx: &mut SqliteConnection,
    finished: &[FinishedAttempt],
) -> Result<HashMap<ClaimRef, (u32, u32)>, StoreError> {
    let held: Vec<_> = finished.iter().map(|finished| finished.claim).collect();
    let rows = sqlx::query(
        "SELECT jobs.id AS id, epoch, attempts, attempts_max FROM json_each(?1) AS held
         JOIN jobs ON jobs.id = unhex(held.value ->> 'id')
         WHERE jobs.epoch = held.value ->> 'epoch' AND jobs.state = 'running'",
    )
    .bind(rows::held_json(&held))
    .fetch_all(tx)
    .await
    .map_err(unavailable)?;
    rows.iter()
        .map(|row| {
            let attempts = (rows::count(row, "attempts")?, rows::count(row, "attempts_max")?);
            let held = ClaimRef { id: rows::id(row, "id")?, epoch: rows::integer(row, "epoch")? };
            Ok((held, attempts))
        })
        .collect()
}

/// Records the attempts whose epoch still holds; the others were fenced out.
pub(super) async fn finish(
    tx: &mut SqliteConnection,
    finished: &[FinishedAttempt],
    now: Timestamp,
) -> Result<Vec<Settled>, StoreError> {
    let mut held = still_held(tx, finished).await?;
    let mut settled = Vec::with_capacity(held.len());
    let mut rows = Vec::with_capacity(held.len());
    for FinishedAttempt { claim: by, outcome, first_token } in finished {
        // Removed, so that an attempt named twice in one call is recorded once.
        let Some((attempts, attempts_max)) = held.remove(by) else { continue };
        let state = verdict(outcome, attempts, attempts_max);
        settled.push(Settled { id: by.id, state });
        let usage = match outcome {
            Outcome::Completed(completion) => completion.usage,
            _ => crate::outcome::Usage::default(),
        };
        let error = match outcome {
            Outcome::Error(error) => Some(error),
            _ => None,
        };
        let retry_at = now.after(backoff(by.id, attempts));
        rows.push(json!({
            "id": rows::hex(by.id.as_bytes()),
            "state": state,
            "attempts": attempts.saturating_add(u32::from(error.is_some())),
            "run_at": (state == JobState::Retrying).then_some(retry_at),
            "outcome": state.is_terminal().then(|| to_json(outcome)).transpose()?,
            "error": error.map(to_json).transpose()?,
            "code": error.map(|error| &error.code),
            "signature": error.map(signature),
            "first_token_ms": first_token.map(|after| after.as_millis() as i64),
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
        }));
    }
    record(tx, &to_json(&rows)?, now).await?;
    Ok(settled)
}

/// Writes the rows that [`finish`] decided.
async fn record(tx: &mut SqliteConnection, rows: &str, now: Timestamp) -> Result<(), StoreError> {
    sqlx::query(
        "INSERT INTO results (job_id, outcome, prompt_tokens, completion_tokens, finished_at,
                              first_token_ms, claim_epoch, claim_owner, claim_at)
         SELECT jobs.id, value ->> 'outcome', value ->> 'prompt_tokens',
                value ->> 'completion_tokens', ?2, value ->> 'first_token_ms', jobs.epoch, owner,
                claimed_at
         FROM json_each(?1) JOIN jobs ON jobs.id = unhex(value ->> 'id') WHERE value ->> 'outcome' IS NOT NULL",
    )
    .bind(rows)
    .bind(now.0)
    .execute(&mut *tx)
    .await
    .map_err(unavailable)?;
    sqlx::query(
        "INSERT INTO attempt_errors (job_id, epoch, at, error, owner, claimed_at)
         SELECT jobs.id, jobs.epoch, ?2, value ->> 'error', owner, claimed_at
         FROM json_each(?1) JOIN jobs ON jobs.id = unhex(value ->> 'id') WHERE value ->> 'error' IS NOT NULL",
    )
    .bind(rows)
    .bind(now.0)
    .execute(&mut *tx)
    .await
    .map_err(unavailable)?;
    sqlx::query(
        "UPDATE jobs SET state = done.value ->> 'state', attempts = done.value ->> 'attempts',
                         run_at = done.value ->> 'run_at', lease_until = NULL, checkpoint = NULL,
                         error_code = done.value ->> 'code',
                         error_signature = done.value ->> 'signature'
         FROM json_each(?1) AS done WHERE jobs.id = unhex(done.value ->> 'id')",
    )
    .bind(rows)
    .execute(tx)
    .await
    .map_err(unavailable)?;
    Ok(())
}
