-- Who is logged in to the dashboard: a session is its key's, and opens what the key opens.

CREATE TABLE sessions (
    hash       bytea PRIMARY KEY,  -- SHA-256 of the secret, which is nowhere
    key_id     uuid NOT NULL REFERENCES api_keys (id) ON DELETE CASCADE,
    expires_at bigint NOT NULL
);
CREATE INDEX sessions_by_key ON sessions (key_id, expires_at);
CREATE INDEX sessions_expiring ON sessions (expires_at);
