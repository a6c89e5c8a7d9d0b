-- Batches after another one: the batch that one waits for, until its lines are made.
ALTER TABLE batches ADD COLUMN after_id uuid;
CREATE INDEX batches_after ON batches (after_id) WHERE after_id IS NOT NULL;
