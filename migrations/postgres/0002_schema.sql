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

-- Limits of tenants, where operators set them. A tenant without a row, and NULL: those of the service.
CREATE TABLE tenant_limits (
    tenant       text COLLATE "C" PRIMARY KEY,
    file_bytes   bigint,  -- of all its files together
    open_batches bigint,  -- unfinished ones
    keys         bigint   -- that are not revoked
);

-- The address that an operator's request came from; NULL: the command line, or an earlier release.
ALTER TABLE audit ADD COLUMN address text;
