-- What an embedded process keeps in its SQLite file, grouped by noun. Tables that Postgres has too mean what they mean there:
-- migrations/postgres/0001_schema.sql describes their columns.
--
-- Times are milliseconds since the Unix epoch. Ids are the sixteen bytes of a UUIDv7: their order is the order of creation. Booleans
-- are 0 and 1.

------------------------------------------------------------------------------------------------------------------- jobs

-- All jobs. One process owns the file, so open jobs and ended ones share a table.
CREATE TABLE jobs (
    id              BLOB PRIMARY KEY NOT NULL CHECK (length(id) = 16),
    model           TEXT NOT NULL,
    format          TEXT NOT NULL,
    tenant          TEXT NOT NULL,
    priority        TEXT NOT NULL CHECK (priority IN ('high', 'normal', 'low')),
    state           TEXT NOT NULL CHECK (state IN ('scheduled', 'queued', 'running', 'retrying',
                                                   'completed', 'failed', 'cancelled', 'expired')),
    prefix_key      INTEGER NOT NULL DEFAULT 0,  -- equal for prompts that begin alike: these are answered together
    epoch           INTEGER NOT NULL DEFAULT 0,
    claim_id        INTEGER,
    owner           TEXT,
    claimed_at      INTEGER,
    started_at      INTEGER,
    lease_until     INTEGER,
    attempts        INTEGER NOT NULL DEFAULT 0,
    attempts_max    INTEGER NOT NULL,
    losses          INTEGER NOT NULL DEFAULT 0,
    alone           INTEGER NOT NULL DEFAULT 0,
    error_code      TEXT,
    error_signature TEXT,
    run_at          INTEGER,
    expires_at      INTEGER,
    submitted_at    INTEGER NOT NULL,
    replay_of       BLOB,
    custom_id       TEXT,
    job             TEXT NOT NULL,  -- JSON
    checkpoint      BLOB
);
-- Counts by state.
CREATE INDEX jobs_by_state ON jobs (model, format, state, id);
-- The queued jobs of a queue, in the order in which they are answered.
CREATE INDEX jobs_in_order ON jobs (model, format, prefix_key, id) WHERE state = 'queued';
CREATE INDEX jobs_leased ON jobs (lease_until) WHERE state = 'running';
CREATE INDEX jobs_due ON jobs (run_at) WHERE state IN ('scheduled', 'retrying');
CREATE INDEX jobs_expiring ON jobs (expires_at)
    WHERE expires_at IS NOT NULL AND state IN ('scheduled', 'queued', 'retrying');
-- For lists.
CREATE INDEX jobs_by_tenant ON jobs (tenant, id);
CREATE INDEX jobs_running ON jobs (id) WHERE state = 'running';
CREATE INDEX jobs_set_apart ON jobs (state, id)
    WHERE state IN ('scheduled', 'retrying', 'failed', 'cancelled', 'expired');
CREATE INDEX jobs_by_error ON jobs (error_code, id) WHERE state = 'failed';
CREATE INDEX jobs_by_custom_id ON jobs (custom_id, id) WHERE custom_id IS NOT NULL;

-- One row for each job that ended, in the order of commit: the output file follows `seq`.
CREATE TABLE results (
    seq               INTEGER PRIMARY KEY AUTOINCREMENT,
    job_id            BLOB NOT NULL UNIQUE REFERENCES jobs (id) ON DELETE CASCADE,
    outcome           TEXT,  -- JSON; NULL for a cancelled job
    prompt_tokens     INTEGER NOT NULL DEFAULT 0,
    completion_tokens INTEGER NOT NULL DEFAULT 0,
    finished_at       INTEGER NOT NULL,
    claim_epoch       INTEGER,
    claim_owner       TEXT,
    claim_at          INTEGER,
    first_token_ms    INTEGER
);

-- Errors of attempts.
CREATE TABLE attempt_errors (
    job_id     BLOB NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    epoch      INTEGER NOT NULL,
    at         INTEGER NOT NULL,
    error      TEXT NOT NULL,  -- JSON
    owner      TEXT,
    claimed_at INTEGER
);
CREATE INDEX attempt_errors_by_job ON attempt_errors (job_id);

------------------------------------------------------------------------------------------------------------- batch files

-- The batch file that a run answers: one row for each line of its input.
CREATE TABLE lines (
    key       BLOB PRIMARY KEY NOT NULL,  -- hash of custom_id and body, or of number and bytes
    number    INTEGER NOT NULL,           -- in the input, from 1
    run       INTEGER NOT NULL,           -- the run that saw the line last
    custom_id TEXT,
    shape     TEXT NOT NULL,              -- of the answer: 'chat', 'completion' or 'refusal'
    job_id    BLOB,                       -- NULL for a line that was refused
    refusal   TEXT                        -- JSON; NULL for a line that became a job
) WITHOUT ROWID;
CREATE INDEX lines_by_number ON lines (number);
CREATE INDEX lines_by_custom_id ON lines (custom_id) WHERE custom_id IS NOT NULL;
CREATE UNIQUE INDEX lines_by_job ON lines (job_id) WHERE job_id IS NOT NULL;
CREATE INDEX lines_refused ON lines (number) WHERE job_id IS NULL;

-- Facts about the run, by name: which model answers, how many runs there were.
CREATE TABLE facts (
    name  TEXT PRIMARY KEY NOT NULL,
    value TEXT NOT NULL
) WITHOUT ROWID;

----------------------------------------------------------------------------------------------------- queues and workers

CREATE TABLE queues (
    model               TEXT NOT NULL,
    format              TEXT NOT NULL,
    paused              INTEGER NOT NULL DEFAULT 0,
    limit_tokens        INTEGER,
    tenant_limit_tokens INTEGER,
    max_wait_ms         INTEGER,
    numerics_class      TEXT,
    allowed_classes     TEXT NOT NULL DEFAULT '[]',  -- JSON
    registered_at       INTEGER,
    PRIMARY KEY (model, format)
) WITHOUT ROWID;

CREATE TABLE tenant_quotas (
    model        TEXT NOT NULL,
    format       TEXT NOT NULL,
    tenant       TEXT NOT NULL,
    limit_tokens INTEGER NOT NULL,
    PRIMARY KEY (model, format, tenant)
) WITHOUT ROWID;

CREATE TABLE workers (
    owner           TEXT PRIMARY KEY NOT NULL,
    started_at      INTEGER NOT NULL,
    seen_at         INTEGER NOT NULL,
    drain_requested INTEGER NOT NULL DEFAULT 0,
    heartbeat       TEXT NOT NULL  -- JSON
) WITHOUT ROWID;

-- 0 before the first reconciler.
CREATE TABLE pulse (
    id INTEGER PRIMARY KEY CHECK (id = 1),
    at INTEGER NOT NULL
);
INSERT INTO pulse (id, at) VALUES (1, 0);

------------------------------------------------------------------------------------------------- tenants, keys, sessions

CREATE TABLE api_keys (
    id         BLOB PRIMARY KEY NOT NULL,
    hash       BLOB NOT NULL UNIQUE,
    tenant     TEXT NOT NULL,
    role       TEXT NOT NULL CHECK (role IN ('read', 'submit', 'operate')),
    name       TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    revoked_at INTEGER
);

CREATE TABLE sessions (
    hash       BLOB PRIMARY KEY NOT NULL,
    key_id     BLOB NOT NULL REFERENCES api_keys (id) ON DELETE CASCADE,
    expires_at INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX sessions_by_key ON sessions (key_id, expires_at);
CREATE INDEX sessions_expiring ON sessions (expires_at);

CREATE TABLE audit (
    id       BLOB PRIMARY KEY NOT NULL,
    at       INTEGER NOT NULL,
    key_id   BLOB,
    key_name TEXT NOT NULL,
    action   TEXT NOT NULL,
    target   TEXT NOT NULL,
    detail   TEXT NOT NULL  -- JSON
);

------------------------------------------------------------------------------------------------------- files and batches

CREATE TABLE files (
    id         BLOB PRIMARY KEY NOT NULL,
    tenant     TEXT NOT NULL,
    purpose    TEXT NOT NULL CHECK (purpose IN ('batch', 'batch_output')),
    filename   TEXT NOT NULL,
    size_bytes INTEGER,
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

CREATE TABLE batches (
    id              BLOB PRIMARY KEY NOT NULL,
    tenant          TEXT NOT NULL,
    state           TEXT NOT NULL,
    input_file_id   BLOB NOT NULL,
    epoch           INTEGER NOT NULL DEFAULT 0,
    owner           TEXT,
    lease_until     INTEGER,
    batch           TEXT NOT NULL,  -- JSON
    idempotency_key TEXT,
    next_at         INTEGER NOT NULL DEFAULT 0,
    lost_leases     INTEGER NOT NULL DEFAULT 0,
    hung_steps      INTEGER NOT NULL DEFAULT 0,
    webhook_due     INTEGER,
    webhook_host    TEXT
);
CREATE INDEX batches_by_tenant ON batches (tenant, id);
CREATE INDEX batches_by_state ON batches (state, id);
CREATE UNIQUE INDEX batches_by_idempotency_key ON batches (tenant, idempotency_key)
    WHERE idempotency_key IS NOT NULL;
CREATE INDEX batches_open ON batches (tenant, id)
    WHERE state IN ('validating', 'in_progress', 'finalizing', 'cancelling');
CREATE INDEX batches_due ON batches (next_at, id)
    WHERE state IN ('validating', 'in_progress', 'finalizing', 'cancelling');
CREATE INDEX batches_webhook_due ON batches (webhook_due) WHERE webhook_due IS NOT NULL;

CREATE TABLE batch_turns (
    tenant    TEXT PRIMARY KEY NOT NULL,
    served_at INTEGER NOT NULL DEFAULT 0,
    called_at INTEGER NOT NULL DEFAULT 0
) WITHOUT ROWID;

CREATE TABLE batch_custom_ids (
    batch_id  BLOB NOT NULL,
    custom_id BLOB NOT NULL,
    line      INTEGER NOT NULL,
    PRIMARY KEY (batch_id, custom_id)
) WITHOUT ROWID;

----------------------------------------------------------------------------------------------------- history and counters

CREATE TABLE samples (
    model    TEXT NOT NULL,
    format   TEXT NOT NULL,
    period_s INTEGER NOT NULL,
    at       INTEGER NOT NULL,
    sample   TEXT NOT NULL,  -- JSON
    PRIMARY KEY (model, format, period_s, at)
) WITHOUT ROWID;

CREATE TABLE sampler (
    id       INTEGER PRIMARY KEY CHECK (id = 1),
    taken_at INTEGER NOT NULL,
    state    TEXT NOT NULL  -- JSON
);

CREATE TABLE integrity (
    name  TEXT PRIMARY KEY NOT NULL,
    count INTEGER NOT NULL
) WITHOUT ROWID;
