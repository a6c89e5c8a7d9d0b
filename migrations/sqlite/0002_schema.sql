-- What the release after 0.1.0 adds: see migrations/postgres/0002_schema.sql.

CREATE TABLE file_keys (
    tenant       TEXT NOT NULL,
    key          TEXT NOT NULL,
    request_hash BLOB NOT NULL,
    file_id      BLOB NOT NULL REFERENCES files (id) ON DELETE CASCADE,
    PRIMARY KEY (tenant, key)
) WITHOUT ROWID;
CREATE INDEX file_keys_by_file ON file_keys (file_id);

CREATE TABLE call_keys (
    tenant       TEXT NOT NULL,
    key          TEXT NOT NULL,
    request_hash BLOB NOT NULL,
    job_id       BLOB NOT NULL,
    created_at   INTEGER NOT NULL,
    PRIMARY KEY (tenant, key)
) WITHOUT ROWID;
CREATE INDEX call_keys_by_age ON call_keys (created_at);

CREATE TABLE tenant_limits (
    tenant       TEXT PRIMARY KEY NOT NULL,
    file_bytes   INTEGER,
    open_batches INTEGER,
    keys         INTEGER
) WITHOUT ROWID;

ALTER TABLE audit ADD COLUMN address TEXT;

-- A check cannot be changed: both tables are written anew. Sessions first, because they would be deleted with their keys.
CREATE TABLE kept_sessions AS SELECT hash, key_id, expires_at FROM sessions;
DROP TABLE sessions;
CREATE TABLE wider_api_keys (
    id           BLOB PRIMARY KEY NOT NULL,
    hash         BLOB NOT NULL UNIQUE,
    tenant       TEXT NOT NULL,
    role         TEXT NOT NULL CHECK (role IN ('metrics', 'read', 'submit', 'manage', 'operate')),
    name         TEXT NOT NULL,
    created_at   INTEGER NOT NULL,
    revoked_at   INTEGER,
    expires_at   INTEGER,
    last_used_at INTEGER
);
INSERT INTO wider_api_keys (id, hash, tenant, role, name, created_at, revoked_at)
    SELECT id, hash, tenant, role, name, created_at, revoked_at FROM api_keys;
DROP TABLE api_keys;
ALTER TABLE wider_api_keys RENAME TO api_keys;
CREATE INDEX api_keys_by_tenant ON api_keys (tenant, id);
CREATE TABLE sessions (
    hash       BLOB PRIMARY KEY NOT NULL,
    key_id     BLOB NOT NULL REFERENCES api_keys (id) ON DELETE CASCADE,
    expires_at INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX sessions_by_key ON sessions (key_id, expires_at);
CREATE INDEX sessions_expiring ON sessions (expires_at);
INSERT INTO sessions (hash, key_id, expires_at) SELECT hash, key_id, expires_at FROM kept_sessions;
DROP TABLE kept_sessions;

ALTER TABLE jobs ADD COLUMN metadata TEXT;
CREATE INDEX jobs_with_metadata ON jobs (id) WHERE metadata IS NOT NULL;

CREATE TABLE subject_samples (
    kind     TEXT NOT NULL CHECK (kind IN ('tenant', 'worker')),
    name     TEXT NOT NULL,
    period_s INTEGER NOT NULL,
    at       INTEGER NOT NULL,
    sample   TEXT NOT NULL,  -- JSON
    PRIMARY KEY (kind, name, period_s, at)
) WITHOUT ROWID;
CREATE INDEX subject_samples_by_time ON subject_samples (period_s, at);
