-- Results of batches while they run; batches that are archived or deleted: see migrations/postgres/0004_batch_ends.sql.

ALTER TABLE jobs ADD COLUMN line_key BLOB;

CREATE TABLE batch_ends (
    batch_id BLOB    NOT NULL,
    line     INTEGER NOT NULL,
    seq      INTEGER NOT NULL,
    state    TEXT    NOT NULL,
    ended_at INTEGER NOT NULL,
    output   TEXT,
    PRIMARY KEY (batch_id, line)
) WITHOUT ROWID;
CREATE UNIQUE INDEX batch_ends_in_order ON batch_ends (batch_id, seq);

ALTER TABLE batches ADD COLUMN archived_at INTEGER;
CREATE INDEX batches_listed ON batches (tenant, id) WHERE archived_at IS NULL;
CREATE INDEX batches_archived ON batches (tenant, id) WHERE archived_at IS NOT NULL;
CREATE INDEX batches_by_input ON batches (input_file_id);

CREATE TABLE deleted_batches (
    id BLOB PRIMARY KEY NOT NULL
) WITHOUT ROWID;
