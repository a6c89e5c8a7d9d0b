//! Changes of jobs on request, one statement each.
//!
//! A statement that changes jobs finds them by `id = ANY($1)`, which reads the primary keys of only the
//! partitions concerned, and joins the values of each job from arrays. Under READ COMMITTED a row that
//! another transaction holds is waited for and then tested again: of two claims of a job one succeeds,
//! and a write under an old epoch matches nothing.

use std::{
    collections::{HashMap, HashSet},
    time::Duration,
};

use sqlx::PgConnection;
use uuid::Uuid;

use super::{
    PostgresStore,
    calls::query,
    dialect::{id_list, storable},
    rows::{self, milliseconds, stored},
};
use crate::{
    job::{Job, JobId, JobState},
    outcome::{JobError, Outcome, Usage},
    store::{
        Claim, ClaimRef, Claimant, FinishedAttempt, Settled, StoreError,
        attempts::{self, LOSSES_MAX},
    },
    wire,
};

/// Records jobs as queued or scheduled; jobs with known ids stay as they are. `replay_of` has the dead
/// letter that each job repeats.
pub(super) async fn insert_jobs(
    connection: &mut PgConnection,
    jobs: &[Job],
    replay_of: Option<&[JobId]>,
    now: Option<i64>,
) -> Result<(), StoreError> {
    for job in jobs {
        storable("model", &job.queue.model)?;
        storable("format", &job.queue.format)?;
        storable("tenant", &job.tenant.0)?;
        storable("custom_id", job.custom_id.as_deref().unwrap_or_default())?;
    }
    let attempts_max = |job: &Job| i32::try_from(job.attempts_max.max(1)).unwrap_or(i32::MAX);
    let column = |of: fn(&Job) -> &str| jobs.iter().map(of).collect::<Vec<_>>();
    query(
        "WITH clock AS (SELECT store_now_ms($1) AS now)
         INSERT INTO jobs (id, model, format, tenant, priority, state, cost, attempts_max, run_at,
                           expires_at, submitted_at, replay_of, job, custom_id)
         SELECT id, model, format, tenant, priority,
                CASE WHEN run_at > now THEN 'scheduled' ELSE 'queued' END, cost, attempts_max,
                CASE WHEN run_at > now THEN run_at END, expires_at, now, replay_of, job, custom_id
         FROM clock, UNNEST($2::uuid[], $3::text[], $4::text[], $5::text[], $6::text[],
                            $7::bigint[], $8::integer[], $9::bigint[], $10::bigint[],
                            $11::uuid[], $12::bytea[], $13::text[])
              AS job (id, model, format, tenant, priority, cost, attempts_max, run_at, expires_at,
                      replay_of, job, custom_id)
         ON CONFLICT (id) DO NOTHING",
    )
    .bind(now)
    .bind(jobs.iter().map(|job| Uuid::from(job.id)).collect::<Vec<_>>())
    .bind(column(|job| &job.queue.model))
    .bind(column(|job| &job.queue.format))
    .bind(column(|job| &job.tenant.0))
    .bind(column(|job| job.priority.as_str()))
    .bind(jobs.iter().map(|job| i64::from(job.cost())).collect::<Vec<_>>())
    .bind(jobs.iter().map(attempts_max).collect::<Vec<_>>())
    .bind(jobs.iter().map(|job| job.run_at.map(|at| at.0)).collect::<Vec<_>>())
    .bind(jobs.iter().map(|job| job.expires_at.map(|at| at.0)).collect::<Vec<_>>())
    .bind(replay_of.map_or_else(
        || vec![None; jobs.len()],
        |ids| ids.iter().map(|id| Some(Uuid::from(*id))).collect(),
    ))
    .bind(jobs.iter().map(wire::encode).collect::<Vec<_>>())
    .bind(jobs.iter().map(|job| job.custom_id.as_deref()).collect::<Vec<_>>())
    .execute(connection)
    .await?;
    Ok(())
}

/// Claims the jobs that are queued, in the order of `ids`.
pub(super) async fn claim(
    store: &PostgresStore,
    ids: &[JobId],
    by: Claimant<'_>,
) -> Result<Vec<Claim>, StoreError> {
    let claim = query(
        "WITH clock AS (SELECT store_now_ms($1) AS now), claimed AS (
             UPDATE jobs
             SET state = 'running', epoch = epoch + 1, claim_id = $5, owner = $3,
                 lease_until = (SELECT now FROM clock) + $4,
                 claimed_at = (SELECT now FROM clock),
                 started_at = coalesce(started_at, (SELECT now FROM clock)),
                 alone = losses >= $6
             WHERE id = ANY($2) AND state = 'queued'
               AND (expires_at IS NULL OR expires_at > (SELECT now FROM clock))
             RETURNING id, epoch, claim_id, attempts, alone, expires_at, job, checkpoint
         )
         SELECT id, epoch, claim_id, attempts, alone, job, checkpoint,
                expires_at - now AS expires_in
         FROM claimed, clock",
    )
    .bind(store.clock_parameter())
    .bind(id_list(ids.iter().copied()))
    .bind(by.owner)
    .bind(milliseconds(by.lease))
    .bind(by.claim_id)
    .bind(LOSSES_MAX);
    let claimed = store.fetch_all(claim).await?;
    let (mut claims, unreadable) = rows::claims(&claimed)?;
    if !unreadable.is_empty()
        && let Err(error) = finish(store, &unreadable).await
    {
        // Their leases expire; the readable jobs must not wait for that.
        tracing::warn!(%error, "attempts at unreadable jobs not recorded");
    }
    Ok(ids.iter().filter_map(|id| claims.remove(id)).collect())
}

/// Ids in ascending order, their epochs and their claim ids.
fn columns(claims: &[ClaimRef]) -> (Vec<Uuid>, Vec<i64>, Vec<i64>) {
    let mut sorted = claims.to_vec();
    sorted.sort_unstable();
    sorted.dedup();
    let column = |of: fn(&ClaimRef) -> i64| sorted.iter().map(of).collect();
    let ids = sorted.iter().map(|claim| Uuid::from(claim.id)).collect();
    (ids, column(|claim| claim.epoch), column(|claim| claim.claim_id))
}

/// Extends leases, and takes back jobs that lost theirs and were not claimed since; returns the claims
/// that are no longer valid.
pub(super) async fn renew(
    store: &PostgresStore,
    claims: &[ClaimRef],
    lease: Duration,
) -> Result<Vec<ClaimRef>, StoreError> {
    let (ids, epochs, claim_ids) = columns(claims);
    let renew = query(
        "UPDATE jobs SET lease_until = store_now_ms($1) + $2, state = 'running',
                         losses = losses - (state = 'queued')::integer
         FROM UNNEST($3::uuid[], $4::bigint[], $5::bigint[]) AS claim (id, epoch, claim_id)
         WHERE jobs.id = ANY($3) AND jobs.id = claim.id AND jobs.epoch = claim.epoch
           AND jobs.claim_id = claim.claim_id AND jobs.state IN ('running', 'queued')
         RETURNING jobs.id, jobs.epoch, jobs.claim_id",
    );
    let renew = renew
        .bind(store.clock_parameter())
        .bind(milliseconds(lease))
        .bind(ids)
        .bind(epochs)
        .bind(claim_ids);
    rows::lost(claims.iter().copied(), &store.fetch_all(renew).await?)
}

/// Saves the checkpoints of the valid claims; returns the other claims.
pub(super) async fn checkpoint(
    store: &PostgresStore,
    saved: &[(ClaimRef, Vec<u8>)],
) -> Result<Vec<ClaimRef>, StoreError> {
    // If a claim occurs twice, the last occurrence counts.
    let last: HashMap<ClaimRef, &[u8]> =
        saved.iter().map(|(claim, bytes)| (*claim, bytes.as_slice())).collect();
    let mut last: Vec<(ClaimRef, &[u8])> = last.into_iter().collect();
    last.sort_unstable_by_key(|(claim, _)| *claim);
    let save = query(
        "UPDATE jobs SET checkpoint = saved.bytes
         FROM UNNEST($1::uuid[], $2::bigint[], $3::bigint[], $4::bytea[])
              AS saved (id, epoch, claim_id, bytes)
         WHERE jobs.id = ANY($1) AND jobs.id = saved.id AND jobs.epoch = saved.epoch
           AND jobs.claim_id = saved.claim_id AND jobs.state = 'running'
         RETURNING jobs.id, jobs.epoch, jobs.claim_id",
    )
    .bind(last.iter().map(|(claim, _)| Uuid::from(claim.id)).collect::<Vec<_>>())
    .bind(last.iter().map(|(claim, _)| claim.epoch).collect::<Vec<_>>())
    .bind(last.iter().map(|(claim, _)| claim.claim_id).collect::<Vec<_>>())
    .bind(last.iter().map(|(_, bytes)| *bytes).collect::<Vec<_>>());
    rows::lost(saved.iter().map(|(claim, _)| *claim), &store.fetch_all(save).await?)
}

/// Releases claims without counting an attempt; returns the jobs of the valid claims. The jobs have then
/// lost at least `losses_min` workers.
pub(super) async fn hand_back(
    store: &PostgresStore,
    claims: &[ClaimRef],
    losses_min: i32,
) -> Result<Vec<JobId>, StoreError> {
    let (ids, _, claim_ids) = columns(claims);
    let release = query(
        "UPDATE jobs SET state = 'queued', epoch = jobs.epoch + 1, claim_id = NULL, owner = NULL,
                         lease_until = NULL, losses = greatest(losses, $3)
         FROM UNNEST($1::uuid[], $2::bigint[]) AS claim (id, claim_id)
         WHERE jobs.id = ANY($1) AND jobs.id = claim.id AND jobs.claim_id = claim.claim_id
           AND jobs.state = 'running'
         RETURNING jobs.id",
    );
    let release = release.bind(ids).bind(claim_ids).bind(losses_min);
    rows::ids(&store.fetch_all(release).await?)
}

/// Cancels jobs that are not in a terminal state.
pub(super) async fn cancel(store: &PostgresStore, ids: &[JobId]) -> Result<Vec<JobId>, StoreError> {
    let cancel = query(
        "WITH cancelled AS (
             UPDATE jobs SET state = 'cancelled', epoch = epoch + 1, owner = NULL,
                             lease_until = NULL, run_at = NULL, checkpoint = NULL
             WHERE id = ANY($2) AND state IN ('scheduled', 'queued', 'running', 'retrying')
             RETURNING id, tenant, model, format
         ), recorded AS (
             INSERT INTO results (job_id, tenant, model, format, finished_at)
             SELECT id, tenant, model, format, store_now_ms($1) FROM cancelled
         )
         SELECT id FROM cancelled",
    );
    let cancel = cancel.bind(store.clock_parameter()).bind(id_list(ids.iter().copied()));
    rows::ids(&store.fetch_all(cancel).await?)
}

/// Deletes jobs in any state with their results and errors; returns how many were deleted.
pub(super) async fn delete(store: &PostgresStore, ids: &[JobId]) -> Result<u64, StoreError> {
    let delete = query(
        "WITH deleted AS (DELETE FROM jobs WHERE id = ANY($1) RETURNING id),
              deleted_results AS (DELETE FROM results WHERE job_id = ANY($1)),
              deleted_errors AS (DELETE FROM attempt_errors WHERE job_id = ANY($1))
         SELECT count(*) AS jobs FROM deleted",
    );
    rows::count(&store.fetch_one(delete.bind(id_list(ids.iter().copied()))).await?, "jobs")
}

/// Deletes dead letters with their results and errors; returns how many were deleted.
pub(super) async fn purge(store: &PostgresStore, ids: &[JobId]) -> Result<u64, StoreError> {
    let purge = query(
        "WITH purged AS (
             DELETE FROM jobs WHERE id = ANY($1) AND state = 'failed' RETURNING id
         ), purged_results AS (
             DELETE FROM results USING purged WHERE job_id = ANY($1) AND job_id = purged.id
         ), purged_errors AS (
             DELETE FROM attempt_errors USING purged WHERE job_id = ANY($1) AND job_id = purged.id
         )
         SELECT count(*) AS jobs FROM purged",
    );
    rows::count(&store.fetch_one(purge.bind(id_list(ids.iter().copied()))).await?, "jobs")
}

/// Records the attempts with a valid claim: state, result, usage and error at once. A claim that lost its
/// lease is valid until the job is claimed again. The other attempts
/// are fenced out. The statement completes the verdict, since it reads the number of attempts: after an
/// error, a job without attempts left has failed.
const FINISH: &str = "
WITH clock AS (SELECT store_now_ms($1) AS now), done AS MATERIALIZED (
    SELECT * FROM UNNEST($2::uuid[], $3::bigint[], $4::text[], $5::bytea[], $6::bytea[],
                         $7::bigint[], $8::bigint[], $9::float8[], $13::text[], $14::text[],
                         $15::bigint[], $16::bigint[])
           AS done (id, epoch, verdict, outcome, error, prompt_tokens, completion_tokens, jitter,
                    code, signature, first_token_ms, claim_id)
), settled AS (
    UPDATE jobs
    SET state = CASE WHEN verdict = 'retrying' AND attempts + 1 >= attempts_max THEN 'failed'
                     ELSE verdict END,
        run_at = CASE WHEN verdict = 'retrying' AND attempts + 1 < attempts_max
                      THEN (SELECT now FROM clock)
                           + (least($10 * 2 ^ least(attempts, $12), $11) * jitter)::bigint END,
        attempts = attempts + (error IS NOT NULL)::integer,
        error_code = code, error_signature = signature, claim_id = NULL, lease_until = NULL,
        checkpoint = NULL
    FROM done
    WHERE jobs.id = ANY($2) AND jobs.id = done.id AND jobs.epoch = done.epoch
      AND jobs.claim_id = done.claim_id AND jobs.state IN ('running', 'queued')
    RETURNING jobs.id, jobs.epoch, jobs.state, jobs.tenant, jobs.model, jobs.format, jobs.owner,
              jobs.claimed_at
), recorded AS (
    INSERT INTO results (job_id, tenant, model, format, outcome, prompt_tokens, completion_tokens,
                         finished_at, claim_epoch, claim_owner, claim_at, first_token_ms)
    SELECT id, tenant, model, format, outcome, prompt_tokens, completion_tokens, now, epoch, owner,
           claimed_at, first_token_ms
    FROM settled JOIN done USING (id, epoch), clock WHERE state <> 'retrying'
), failed AS (
    INSERT INTO attempt_errors (job_id, epoch, at, error, owner, claimed_at)
    SELECT id, epoch, now, error, owner, claimed_at
    FROM settled JOIN done USING (id, epoch), clock WHERE error IS NOT NULL
    ON CONFLICT (job_id, epoch) DO UPDATE SET at = excluded.at, error = excluded.error
)
SELECT id, state FROM settled";

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
    let usage = |done: &&FinishedAttempt| match &done.outcome {
        Outcome::Completed(completion) => completion.usage,
        Outcome::Error(_) | Outcome::Expired => Usage::default(),
    };
    fn error<'a>(done: &&'a FinishedAttempt) -> Option<&'a JobError> {
        match &done.outcome {
            Outcome::Error(error) => Some(error),
            Outcome::Completed(_) | Outcome::Expired => None,
        }
    }
    let errors = || done.iter().map(error);
    let verdict = |done: &&FinishedAttempt| attempts::verdict(&done.outcome, 0, u32::MAX).as_str();
    let finish = query(FINISH)
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
        .bind(done.iter().map(|done| done.claim.claim_id).collect::<Vec<_>>());
    let settled = store.fetch_all(finish).await?;
    let mut states: HashMap<JobId, JobState> = settled
        .iter()
        .map(|row| Ok((rows::id(row, "id")?, rows::state(row)?)))
        .collect::<Result<_, StoreError>>()?;
    let settle = |done: &FinishedAttempt| {
        states.remove(&done.claim.id).map(|state| Settled { id: done.claim.id, state })
    };
    Ok(finished.iter().filter_map(settle).collect())
}
