-- Claims that are told apart by a random number, and jobs that may break workers: as in the servers'
-- schema.

ALTER TABLE jobs ADD COLUMN claim_id INTEGER;  -- of the latest claim, while it may still write
ALTER TABLE jobs ADD COLUMN losses INTEGER NOT NULL DEFAULT 0;  -- workers that were lost while they ran it
ALTER TABLE jobs ADD COLUMN alone INTEGER NOT NULL DEFAULT 0;   -- the latest claim runs without other jobs

-- When a reconciler last reached this store: one row, 0 before the first.
CREATE TABLE pulse (
    id INTEGER PRIMARY KEY CHECK (id = 1),
    at INTEGER NOT NULL
);
INSERT INTO pulse (id, at) VALUES (1, 0);
