-- Batches and webhooks proceed in bounded steps. No process waits with a claim: it notes when to come
-- again.

ALTER TABLE batches ADD COLUMN next_at INTEGER NOT NULL DEFAULT 0;      -- when the next step is due
ALTER TABLE batches ADD COLUMN lost_leases INTEGER NOT NULL DEFAULT 0;  -- claims without a release since the last saved step
ALTER TABLE batches ADD COLUMN hung_steps INTEGER NOT NULL DEFAULT 0;   -- steps over their time limit since then
ALTER TABLE batches ADD COLUMN webhook_host TEXT;                       -- of a due webhook
CREATE INDEX batches_due ON batches (next_at, id)
    WHERE state IN ('validating', 'in_progress', 'finalizing', 'cancelling');
CREATE INDEX batches_open ON batches (tenant, id)
    WHERE state IN ('validating', 'in_progress', 'finalizing', 'cancelling');
CREATE INDEX batches_by_state ON batches (state, id);

-- When a tenant was served last: the one that waits longest is next.
CREATE TABLE batch_turns (
    tenant    TEXT PRIMARY KEY NOT NULL,
    served_at INTEGER NOT NULL DEFAULT 0,  -- a step of a batch
    called_at INTEGER NOT NULL DEFAULT 0   -- a webhook
) WITHOUT ROWID;

-- The custom_ids of the lines that a validation has read in earlier steps, as the first half of their
-- SHA-256. Rows of batches that are not validating are swept.
CREATE TABLE batch_custom_ids (
    batch_id  BLOB NOT NULL,
    custom_id BLOB NOT NULL,
    line      INTEGER NOT NULL,
    PRIMARY KEY (batch_id, custom_id)
) WITHOUT ROWID;
