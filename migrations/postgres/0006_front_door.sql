-- What HTTP clients bring and fetch: keys, files and batches; and since when a queue is known.

ALTER TABLE queues ADD COLUMN registered_at bigint;  -- of its first worker; NULL: before this column

CREATE TABLE api_keys (
    id         uuid PRIMARY KEY,
    hash       bytea NOT NULL UNIQUE,  -- SHA-256 of the secret, which is nowhere
    tenant     text COLLATE "C" NOT NULL,
    role       text NOT NULL CHECK (role IN ('read', 'submit', 'operate')),
    name       text NOT NULL,
    created_at bigint NOT NULL,
    revoked_at bigint
);

CREATE TABLE files (
    id         uuid PRIMARY KEY,
    tenant     text COLLATE "C" NOT NULL,
    purpose    text NOT NULL CHECK (purpose IN ('batch', 'batch_output')),
    filename   text NOT NULL,
    size_bytes bigint,  -- NULL while it is written
    created_at bigint NOT NULL,
    expires_at bigint
);
CREATE INDEX files_by_tenant ON files (tenant, id) WHERE size_bytes IS NOT NULL;
CREATE INDEX files_incomplete ON files (created_at) WHERE size_bytes IS NULL;
CREATE INDEX files_expiring ON files (expires_at) WHERE expires_at IS NOT NULL;

CREATE TABLE file_chunks (
    file_id uuid NOT NULL REFERENCES files (id) ON DELETE CASCADE,
    number  integer NOT NULL,
    content bytea NOT NULL,
    PRIMARY KEY (file_id, number)
);

-- A batch is one document; beside it, what is searched and what fences. Its jobs are the ids that
-- differ from its own in the last 32 bits alone.
CREATE TABLE batches (
    id            uuid PRIMARY KEY,
    tenant        text COLLATE "C" NOT NULL,
    state         text NOT NULL,
    input_file_id uuid NOT NULL,
    epoch         bigint NOT NULL DEFAULT 0,
    owner         text,
    lease_until   bigint,
    batch         jsonb NOT NULL
);
CREATE INDEX batches_by_tenant ON batches (tenant, id);
CREATE INDEX batches_unfinished ON batches (id)
    WHERE state IN ('validating', 'in_progress', 'finalizing', 'cancelling');
