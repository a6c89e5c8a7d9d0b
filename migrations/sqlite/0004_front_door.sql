-- What HTTP clients bring and fetch: keys, files and batches.

CREATE TABLE api_keys (
    id         BLOB PRIMARY KEY NOT NULL,
    hash       BLOB NOT NULL UNIQUE,  -- SHA-256 of the secret, which is nowhere
    tenant     TEXT NOT NULL,
    role       TEXT NOT NULL CHECK (role IN ('read', 'submit', 'operate')),
    name       TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    revoked_at INTEGER
);

CREATE TABLE files (
    id         BLOB PRIMARY KEY NOT NULL,
    tenant     TEXT NOT NULL,
    purpose    TEXT NOT NULL CHECK (purpose IN ('batch', 'batch_output')),
    filename   TEXT NOT NULL,
    size_bytes INTEGER,  -- NULL while it is written
    created_at INTEGER NOT NULL,
    expires_at INTEGER
);
CREATE INDEX files_by_tenant ON files (tenant, id);

CREATE TABLE file_chunks (
    file_id BLOB NOT NULL REFERENCES files (id) ON DELETE CASCADE,
    number  INTEGER NOT NULL,
    content BLOB NOT NULL,
    PRIMARY KEY (file_id, number)
) WITHOUT ROWID;

-- A batch is one document; beside it, what is searched and what fences. Its jobs are the ids that
-- differ from its own in the last 32 bits alone.
CREATE TABLE batches (
    id            BLOB PRIMARY KEY NOT NULL,
    tenant        TEXT NOT NULL,
    state         TEXT NOT NULL,
    input_file_id BLOB NOT NULL,
    epoch         INTEGER NOT NULL DEFAULT 0,
    owner         TEXT,
    lease_until   INTEGER,
    batch         TEXT NOT NULL  -- JSON
);
CREATE INDEX batches_by_tenant ON batches (tenant, id);
