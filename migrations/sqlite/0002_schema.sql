-- What the release after 0.1.0 adds: see migrations/postgres/0002_schema.sql.

CREATE TABLE file_keys (
    tenant       TEXT NOT NULL,
    key          TEXT NOT NULL,
    request_hash BLOB NOT NULL,
    file_id      BLOB NOT NULL REFERENCES files (id) ON DELETE CASCADE,
    PRIMARY KEY (tenant, key)
) WITHOUT ROWID;
CREATE INDEX file_keys_by_file ON file_keys (file_id);

CREATE TABLE tenant_limits (
    tenant       TEXT PRIMARY KEY NOT NULL,
    file_bytes   INTEGER,
    open_batches INTEGER,
    keys         INTEGER
) WITHOUT ROWID;

ALTER TABLE audit ADD COLUMN address TEXT;
