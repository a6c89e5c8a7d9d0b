-- Lines for several endpoints, and lines that are added to open batches.

-- The shape of the answer of a line ('chat', 'message', …), in a batch of lines for several endpoints. NULL: the batch's.
ALTER TABLE open_jobs ADD COLUMN line_shape text;
ALTER TABLE jobs ADD COLUMN line_shape text;

-- Lines that were added to an open batch, beside those that its document counts. NULL: the batch was never open. A column of its
-- own, so that a step of the batch that runs meanwhile does not change it.
ALTER TABLE batches ADD COLUMN added_lines bigint;

-- Of an open batch, the key of each line: what a line that comes again is compared with.
ALTER TABLE batch_custom_ids ADD COLUMN line_key bytea;
