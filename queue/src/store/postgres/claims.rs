//! Changes of jobs on request, one statement each.
//!
//! A statement that changes jobs finds them by `id = ANY($1)`, which reads the primary keys of only the
//! partitions concerned, and joins the values of each job from arrays. Under READ COMMITTED a row that
//! another transaction holds is waited for and then tested again: of two claims of a job one succeeds,
//! and a write under an old epoch matches nothing.
//!
//! The state is tested as an expression: with a plain comparison the planner may read all queued or running
//! jobs along their index instead of the primary key, when its statistics are from a shorter queue.

use std::{collections::HashMap, time::Duration};

use sqlx::PgConnection;
use uuid::Uuid;

pub(super) use super::ends::{cancel, finish};
use super::{
    PostgresStore,
    announcements::announce_again,
    calls::query,
    dialect::{id_list, storable},
    rows::{self, milliseconds},
};
use crate::{
    job::{Job, JobId},
    prefix_key,
    store::{Claim, ClaimRef, Claimant, StoreError, attempts::LOSSES_MAX},
    wire,
};

/// The ids in `jobs` are looked up once, along the primary keys of few partitions. A job that ends while
/// the statement runs may be recorded again: then it runs twice, and its first result stays.
const INSERT: &str = "
WITH clock AS (SELECT store_now_ms($1) AS now), announced AS (
    DELETE FROM announcements WHERE first = ANY($14) AND NOT again
), added AS (
    INSERT INTO open_jobs (id, model, format, tenant, priority, state, cost, attempts_max, run_at,
                           expires_at, submitted_at, replay_of, job, custom_id, shard_key,
                           metadata, line_key, tier, api_key, line_shape)
    SELECT id, model, format, tenant, priority,
           CASE WHEN run_at > now THEN 'scheduled' ELSE 'queued' END, cost, attempts_max,
           CASE WHEN run_at > now THEN run_at END, expires_at, now, replay_of, job, custom_id, shard_key,
           metadata::jsonb, line_key, tier, api_key, line_shape
    FROM clock, UNNEST($2::uuid[], $3::text[], $4::text[], $5::text[], $6::text[], $7::bigint[],
                       $8::integer[], $9::bigint[], $10::bigint[], $11::uuid[], $12::bytea[],
                       $13::text[], $15::integer[], $16::text[], $17::bytea[], $18::text[],
                       $19::text[], $20::text[])
         AS job (id, model, format, tenant, priority, cost, attempts_max, run_at, expires_at,
                 replay_of, job, custom_id, shard_key, metadata, line_key, tier, api_key, line_shape)
    WHERE job.id <> ALL (ARRAY(SELECT id FROM jobs WHERE id = ANY($2)))
    ON CONFLICT (id) DO NOTHING RETURNING id, model, format, state
)
INSERT INTO announcements (first, again, at, model, format, jobs)
SELECT (array_agg(id ORDER BY id))[1], false, now, model, format, array_agg(id ORDER BY id)
FROM added, clock WHERE state = 'queued' GROUP BY model, format, now
ON CONFLICT (first, again, at) DO NOTHING";

/// Records jobs as queued or scheduled; jobs with known ids stay as they are. `replay_of` has the dead
/// letter that each job repeats.
pub(super) async fn insert_jobs(
    store: &PostgresStore,
    connection: &mut PgConnection,
    jobs: &[Job],
    replay_of: Option<&[JobId]>,
) -> Result<(), StoreError> {
    for job in jobs {
        storable("model", &job.queue.model)?;
        storable("format", &job.queue.format)?;
        storable("tenant", &job.tenant.0)?;
        storable("custom_id", job.custom_id.as_deref().unwrap_or_default())?;
    }
    let attempts_max = |job: &Job| i32::try_from(job.attempts_max.max(1)).unwrap_or(i32::MAX);
    let column = |of: fn(&Job) -> &str| jobs.iter().map(of).collect::<Vec<_>>();
    query(INSERT)
        .bind(store.clock_parameter())
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
        .bind(store.announced.take())
        .bind(jobs.iter().map(|job| i32::from(prefix_key::shard(&job.prompt))).collect::<Vec<_>>())
        .bind(jobs.iter().map(Job::searched_metadata).collect::<Vec<_>>())
        .bind(jobs.iter().map(|job| job.line_key.map(Vec::from)).collect::<Vec<_>>())
        .bind(column(|job| job.billing.tier.as_str()))
        .bind(jobs.iter().map(|job| job.billing.key.map(|key| key.to_string())).collect::<Vec<_>>())
        .bind(jobs.iter().map(|job| job.line_shape).collect::<Vec<_>>())
        .execute(connection)
        .await?;
    Ok(())
}

const CLAIM: &str = "
WITH clock AS (SELECT store_now_ms($1) AS now), claimed AS (
    UPDATE open_jobs
    SET state = 'running', epoch = epoch + 1, claim_id = $5, owner = $3,
        lease_until = (SELECT now FROM clock) + $4, claimed_at = (SELECT now FROM clock),
        started_at = coalesce(started_at, (SELECT now FROM clock)), alone = losses >= $6
    WHERE id = ANY($2) AND state || '' = 'queued' AND ($7::text IS NULL OR (model = $7 AND format = $8))
      AND (expires_at IS NULL OR expires_at > (SELECT now FROM clock))
    RETURNING id, epoch, claim_id, attempts, alone, expires_at, job, checkpoint, model, format
)
SELECT id, epoch, claim_id, attempts, alone, job, checkpoint, model, format, expires_at - now AS expires_in
FROM claimed, clock";

/// Claims the jobs that are queued, in the order of `ids`.
pub(super) async fn claim(
    store: &PostgresStore,
    ids: &[JobId],
    by: Claimant<'_>,
) -> Result<Vec<Claim>, StoreError> {
    let claim = query(CLAIM)
        .bind(store.clock_parameter())
        .bind(id_list(ids.iter().copied()))
        .bind(by.owner)
        .bind(milliseconds(by.lease))
        .bind(by.claim_id)
        .bind(LOSSES_MAX)
        .bind(by.queue.map(|queue| &*queue.model))
        .bind(by.queue.map(|queue| &*queue.format));
    let claimed = store.fetch_hot(claim).await?;
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

/// Extends the leases of the workers that hold the claims, and reads the claims. A claim has a lease of its
/// own, so that a claim that its worker never heard of ends. It needs a change when that one is not about
/// as long as asked for, or is lost.
const RENEW: &str = "
WITH clock AS (SELECT store_now_ms($1) AS now), held AS MATERIALIZED (
    SELECT open_jobs.id, open_jobs.epoch, open_jobs.claim_id, owner, state, lease_until
    FROM open_jobs JOIN UNNEST($3::uuid[], $4::bigint[], $5::bigint[]) AS claim (id, epoch, claim_id)
         ON open_jobs.id = claim.id AND open_jobs.epoch = claim.epoch
            AND open_jobs.claim_id = claim.claim_id
    WHERE open_jobs.id = ANY($3) AND state IN ('running', 'queued')
), leased AS (
    INSERT INTO worker_leases (owner, until)
    SELECT DISTINCT owner, now + $2 FROM held, clock WHERE state = 'running'
    ON CONFLICT (owner) DO UPDATE SET until = excluded.until
)
SELECT id, epoch, claim_id,
       state = 'queued' OR (lease_until NOT BETWEEN now + $2 * 2 / 3 AND now + $2) IS TRUE
           AS must_change
FROM held, clock";

/// Gives claims the lease of their worker; takes back jobs that lost their lease, which gives them one of
/// their own.
const CHANGE_LEASES: &str = "
UPDATE open_jobs
SET lease_until = CASE state WHEN 'queued' THEN store_now_ms($1) + $2 END,
    state = 'running', losses = losses - (state = 'queued')::integer
FROM UNNEST($3::uuid[], $4::bigint[], $5::bigint[]) AS claim (id, epoch, claim_id)
WHERE open_jobs.id = ANY($3) AND open_jobs.id = claim.id AND open_jobs.epoch = claim.epoch
  AND open_jobs.claim_id = claim.claim_id AND open_jobs.state IN ('running', 'queued')
RETURNING open_jobs.id, open_jobs.epoch, open_jobs.claim_id";

/// Extends leases, and takes back jobs that lost theirs and were not claimed since; returns the claims
/// that are no longer valid.
pub(super) async fn renew(
    store: &PostgresStore,
    claims: &[ClaimRef],
    lease: Duration,
) -> Result<Vec<ClaimRef>, StoreError> {
    let bound = |sql: &'static str, claims: &[ClaimRef]| {
        let (ids, epochs, claim_ids) = columns(claims);
        let bound = query(sql).bind(store.clock_parameter()).bind(milliseconds(lease));
        bound.bind(ids).bind(epochs).bind(claim_ids)
    };
    let mut kept = store.fetch_hot(bound(RENEW, claims)).await?;
    let mut to_change = Vec::new();
    for row in &kept {
        if rows::get(row, "must_change")? {
            to_change.push(rows::claim_ref(row)?);
        }
    }
    if !to_change.is_empty() {
        let mut unchanged = Vec::with_capacity(kept.len());
        for row in kept {
            if !rows::get::<bool>(&row, "must_change")? {
                unchanged.push(row);
            }
        }
        unchanged.extend(store.fetch_hot(bound(CHANGE_LEASES, &to_change)).await?);
        kept = unchanged;
    }
    rows::lost(claims.iter().copied(), &kept)
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
        "UPDATE open_jobs SET checkpoint = saved.bytes
         FROM UNNEST($1::uuid[], $2::bigint[], $3::bigint[], $4::bytea[])
              AS saved (id, epoch, claim_id, bytes)
         WHERE open_jobs.id = ANY($1) AND open_jobs.id = saved.id
           AND open_jobs.epoch = saved.epoch AND open_jobs.claim_id = saved.claim_id
           AND open_jobs.state || '' = 'running'
         RETURNING open_jobs.id, open_jobs.epoch, open_jobs.claim_id",
    )
    .bind(last.iter().map(|(claim, _)| Uuid::from(claim.id)).collect::<Vec<_>>())
    .bind(last.iter().map(|(claim, _)| claim.epoch).collect::<Vec<_>>())
    .bind(last.iter().map(|(claim, _)| claim.claim_id).collect::<Vec<_>>())
    .bind(last.iter().map(|(_, bytes)| bytes.to_vec()).collect::<Vec<_>>());
    let kept = store.fetch_hot(save).await?;
    rows::lost(saved.iter().map(|(claim, _)| *claim), &kept)
}

/// Releases claims without counting an attempt; returns the jobs of the valid claims. The jobs have then
/// lost at least `losses_min` workers.
pub(super) async fn hand_back(
    store: &PostgresStore,
    claims: &[ClaimRef],
    losses_min: i32,
) -> Result<Vec<JobId>, StoreError> {
    let (ids, _, claim_ids) = columns(claims);
    let release = query(concat!(
        "
WITH clock AS (SELECT store_now_ms($4) AS now), queued AS (
    UPDATE open_jobs
    SET state = 'queued', epoch = open_jobs.epoch + 1, claim_id = NULL, owner = NULL,
        lease_until = NULL, losses = greatest(losses, $3)
    FROM UNNEST($1::uuid[], $2::bigint[]) AS claim (id, claim_id)
    WHERE open_jobs.id = ANY($1) AND open_jobs.id = claim.id
      AND open_jobs.claim_id = claim.claim_id AND open_jobs.state || '' = 'running'
    RETURNING open_jobs.id, model, format
)",
        announce_again!("queued"),
        "
SELECT id FROM queued"
    ))
    .bind(ids)
    .bind(claim_ids)
    .bind(losses_min)
    .bind(store.clock_parameter());
    rows::ids(&store.fetch_hot(release).await?)
}

/// Deletes jobs in any state with their results and errors; returns how many were deleted.
pub(super) async fn delete(store: &PostgresStore, ids: &[JobId]) -> Result<u64, StoreError> {
    let delete = query(
        "WITH open AS (DELETE FROM open_jobs WHERE id = ANY($1) RETURNING id),
              ended AS (DELETE FROM jobs WHERE id = ANY($1) RETURNING id),
              deleted_results AS (DELETE FROM results WHERE job_id = ANY($1)),
              deleted_errors AS (DELETE FROM attempt_errors WHERE job_id = ANY($1))
         SELECT count(*) AS jobs FROM (SELECT id FROM open UNION SELECT id FROM ended) AS deleted",
    );
    rows::count(&store.fetch_one(delete.bind(id_list(ids.iter().copied()))).await?, "jobs")
}

/// Deletes jobs that ended, with their results and errors.
pub(super) const DELETE_ENDED: &str = "
WITH ended AS (
    DELETE FROM jobs WHERE id = ANY($1) RETURNING id
), ended_results AS (
    DELETE FROM results USING ended WHERE job_id = ANY($1) AND job_id = ended.id
)
DELETE FROM attempt_errors USING ended WHERE job_id = ANY($1) AND job_id = ended.id";

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
