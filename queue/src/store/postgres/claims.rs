//! The moves of a job's life that somebody asks for, one statement each.
//!
//! A statement that changes jobs finds them by `id = ANY($1)`, which reads the primary keys of just
//! the partitions concerned, and joins what belongs to each from arrays. Under READ COMMITTED a row
//! that somebody else holds is waited for and then tested again, so of two claims of a job one gets
//! it, and a write under an old epoch finds nothing.

use std::{
    collections::{HashMap, HashSet},
    time::Duration,
};

use sqlx::{PgConnection, PgExecutor, PgPool, postgres::PgRow};
use uuid::Uuid;

use super::{milliseconds, rows, unavailable};
use crate::{
    job::{Job, JobId, JobState},
    outcome::{JobError, Outcome, Usage},
    store::{
        Claim, ClaimRef, Claimant, FinishedAttempt, Settled, StoreError,
        attempts::{self, lease_lost},
    },
    wire,
};

/// Records jobs as queued or scheduled; known ids stay as they are. `replay_of` names the dead
/// letter that each one repeats.
pub(super) async fn insert_jobs(
    connection: &mut PgConnection,
    jobs: &[Job],
    replay_of: Option<&[Uuid]>,
    now: Option<i64>,
) -> Result<(), StoreError> {
    for job in jobs {
        rows::storable("model", &job.queue.model)?;
        rows::storable("format", &job.queue.format)?;
        rows::storable("tenant", &job.tenant.0)?;
        rows::storable("custom_id", job.custom_id.as_deref().unwrap_or_default())?;
    }
    let attempts_max = |job: &Job| i32::try_from(job.attempts_max.max(1)).unwrap_or(i32::MAX);
    let column = |of: fn(&Job) -> &str| jobs.iter().map(of).collect::<Vec<_>>();
    sqlx::query(
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
    .bind(
        replay_of
            .map_or_else(|| vec![None; jobs.len()], |ids| ids.iter().copied().map(Some).collect()),
    )
    .bind(jobs.iter().map(wire::encode).collect::<Vec<_>>())
    .bind(jobs.iter().map(|job| job.custom_id.as_deref()).collect::<Vec<_>>())
    .execute(connection)
    .await
    .map_err(unavailable)?;
    Ok(())
}

/// Claims those of `ids` that are queued or whose lease is over, in the order given. A lost lease
/// counts as an attempt; a job that it leaves none is the reconciler's.
pub(super) async fn claim(
    pool: &PgPool,
    ids: &[JobId],
    by: Claimant<'_>,
    now: Option<i64>,
) -> Result<Vec<Claim>, StoreError> {
    let claimed = sqlx::query(
        "WITH clock AS (SELECT store_now_ms($1) AS now), claimed AS (
             UPDATE jobs
             SET state = 'running', epoch = epoch + 1, owner = $3,
                 lease_until = (SELECT now FROM clock) + $4,
                 claimed_at = (SELECT now FROM clock),
                 started_at = coalesce(started_at, (SELECT now FROM clock)),
                 lapsed_epoch = CASE WHEN state = 'running' THEN epoch END,
                 lapsed_owner = CASE WHEN state = 'running' THEN owner END,
                 lapsed_claimed_at = CASE WHEN state = 'running' THEN claimed_at END,
                 attempts = attempts + (state = 'running')::integer
             WHERE id = ANY($2)
               AND (state = 'queued'
                    OR (state = 'running' AND lease_until <= (SELECT now FROM clock)
                        AND attempts + 1 < attempts_max))
               AND (expires_at IS NULL OR expires_at > (SELECT now FROM clock))
             RETURNING id, epoch, attempts, lapsed_epoch, lapsed_owner, lapsed_claimed_at,
                       expires_at, job, checkpoint
         ), lapsed AS (
             INSERT INTO attempt_errors (job_id, epoch, at, error, owner, claimed_at)
             SELECT id, lapsed_epoch, now, $5, lapsed_owner, lapsed_claimed_at
             FROM claimed, clock WHERE lapsed_epoch IS NOT NULL
             ON CONFLICT DO NOTHING
         )
         SELECT id, epoch, attempts, job, checkpoint, expires_at - now AS expires_in
         FROM claimed, clock",
    )
    .bind(now)
    .bind(rows::sorted(ids.iter().copied()))
    .bind(by.owner)
    .bind(milliseconds(by.lease))
    .bind(wire::encode(&lease_lost()))
    .fetch_all(pool)
    .await
    .map_err(unavailable)?;
    let mut claims = HashMap::with_capacity(claimed.len());
    let mut unreadable = Vec::new();
    for row in &claimed {
        let id = rows::id(row, "id")?;
        match claim_of(row) {
            Ok(claim) => {
                claims.insert(id, claim);
            }
            Err(error) => {
                tracing::error!(job = %id, %error, "a claimed job cannot be read");
                let outcome = Outcome::Error(attempts::unreadable(&error));
                unreadable.push(FinishedAttempt {
                    claim: rows::held(row)?,
                    outcome,
                    first_token: None,
                });
            }
        }
    }
    if !unreadable.is_empty()
        && let Err(error) = finish(pool, &unreadable, now).await
    {
        // Their leases run out: their neighbours must not wait for that.
        tracing::warn!(%error, "attempts at unreadable jobs not recorded");
    }
    Ok(ids.iter().filter_map(|id| claims.remove(id)).collect())
}

fn claim_of(row: &PgRow) -> Result<Claim, StoreError> {
    let expires_in: Option<i64> = rows::get(row, "expires_in")?;
    Ok(Claim {
        job: rows::decode(row, "job")?,
        epoch: rows::integer(row, "epoch")?,
        attempts: rows::attempts(row)?,
        expires_in: expires_in.map(rows::duration),
        checkpoint: rows::get(row, "checkpoint")?,
    })
}

/// Those of `held` that are not among the rows.
fn lost(
    held: impl IntoIterator<Item = ClaimRef>,
    kept: &[PgRow],
) -> Result<Vec<ClaimRef>, StoreError> {
    let kept: HashSet<ClaimRef> = kept.iter().map(rows::held).collect::<Result<_, _>>()?;
    Ok(held.into_iter().filter(|held| !kept.contains(held)).collect())
}

/// Extends leases; returns the claims that hold no more.
pub(super) async fn renew(
    pool: &PgPool,
    held: &[ClaimRef],
    lease: Duration,
    now: Option<i64>,
) -> Result<Vec<ClaimRef>, StoreError> {
    let (ids, epochs) = rows::columns(held);
    let kept = sqlx::query(
        "UPDATE jobs SET lease_until = store_now_ms($1) + $2
         FROM UNNEST($3::uuid[], $4::bigint[]) AS held (id, epoch)
         WHERE jobs.id = ANY($3) AND jobs.id = held.id AND jobs.epoch = held.epoch
           AND jobs.state = 'running'
         RETURNING jobs.id, jobs.epoch",
    )
    .bind(now)
    .bind(milliseconds(lease))
    .bind(ids)
    .bind(epochs)
    .fetch_all(pool)
    .await
    .map_err(unavailable)?;
    lost(held.iter().copied(), &kept)
}

/// Saves the work of the claims that hold; returns the others.
pub(super) async fn checkpoint(
    pool: &PgPool,
    saved: &[(ClaimRef, Vec<u8>)],
) -> Result<Vec<ClaimRef>, StoreError> {
    // The last one of a claim that is named twice.
    let last: HashMap<ClaimRef, &[u8]> =
        saved.iter().map(|(held, bytes)| (*held, bytes.as_slice())).collect();
    let mut last: Vec<(ClaimRef, &[u8])> = last.into_iter().collect();
    last.sort_unstable_by_key(|(held, _)| (held.id, held.epoch));
    let kept = sqlx::query(
        "UPDATE jobs SET checkpoint = saved.bytes
         FROM UNNEST($1::uuid[], $2::bigint[], $3::bytea[]) AS saved (id, epoch, bytes)
         WHERE jobs.id = ANY($1) AND jobs.id = saved.id AND jobs.epoch = saved.epoch
           AND jobs.state = 'running'
         RETURNING jobs.id, jobs.epoch",
    )
    .bind(last.iter().map(|(held, _)| Uuid::from(held.id)).collect::<Vec<_>>())
    .bind(last.iter().map(|(held, _)| held.epoch).collect::<Vec<_>>())
    .bind(last.iter().map(|(_, bytes)| *bytes).collect::<Vec<_>>())
    .fetch_all(pool)
    .await
    .map_err(unavailable)?;
    lost(saved.iter().map(|(held, _)| *held), &kept)
}

/// Gives claims back; returns those that were held.
pub(super) async fn hand_back(pool: &PgPool, held: &[ClaimRef]) -> Result<Vec<JobId>, StoreError> {
    let (ids, epochs) = rows::columns(held);
    let returned = sqlx::query(
        "UPDATE jobs SET state = 'queued', epoch = jobs.epoch + 1, owner = NULL, lease_until = NULL
         FROM UNNEST($1::uuid[], $2::bigint[]) AS held (id, epoch)
         WHERE jobs.id = ANY($1) AND jobs.id = held.id AND jobs.epoch = held.epoch
           AND jobs.state = 'running'
         RETURNING jobs.id",
    )
    .bind(ids)
    .bind(epochs)
    .fetch_all(pool)
    .await
    .map_err(unavailable)?;
    rows::ids(&returned)
}

/// Withdraws jobs that are not over.
pub(super) async fn cancel(
    pool: &PgPool,
    ids: &[JobId],
    now: Option<i64>,
) -> Result<Vec<JobId>, StoreError> {
    let cancelled = sqlx::query(
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
    )
    .bind(now)
    .bind(rows::sorted(ids.iter().copied()))
    .fetch_all(pool)
    .await
    .map_err(unavailable)?;
    rows::ids(&cancelled)
}

/// Deletes jobs with their results and errors, whatever their state.
pub(super) async fn delete(
    executor: impl PgExecutor<'_>,
    ids: &[JobId],
) -> Result<u64, StoreError> {
    let row = sqlx::query(
        "WITH deleted AS (DELETE FROM jobs WHERE id = ANY($1) RETURNING id),
              unrecorded AS (DELETE FROM results WHERE job_id = ANY($1)),
              forgiven AS (DELETE FROM attempt_errors WHERE job_id = ANY($1))
         SELECT count(*) AS jobs FROM deleted",
    )
    .bind(rows::sorted(ids.iter().copied()))
    .fetch_one(executor)
    .await
    .map_err(unavailable)?;
    rows::count(&row, "jobs")
}

/// Records the attempts whose epoch still holds: state, result, usage and error at once. The others
/// were fenced out. The verdict is completed here, where the attempts are known: an error of a job
/// that has no attempt left fails it.
const FINISH: &str = "
WITH clock AS (SELECT store_now_ms($1) AS now), done AS MATERIALIZED (
    SELECT * FROM UNNEST($2::uuid[], $3::bigint[], $4::text[], $5::bytea[], $6::bytea[],
                         $7::bigint[], $8::bigint[], $9::float8[], $13::text[], $14::text[],
                         $15::bigint[])
           AS done (id, epoch, verdict, outcome, error, prompt_tokens, completion_tokens, jitter,
                    code, signature, first_token_ms)
), settled AS (
    UPDATE jobs
    SET state = CASE WHEN verdict = 'retrying' AND attempts + 1 >= attempts_max THEN 'failed'
                     ELSE verdict END,
        run_at = CASE WHEN verdict = 'retrying' AND attempts + 1 < attempts_max
                      THEN (SELECT now FROM clock)
                           + (least($10 * 2 ^ least(attempts, $12), $11) * jitter)::bigint END,
        attempts = attempts + (error IS NOT NULL)::integer,
        error_code = code, error_signature = signature, lease_until = NULL, checkpoint = NULL
    FROM done
    WHERE jobs.id = ANY($2) AND jobs.id = done.id AND jobs.epoch = done.epoch
      AND jobs.state = 'running'
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
    ON CONFLICT DO NOTHING
)
SELECT id, state FROM settled";

/// See [`FINISH`].
pub(super) async fn finish(
    pool: &PgPool,
    finished: &[FinishedAttempt],
    now: Option<i64>,
) -> Result<Vec<Settled>, StoreError> {
    let mut seen = HashSet::with_capacity(finished.len());
    // An attempt named twice in one call is recorded as it was named first.
    let mut done: Vec<&FinishedAttempt> =
        finished.iter().filter(|done| seen.insert(done.claim)).collect();
    done.sort_unstable_by_key(|done| (done.claim.id, done.claim.epoch));
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
    let tokens = |count: u64| i64::try_from(count).unwrap_or(i64::MAX);
    let settled = sqlx::query(FINISH)
        .bind(now)
        .bind(done.iter().map(|done| Uuid::from(done.claim.id)).collect::<Vec<_>>())
        .bind(done.iter().map(|done| done.claim.epoch).collect::<Vec<_>>())
        .bind(done.iter().map(verdict).collect::<Vec<_>>())
        .bind(done.iter().map(|done| wire::encode(&done.outcome)).collect::<Vec<_>>())
        .bind(errors().map(|error| error.map(wire::encode)).collect::<Vec<_>>())
        .bind(done.iter().map(|done| tokens(usage(done).prompt_tokens)).collect::<Vec<_>>())
        .bind(done.iter().map(|done| tokens(usage(done).completion_tokens)).collect::<Vec<_>>())
        .bind(done.iter().map(|done| attempts::jitter(done.claim.id)).collect::<Vec<_>>())
        .bind(attempts::BACKOFF_BASE.as_secs_f64() * 1000.0)
        .bind(attempts::BACKOFF_MAX.as_secs_f64() * 1000.0)
        .bind(f64::from(attempts::BACKOFF_DOUBLINGS_MAX))
        .bind(errors().map(|error| error.map(|error| &*error.code)).collect::<Vec<_>>())
        .bind(errors().map(|error| error.map(attempts::signature)).collect::<Vec<_>>())
        .bind(done.iter().map(|done| done.first_token.map(milliseconds)).collect::<Vec<_>>())
        .fetch_all(pool)
        .await
        .map_err(unavailable)?;
    let mut states: HashMap<JobId, JobState> = settled
        .iter()
        .map(|row| Ok((rows::id(row, "id")?, rows::state(row)?)))
        .collect::<Result<_, StoreError>>()?;
    let settle = |done: &FinishedAttempt| {
        states.remove(&done.claim.id).map(|state| Settled { id: done.claim.id, state })
    };
    Ok(finished.iter().filter_map(settle).collect())
}
