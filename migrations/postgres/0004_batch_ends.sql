-- Results of batches while they run; batches that are archived or deleted.

-- The key of a batch line, from which its output has its ids. NULL: not a line of a batch, or from an earlier release.
ALTER TABLE open_jobs ADD COLUMN line_key bytea;
ALTER TABLE jobs ADD COLUMN line_key bytea;

-- The lines of batches that ended. `seq` counts those of a batch: the transaction that saves the batch adds them, one at a time, so that
-- a reader who saw a number has seen all smaller ones. A line that ends again gets a new number in place of its old one.
CREATE TABLE batch_ends (
    batch_id uuid   NOT NULL,
    line     bigint NOT NULL,
    seq      bigint NOT NULL,
    state    text   NOT NULL,  -- of its job, or what its job would have
    ended_at bigint NOT NULL,
    output   text,             -- its output, where that has more to say than its job: refused and unanswered lines
    PRIMARY KEY (batch_id, line)
);
CREATE UNIQUE INDEX batch_ends_in_order ON batch_ends (batch_id, seq);

-- Archived batches are listed only where they are asked for.
ALTER TABLE batches ADD COLUMN archived_at bigint;
CREATE INDEX batches_listed ON batches (tenant, id) WHERE archived_at IS NULL;
CREATE INDEX batches_archived ON batches (tenant, id) WHERE archived_at IS NOT NULL;

-- A deleted batch takes its input with it, unless another one has the same.
CREATE INDEX batches_by_input ON batches (input_file_id);

-- Batches that were deleted: their jobs and ends are deleted after them.
CREATE TABLE deleted_batches (
    id uuid PRIMARY KEY
);
