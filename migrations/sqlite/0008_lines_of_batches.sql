-- Lines for several endpoints, and lines that are added to open batches: see migrations/postgres/0008_lines_of_batches.sql.

ALTER TABLE jobs ADD COLUMN line_shape TEXT;

ALTER TABLE batches ADD COLUMN added_lines INTEGER;
ALTER TABLE batch_custom_ids ADD COLUMN line_key BLOB;
