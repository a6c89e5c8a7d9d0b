-- Jobs, their results and the errors of their attempts. Times are milliseconds since the Unix
-- epoch; ids are the sixteen bytes of a UUIDv7, whose order is the order of submission.

CREATE TABLE jobs (
    id           BLOB PRIMARY KEY NOT NULL CHECK (length(id) = 16),
    model        TEXT NOT NULL,
    format       TEXT NOT NULL,
    tenant       TEXT NOT NULL,
    priority     TEXT NOT NULL CHECK (priority IN ('high', 'normal', 'low')),
    state        TEXT NOT NULL CHECK (state IN ('scheduled', 'queued', 'running', 'retrying',
                                                'completed', 'failed', 'cancelled', 'expired')),
    epoch        INTEGER NOT NULL DEFAULT 0,
    attempts     INTEGER NOT NULL DEFAULT 0,
    attempts_max INTEGER NOT NULL,
    owner        TEXT,
    lease_until  INTEGER,
    run_at       INTEGER,  -- of scheduled and retrying jobs
    expires_at   INTEGER,
    submitted_at INTEGER NOT NULL,
    job          TEXT NOT NULL  -- JSON
);

-- Counts by state, and the queued jobs of a queue in order of id.
CREATE INDEX jobs_by_state ON jobs (model, format, state, id);
CREATE INDEX jobs_leased ON jobs (lease_until) WHERE state = 'running';
CREATE INDEX jobs_due ON jobs (run_at) WHERE state IN ('scheduled', 'retrying');
CREATE INDEX jobs_expiring ON jobs (expires_at)
    WHERE expires_at IS NOT NULL AND state IN ('scheduled', 'queued', 'retrying');

-- One row per job that is over, in the order of commit.
CREATE TABLE results (
    seq               INTEGER PRIMARY KEY AUTOINCREMENT,
    job_id            BLOB NOT NULL UNIQUE REFERENCES jobs (id) ON DELETE CASCADE,
    outcome           TEXT,  -- JSON; NULL for a cancelled job
    prompt_tokens     INTEGER NOT NULL DEFAULT 0,
    completion_tokens INTEGER NOT NULL DEFAULT 0,
    finished_at       INTEGER NOT NULL
);

CREATE TABLE attempt_errors (
    job_id BLOB NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    epoch  INTEGER NOT NULL,
    at     INTEGER NOT NULL,
    error  TEXT NOT NULL  -- JSON
);
CREATE INDEX attempt_errors_by_job ON attempt_errors (job_id);
