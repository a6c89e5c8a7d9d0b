-- Jobs are answered in the order of their prompts' begins, so that what several share is computed once.

ALTER TABLE jobs ADD COLUMN prefix_key INTEGER NOT NULL DEFAULT 0;  -- 0 for short prompts
CREATE INDEX jobs_in_order ON jobs (model, format, prefix_key, id) WHERE state = 'queued';
