-- Who is logged in to the dashboard: a session is its key's, and opens what the key opens.

CREATE TABLE sessions (
    hash       BLOB PRIMARY KEY NOT NULL,  -- SHA-256 of the secret, which is nowhere
    key_id     BLOB NOT NULL REFERENCES api_keys (id) ON DELETE CASCADE,
    expires_at INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX sessions_by_key ON sessions (key_id, expires_at);
CREATE INDEX sessions_expiring ON sessions (expires_at);
