-- Open jobs apart from those that ended: a job is a row of `open_jobs` until it ends; then the row moves
-- to `jobs`. What happens every second reads `open_jobs` alone, which has no partitions and no old rows.
-- Processes of the previous release read and write `jobs` alone. While they run, this release does so
-- too; `tritmill migrate --finish` ends that. See `queue/src/store/postgres/layout.rs`.

CREATE TABLE open_jobs (
    LIKE jobs INCLUDING DEFAULTS INCLUDING CONSTRAINTS INCLUDING STORAGE,
    PRIMARY KEY (id)
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0);

CREATE INDEX open_jobs_queued ON open_jobs (model, format, id) WHERE state = 'queued';
CREATE INDEX open_jobs_running ON open_jobs (id) WHERE state = 'running';
CREATE INDEX open_jobs_due ON open_jobs (run_at) WHERE state IN ('scheduled', 'retrying');
CREATE INDEX open_jobs_expiring ON open_jobs (expires_at) WHERE expires_at IS NOT NULL;
CREATE INDEX open_jobs_by_tenant ON open_jobs (tenant, id);
CREATE INDEX open_jobs_set_apart ON open_jobs (state, id)
    WHERE state IN ('scheduled', 'retrying', 'failed', 'cancelled', 'expired');
CREATE INDEX open_jobs_by_custom_id ON open_jobs (custom_id, id) WHERE custom_id IS NOT NULL;

CREATE VIEW all_jobs AS
    SELECT id, model, format, tenant, priority, state, cost, epoch, attempts, attempts_max, owner,
           lease_until, run_at, expires_at, submitted_at, replay_of, job, custom_id, started_at,
           claimed_at, error_code, error_signature
    FROM open_jobs
    UNION ALL
    SELECT id, model, format, tenant, priority, state, cost, epoch, attempts, attempts_max, owner,
           lease_until, run_at, expires_at, submitted_at, replay_of, job, custom_id, started_at,
           claimed_at, error_code, error_signature
    FROM jobs;

-- Jobs that ended since the last sample, one row for each queue and state of a statement. The sampler
-- deletes what it has counted.
CREATE TABLE recent_ends (
    model             text COLLATE "C" NOT NULL,
    format            text COLLATE "C" NOT NULL,
    state             text NOT NULL,
    jobs              bigint NOT NULL,
    prompt_tokens     bigint NOT NULL,
    completion_tokens bigint NOT NULL,
    start_ms          bigint[],  -- of each job: from submission to the first claim
    run_ms            bigint[],  -- from the latest claim to the end
    first_token_ms    bigint[]   -- from submission to the first token
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 10000);
