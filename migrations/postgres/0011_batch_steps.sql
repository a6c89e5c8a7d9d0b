-- Batches and webhooks proceed in bounded steps. No process waits with a claim: it notes when to come
-- again. Every column has a default, so processes of the previous release go on.

ALTER TABLE batches
    ADD COLUMN next_at      bigint NOT NULL DEFAULT 0,  -- when the next step is due
    ADD COLUMN lost_leases  bigint NOT NULL DEFAULT 0,  -- claims without a release since the last saved step
    ADD COLUMN hung_steps   bigint NOT NULL DEFAULT 0,  -- steps over their time limit since then
    ADD COLUMN webhook_host text COLLATE "C";           -- of a due webhook
CREATE INDEX batches_due ON batches (next_at, id)
    WHERE state IN ('validating', 'in_progress', 'finalizing', 'cancelling');
CREATE INDEX batches_open ON batches (tenant, id)
    WHERE state IN ('validating', 'in_progress', 'finalizing', 'cancelling');
CREATE INDEX batches_by_state ON batches (state, id);

-- When a tenant was served last: the one that waits longest is next.
CREATE TABLE batch_turns (
    tenant    text COLLATE "C" PRIMARY KEY,
    served_at bigint NOT NULL DEFAULT 0,  -- a step of a batch
    called_at bigint NOT NULL DEFAULT 0   -- a webhook
);

-- The custom_ids of the lines that a validation has read in earlier steps, as the first half of their
-- SHA-256. Without a foreign key: rows of batches that are not validating are swept.
CREATE TABLE batch_custom_ids (
    batch_id  uuid NOT NULL,
    custom_id bytea NOT NULL,
    line      bigint NOT NULL,
    PRIMARY KEY (batch_id, custom_id)
);
