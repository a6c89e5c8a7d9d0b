//! Changes of jobs on request.

use std::collections::HashMap;
use std::time::Duration;

use serde_json::json;
use uuid::Uuid;

use super::{
    SqliteStore,
    calls::{Connection, query},
    dialect::{claim_list, hex, id_list},
    rows::{self, milliseconds, to_json},
};
use crate::{
    job::{Job, JobId, JobState},
    outcome::Outcome,
    prefix_key,
    store::{
        Claim, ClaimRef, Claimant, FinishedAttempt, Settled, StoreError,
        attempts::{LOSSES_MAX, backoff, signature, verdict},
    },
};

/// Records jobs as queued or scheduled; jobs with known ids stay as they are. `replay_of` has the dead
/// letter that each job repeats.
pub(super) async fn insert_jobs(
    store: &SqliteStore,
    tx: &mut Connection,
    jobs: &[Job],
    replay_of: Option<&[JobId]>,
) -> Result<(), StoreError> {
    let now = store.clock_parameter();
    let mut rows = Vec::with_capacity(jobs.len());
    for (at, job) in jobs.iter().enumerate() {
        let later = job.run_at.is_some_and(|at| at.0 > now);
        let state = if later { JobState::Scheduled } else { JobState::Queued };
        rows.push(json!({
            "id": hex(job.id.as_bytes()),
            "model": job.queue.model,
            "format": job.queue.format,
            "tenant": job.tenant,
            "priority": job.priority,
            "state": state,
            "attempts_max": job.attempts_max.max(1),
            "run_at": job.run_at.filter(|_| later),
            "expires_at": job.expires_at,
            "job": to_json(job),
            "prefix_key": prefix_key::order(&job.prompt),
            "custom_id": job.custom_id,
            "metadata": job.searched_metadata(),
            "line_key": job.line_key.as_ref().map(|key| hex(key)),
            "tier": job.billing.tier,
            "api_key": job.billing.key,
            "line_shape": job.line_shape,
            "replay_of": replay_of.and_then(|ids| ids.get(at)).map(|id| hex(id.as_bytes())),
        }));
    }
    query(
        "INSERT INTO jobs (id, model, format, tenant, priority, state, attempts_max, run_at,
                           expires_at, submitted_at, job, custom_id, replay_of, prefix_key,
                           metadata, line_key, tier, api_key, line_shape)
         SELECT unhex(value ->> 'id'), value ->> 'model', value ->> 'format', value ->> 'tenant',
                value ->> 'priority', value ->> 'state', value ->> 'attempts_max',
                value ->> 'run_at', value ->> 'expires_at', $2, value ->> 'job',
                value ->> 'custom_id', unhex(value ->> 'replay_of'), value ->> 'prefix_key',
                value ->> 'metadata', unhex(value ->> 'line_key'),
                value ->> 'tier', value ->> 'api_key', value ->> 'line_shape'
         FROM json_each($1) WHERE true
         ON CONFLICT (id) DO NOTHING",
    )
    .bind(to_json(&rows))
    .bind(now)
    .execute(tx)
    .await?;
    Ok(())
}

/// Claims the jobs that are queued, in the order of `ids`.
pub(super) async fn claim(
    store: &SqliteStore,
    ids: &[JobId],
    by: Claimant<'_>,
) -> Result<Vec<Claim>, StoreError> {
    let now = store.clock_parameter();
    let mut tx = store.begin().await?;
    let claimed = query(
        "UPDATE jobs SET state = 'running', epoch = epoch + 1, claim_id = $5, owner = $1,
                         lease_until = $2, claimed_at = $4, started_at = coalesce(started_at, $4),
                         alone = losses >= $6
         WHERE id IN (SELECT unhex(value) FROM json_each($3))
           AND state = 'queued' AND (expires_at IS NULL OR expires_at > $4)
           AND ($7 IS NULL OR (model = $7 AND format = $8))
         RETURNING id, epoch, claim_id, attempts, alone, job, checkpoint, model, format,
                   expires_at - $4 AS expires_in",
    )
    .bind(by.owner)
    .bind(now.saturating_add(milliseconds(by.lease)))
    .bind(id_list(ids.iter().copied()))
    .bind(now)
    .bind(by.claim_id)
    .bind(LOSSES_MAX)
    .bind(by.queue.map(|queue| &*queue.model))
    .bind(by.queue.map(|queue| &*queue.format))
    .fetch_all(&mut *tx)
    .await?;
    let (mut claims, unreadable) = rows::claims(&claimed)?;
    if !unreadable.is_empty() {
        finish_within(&mut tx, &unreadable, now).await?;
    }
    tx.commit().await?;
    Ok(ids.iter().filter_map(|id| claims.remove(id)).collect())
}

/// Extends leases, and takes back jobs that lost theirs and were not claimed since; returns the claims
/// that are no longer valid.
pub(super) async fn renew(
    store: &SqliteStore,
    claims: &[ClaimRef],
    lease: Duration,
) -> Result<Vec<ClaimRef>, StoreError> {
    let renew = query(
        "UPDATE jobs SET lease_until = $1, state = 'running', losses = losses - (state = 'queued')
         FROM json_each($2) AS claim
         WHERE jobs.id = unhex(claim.value ->> 'id') AND jobs.epoch = claim.value ->> 'epoch'
           AND jobs.claim_id = claim.value ->> 'claim_id' AND jobs.state IN ('running', 'queued')
         RETURNING jobs.id, jobs.epoch, jobs.claim_id",
    )
    .bind(store.clock_parameter().saturating_add(milliseconds(lease)))
    .bind(claim_list(claims));
    rows::lost(claims.iter().copied(), &store.fetch_all(renew).await?)
}

/// Saves the checkpoints of the valid claims; returns the other claims.
pub(super) async fn checkpoint(
    store: &SqliteStore,
    saved: &[(ClaimRef, Vec<u8>)],
) -> Result<Vec<ClaimRef>, StoreError> {
    let mut tx = store.begin().await?;
    let mut lost = Vec::new();
    // One by one: in one statement the bytes would have to be encoded as JSON.
    for (claim, bytes) in saved {
        let save = query(
            "UPDATE jobs SET checkpoint = $4
             WHERE id = $1 AND epoch = $2 AND claim_id = $3 AND state = 'running'",
        );
        let save = save.bind(Uuid::from(claim.id)).bind(claim.epoch).bind(claim.claim_id);
        let save = save.bind(bytes.as_slice());
        if save.execute(&mut *tx).await?.rows_affected() == 0 {
            lost.push(*claim);
        }
    }
    tx.commit().await?;
    Ok(lost)
}

/// Releases claims without counting an attempt; returns the jobs of the valid claims. The jobs have then
/// lost at least `losses_min` workers.
pub(super) async fn hand_back(
    store: &SqliteStore,
    claims: &[ClaimRef],
    losses_min: i32,
) -> Result<Vec<JobId>, StoreError> {
    let release = query(
        "UPDATE jobs SET state = 'queued', epoch = jobs.epoch + 1, claim_id = NULL, owner = NULL,
                         lease_until = NULL, losses = max(losses, $2)
         FROM json_each($1) AS claim
         WHERE jobs.id = unhex(claim.value ->> 'id')
           AND jobs.claim_id = claim.value ->> 'claim_id' AND jobs.state = 'running'
         RETURNING jobs.id",
    );
    rows::ids(&store.fetch_all(release.bind(claim_list(claims)).bind(losses_min)).await?)
}

/// Cancels jobs that are not in a terminal state.
pub(super) async fn cancel(store: &SqliteStore, ids: &[JobId]) -> Result<Vec<JobId>, StoreError> {
    let mut tx = store.begin().await?;
    let cancelled = query(
        "UPDATE jobs SET state = 'cancelled', epoch = epoch + 1, owner = NULL, lease_until = NULL,
                         run_at = NULL, checkpoint = NULL
         WHERE id IN (SELECT unhex(value) FROM json_each($1))
           AND state IN ('scheduled', 'queued', 'running', 'retrying')
         RETURNING id",
    )
    .bind(id_list(ids.iter().copied()))
    .fetch_all(&mut *tx)
    .await?;
    let cancelled = rows::ids(&cancelled)?;
    query("INSERT INTO results (job_id, finished_at) SELECT unhex(value), $2 FROM json_each($1)")
        .bind(id_list(cancelled.iter().copied()))
        .bind(store.clock_parameter())
        .execute(&mut *tx)
        .await?;
    tx.commit().await?;
    Ok(cancelled)
}

/// Deletes jobs in any state; their results and errors are deleted with them. Returns how many were
/// deleted.
pub(super) async fn delete(store: &SqliteStore, ids: &[JobId]) -> Result<u64, StoreError> {
    let delete = query("DELETE FROM jobs WHERE id IN (SELECT unhex(value) FROM json_each($1))");
    store.execute(delete.bind(id_list(ids.iter().copied()))).await
}

/// Deletes jobs that ended; their results and errors are deleted with them.
pub(super) const DELETE_ENDED: &str = "
DELETE FROM jobs WHERE id IN (SELECT unhex(value) FROM json_each($1))
    AND state IN ('completed', 'failed', 'cancelled', 'expired')";

/// Deletes dead letters with their results and errors; returns how many were deleted.
pub(super) async fn purge(store: &SqliteStore, ids: &[JobId]) -> Result<u64, StoreError> {
    let purge = query(
        "DELETE FROM jobs
         WHERE id IN (SELECT unhex(value) FROM json_each($1)) AND state = 'failed'",
    );
    store.execute(purge.bind(id_list(ids.iter().copied()))).await
}

/// Returns the attempts, and their limit, of the jobs with a valid claim.
async fn attempts_of(
    tx: &mut Connection,
    finished: &[FinishedAttempt],
) -> Result<HashMap<ClaimRef, (u32, u32)>, StoreError> {
    let claims: Vec<_> = finished.iter().map(|finished| finished.claim).collect();
    let found = query(
        "SELECT jobs.id AS id, epoch, claim_id, attempts, attempts_max FROM json_each($1) AS claim
         JOIN jobs ON jobs.id = unhex(claim.value ->> 'id')
         WHERE jobs.epoch = claim.value ->> 'epoch'
           AND jobs.claim_id = claim.value ->> 'claim_id' AND jobs.state IN ('running', 'queued')",
    );
    let found = found.bind(claim_list(&claims)).fetch_all(tx).await?;
    let attempts = |row| {
        let attempts = (rows::attempts(row, "attempts")?, rows::attempts(row, "attempts_max")?);
        Ok((rows::claim_ref(row)?, attempts))
    };
    found.iter().map(attempts).collect()
}

/// Records the attempts with a valid claim; the other attempts are fenced out.
pub(super) async fn finish(
    store: &SqliteStore,
    finished: &[FinishedAttempt],
) -> Result<Vec<Settled>, StoreError> {
    let mut tx = store.begin().await?;
    let settled = finish_within(&mut tx, finished, store.clock_parameter()).await?;
    tx.commit().await?;
    Ok(settled)
}

async fn finish_within(
    tx: &mut Connection,
    finished: &[FinishedAttempt],
    now: i64,
) -> Result<Vec<Settled>, StoreError> {
    let mut held = attempts_of(tx, finished).await?;
    let mut settled = Vec::with_capacity(held.len());
    let mut rows = Vec::with_capacity(held.len());
    for FinishedAttempt { claim, outcome, first_token } in finished {
        // If a claim occurs twice, the first occurrence counts.
        let Some((attempts, attempts_max)) = held.remove(claim) else { continue };
        let state = verdict(outcome, attempts, attempts_max);
        settled.push(Settled { id: claim.id, state });
        let usage = match outcome {
            Outcome::Completed(completion) => completion.usage,
            _ => crate::outcome::Usage::default(),
        };
        let error = match outcome {
            Outcome::Error(error) => Some(error),
            _ => None,
        };
        let retry_at = now.saturating_add(milliseconds(backoff(claim.id, attempts)));
        rows.push(json!({
            "id": hex(claim.id.as_bytes()),
            "state": state,
            "attempts": attempts.saturating_add(u32::from(error.is_some())),
            "run_at": (state == JobState::Retrying).then_some(retry_at),
            "outcome": state.is_terminal().then(|| to_json(outcome)),
            "error": error.map(to_json),
            "code": error.map(|error| &error.code),
            "signature": error.map(signature),
            "first_token_ms": first_token.map(milliseconds),
            "prompt_tokens": usage.prompt_tokens,
            // A worker never reports more than the prompt has; the charge depends on it.
            "cached_tokens": usage.cached_tokens.min(usage.prompt_tokens),
            "completion_tokens": usage.completion_tokens,
        }));
    }
    record(tx, &to_json(&rows), now).await?;
    Ok(settled)
}

/// Writes the rows of [`finish_within`].
async fn record(tx: &mut Connection, rows: &str, now: i64) -> Result<(), StoreError> {
    for insert in [
        concat!(
            "INSERT INTO results (job_id, outcome, prompt_tokens, cached_tokens, completion_tokens,
                                  finished_at, first_token_ms, claim_epoch, claim_owner, claim_at,
                                  charge, currency)
             SELECT ended.id, outcome, prompt_tokens, cached_tokens, completion_tokens, $2,
                    first_token_ms, epoch, owner, claimed_at, ",
            charge_of_ended!(),
            ", currency
             FROM (SELECT jobs.id, jobs.model, jobs.tier, jobs.epoch, owner, claimed_at,
                          value ->> 'state' AS state, value ->> 'outcome' AS outcome,
                          value ->> 'first_token_ms' AS first_token_ms,
                          value ->> 'prompt_tokens' AS prompt_tokens,
                          value ->> 'cached_tokens' AS cached_tokens,
                          value ->> 'completion_tokens' AS completion_tokens
                   FROM json_each($1) JOIN jobs ON jobs.id = unhex(value ->> 'id')
                   WHERE value ->> 'outcome' IS NOT NULL) AS ended",
            price_of_ended!()
        ),
        "INSERT INTO charges (tenant, day, api_key, model, tier, currency, answers, prompt_tokens,
                              cached_tokens, completion_tokens, charge)
         SELECT tenant, $2 / 86400000, coalesce(api_key, ''), model, tier, coalesce(currency, ''),
                count(*), sum(results.prompt_tokens), sum(results.cached_tokens),
                sum(results.completion_tokens), coalesce(sum(charge), 0)
         FROM json_each($1) JOIN jobs ON jobs.id = unhex(value ->> 'id')
              JOIN results ON results.job_id = jobs.id
         WHERE value ->> 'state' = 'completed' GROUP BY 1, 2, 3, 4, 5, 6
         ON CONFLICT (tenant, day, api_key, model, tier, currency) DO UPDATE SET
             answers = answers + excluded.answers,
             prompt_tokens = prompt_tokens + excluded.prompt_tokens,
             cached_tokens = cached_tokens + excluded.cached_tokens,
             completion_tokens = completion_tokens + excluded.completion_tokens,
             charge = charge + excluded.charge",
        "INSERT INTO attempt_errors (job_id, epoch, at, error, owner, claimed_at)
         SELECT jobs.id, jobs.epoch, $2, value ->> 'error', owner, claimed_at
         FROM json_each($1) JOIN jobs ON jobs.id = unhex(value ->> 'id')
         WHERE value ->> 'error' IS NOT NULL",
    ] {
        query(insert).bind(rows).bind(now).execute(&mut *tx).await?;
    }
    query(
        "UPDATE jobs SET state = done.value ->> 'state', attempts = done.value ->> 'attempts',
                         run_at = done.value ->> 'run_at', claim_id = NULL, lease_until = NULL,
                         checkpoint = NULL,
                         error_code = done.value ->> 'code',
                         error_signature = done.value ->> 'signature'
         FROM json_each($1) AS done WHERE jobs.id = unhex(done.value ->> 'id')",
    )
    .bind(rows)
    .execute(tx)
    .await?;
    Ok(())
}
