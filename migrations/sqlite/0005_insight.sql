-- What operators set and see: as in the servers' schema.

ALTER TABLE jobs ADD COLUMN custom_id TEXT;          -- its line's name, of a batch
ALTER TABLE jobs ADD COLUMN started_at INTEGER;      -- of the first claim
ALTER TABLE jobs ADD COLUMN claimed_at INTEGER;      -- of the latest one, by `owner`, which stays when it ends
ALTER TABLE jobs ADD COLUMN replay_of BLOB;          -- the dead letter that this job repeats
ALTER TABLE jobs ADD COLUMN error_code TEXT;         -- of the latest attempt, if it ended in an error
ALTER TABLE jobs ADD COLUMN error_signature TEXT;    -- its message without numbers and ids

ALTER TABLE results ADD COLUMN claim_epoch INTEGER;
ALTER TABLE results ADD COLUMN claim_owner TEXT;
ALTER TABLE results ADD COLUMN claim_at INTEGER;
ALTER TABLE results ADD COLUMN first_token_ms INTEGER;  -- after `claim_at`
ALTER TABLE attempt_errors ADD COLUMN owner TEXT;
ALTER TABLE attempt_errors ADD COLUMN claimed_at INTEGER;

CREATE INDEX jobs_by_tenant ON jobs (tenant, id);
CREATE INDEX jobs_running ON jobs (id) WHERE state = 'running';
CREATE INDEX jobs_set_apart ON jobs (state, id)
    WHERE state IN ('scheduled', 'retrying', 'failed', 'cancelled', 'expired');
CREATE INDEX jobs_by_error ON jobs (error_code, id) WHERE state = 'failed';
CREATE INDEX jobs_by_custom_id ON jobs (custom_id, id) WHERE custom_id IS NOT NULL;

CREATE TABLE queues (
    model               TEXT NOT NULL,
    format              TEXT NOT NULL,
    paused              INTEGER NOT NULL DEFAULT 0,
    limit_tokens        INTEGER,  -- of its backlog
    tenant_limit_tokens INTEGER,  -- of tenants without a row below
    numerics_class      TEXT,     -- of the first worker
    registered_at       INTEGER,
    PRIMARY KEY (model, format)
) WITHOUT ROWID;

-- The release before kept classes as facts, under the queue's name; the last @ is before the format.
INSERT INTO queues (model, format, numerics_class)
SELECT substr(name, 1, length(stem) - 1), substr(name, length(stem) + 1), value FROM (
    SELECT name, value, rtrim(name, replace(name, '@', '')) AS stem FROM (
        SELECT substr(name, length('numerics class of ') + 1) AS name, value FROM facts
        WHERE name LIKE 'numerics class of %@%'
    )
);
DELETE FROM facts WHERE name LIKE 'numerics class of %@%';

CREATE TABLE tenant_quotas (
    model        TEXT NOT NULL,
    format       TEXT NOT NULL,
    tenant       TEXT NOT NULL,
    limit_tokens INTEGER NOT NULL,
    PRIMARY KEY (model, format, tenant)
) WITHOUT ROWID;

-- One row per process incarnation, written by its heartbeat.
CREATE TABLE workers (
    owner           TEXT PRIMARY KEY NOT NULL,
    started_at      INTEGER NOT NULL,
    seen_at         INTEGER NOT NULL,
    drain_requested INTEGER NOT NULL DEFAULT 0,
    heartbeat       TEXT NOT NULL  -- JSON
) WITHOUT ROWID;

-- Samples of queues, a document for each period; the queue without a name is all of them together.
CREATE TABLE samples (
    model    TEXT NOT NULL,
    format   TEXT NOT NULL,
    period_s INTEGER NOT NULL,
    at       INTEGER NOT NULL,  -- its begin
    sample   TEXT NOT NULL,     -- JSON
    PRIMARY KEY (model, format, period_s, at)
) WITHOUT ROWID;

-- How far sampling has come, and how the queues were then: one row.
CREATE TABLE sampler (
    id       INTEGER PRIMARY KEY CHECK (id = 1),
    taken_at INTEGER NOT NULL,
    state    TEXT NOT NULL  -- JSON
);

CREATE TABLE integrity (
    name  TEXT PRIMARY KEY NOT NULL,
    count INTEGER NOT NULL
) WITHOUT ROWID;

-- What operators did.
CREATE TABLE audit (
    id       BLOB PRIMARY KEY NOT NULL,
    at       INTEGER NOT NULL,
    key_id   BLOB,           -- NULL: at the command line
    key_name TEXT NOT NULL,
    action   TEXT NOT NULL,
    target   TEXT NOT NULL,
    detail   TEXT NOT NULL   -- JSON
);
