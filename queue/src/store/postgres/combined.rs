//! The ends of jobs in the combined layout: the row of a job stays where it is.

/// See [`FINISH`](super::ends::FINISH).
pub(super) const FINISH: &str = "
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

/// See [`CANCEL`](super::ends::CANCEL).
pub(super) const CANCEL: &str = "
WITH cancelled AS (
             UPDATE jobs SET state = 'cancelled', epoch = epoch + 1, owner = NULL,
                             lease_until = NULL, run_at = NULL, checkpoint = NULL
             WHERE id = ANY($2) AND state IN ('scheduled', 'queued', 'running', 'retrying')
             RETURNING id, tenant, model, format
         ), recorded AS (
             INSERT INTO results (job_id, tenant, model, format, finished_at)
             SELECT id, tenant, model, format, store_now_ms($1) FROM cancelled
         )
         SELECT id FROM cancelled";

/// See [`LAPSE`](super::ends::LAPSE).
pub(super) const LAPSE: &str = "
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
    RETURNING jobs.id, epoch, state, tenant, model, format, priority, cost, shard_key, owner, claimed_at
), errors AS (
    INSERT INTO attempt_errors (job_id, epoch, at, error, owner, claimed_at)
    SELECT id, epoch, now, $3, owner, claimed_at FROM moved, clock ON CONFLICT DO NOTHING
), recorded AS (
    INSERT INTO results (job_id, tenant, model, format, outcome, finished_at, claim_epoch, claim_owner,
                         claim_at)
    SELECT id, tenant, model, format, $4, now, epoch, owner, claimed_at
    FROM moved, clock WHERE state = 'failed'
)
SELECT id, state, tenant, model, format, priority, cost, shard_key FROM moved ORDER BY id";

/// See [`EXPIRE`](super::ends::EXPIRE).
pub(super) const EXPIRE: &str = "
WITH clock AS (SELECT store_now_ms($1) AS now), due AS MATERIALIZED (
    SELECT id FROM jobs
    WHERE expires_at <= (SELECT now FROM clock) AND state IN ('scheduled', 'queued', 'retrying')
    ORDER BY expires_at LIMIT $2 FOR NO KEY UPDATE SKIP LOCKED
), moved AS (
    UPDATE jobs SET state = 'expired', run_at = NULL, checkpoint = NULL
    FROM due WHERE jobs.id = ANY(ARRAY(SELECT id FROM due)) AND jobs.id = due.id
    RETURNING jobs.id, state, tenant, model, format, priority, cost, shard_key
), recorded AS (
    INSERT INTO results (job_id, tenant, model, format, outcome, finished_at)
    SELECT id, tenant, model, format, $3, now FROM moved, clock
)
SELECT id, state, tenant, model, format, priority, cost, shard_key FROM moved ORDER BY id";
