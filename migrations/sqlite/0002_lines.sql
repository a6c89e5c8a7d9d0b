-- The batch file an embedded run answers: one row per line of its input.

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

-- Facts about the run: which model answers, how many runs there were.
CREATE TABLE facts (
    name  TEXT PRIMARY KEY NOT NULL,
    value TEXT NOT NULL
) WITHOUT ROWID;
