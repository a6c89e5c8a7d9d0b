-- A paused batch is unfinished: it is in the indexes of unfinished batches.
DROP INDEX batches_unfinished;
DROP INDEX batches_open;
DROP INDEX batches_due;
CREATE INDEX batches_unfinished ON batches (id)
    WHERE state IN ('validating', 'in_progress', 'paused', 'finalizing', 'cancelling');
CREATE INDEX batches_open ON batches (tenant, id)
    WHERE state IN ('validating', 'in_progress', 'paused', 'finalizing', 'cancelling');
CREATE INDEX batches_due ON batches (next_at, id)
    WHERE state IN ('validating', 'in_progress', 'paused', 'finalizing', 'cancelling');
