-- What the release after 0.1.0 adds.

-- Idempotency keys of uploads. A key lives as long as its file.
CREATE TABLE file_keys (
    tenant       text COLLATE "C" NOT NULL,
    key          text COLLATE "C" NOT NULL,
    request_hash bytea NOT NULL,  -- SHA-256 of the upload
    file_id      uuid  NOT NULL REFERENCES files (id) ON DELETE CASCADE,
    PRIMARY KEY (tenant, key)
);
CREATE INDEX file_keys_by_file ON file_keys (file_id);

-- Idempotency keys of single calls, for a day.
CREATE TABLE call_keys (
    tenant       text COLLATE "C" NOT NULL,
    key          text COLLATE "C" NOT NULL,
    request_hash bytea  NOT NULL,  -- SHA-256 of the request
    job_id       uuid   NOT NULL,  -- may be in no table: it is submitted after its key
    created_at   bigint NOT NULL,
    PRIMARY KEY (tenant, key)
);
CREATE INDEX call_keys_by_age ON call_keys (created_at);

-- Limits of tenants, where operators set them. A tenant without a row, and NULL: those of the service.
CREATE TABLE tenant_limits (
    tenant       text COLLATE "C" PRIMARY KEY,
    file_bytes   bigint,  -- of all its files together
    open_batches bigint,  -- unfinished ones
    keys         bigint   -- that are not revoked
);

-- The address that an operator's request came from; NULL: the command line, or an earlier release.
ALTER TABLE audit ADD COLUMN address text;

-- Keys that expire, keys of scrapers and of a tenant's own administrators, and when a key was used, within an hour.
ALTER TABLE api_keys
    ADD COLUMN expires_at bigint,
    ADD COLUMN last_used_at bigint,
    DROP CONSTRAINT api_keys_role_check,
    ADD CONSTRAINT api_keys_role_check CHECK (role IN ('metrics', 'read', 'submit', 'manage', 'operate'));
CREATE INDEX api_keys_by_tenant ON api_keys (tenant, id);

-- Pairs of names and values that the caller gave a job, and the jobs that have some. Jobs of earlier releases have none.
ALTER TABLE open_jobs ADD COLUMN metadata jsonb;
ALTER TABLE jobs ADD COLUMN metadata jsonb;
CREATE INDEX open_jobs_with_metadata ON open_jobs (id) WHERE metadata IS NOT NULL;
CREATE INDEX jobs_with_metadata ON jobs (id) WHERE metadata IS NOT NULL;

-- Samples of tenants and workers, as `samples` has those of queues. NULL in a row of `recent_ends`: from an earlier release, or unclaimed.
ALTER TABLE recent_ends ADD COLUMN tenant text COLLATE "C", ADD COLUMN owner text COLLATE "C";
CREATE TABLE subject_samples (
    kind     text NOT NULL CHECK (kind IN ('tenant', 'worker')),
    name     text COLLATE "C" NOT NULL,
    period_s bigint NOT NULL,
    at       bigint NOT NULL,  -- begin of the period
    sample   jsonb  NOT NULL,
    PRIMARY KEY (kind, name, period_s, at)
);
CREATE INDEX subject_samples_by_time ON subject_samples (period_s, at);
