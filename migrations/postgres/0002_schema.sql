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
