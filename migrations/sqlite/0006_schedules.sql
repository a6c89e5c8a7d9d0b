-- Batches that are created again and again.
CREATE TABLE schedules (
    id         BLOB PRIMARY KEY NOT NULL,
    tenant     TEXT NOT NULL,
    api_key    BLOB NOT NULL,             -- that created it
    schedule   TEXT NOT NULL,             -- JSON: its times, the batch to create, and how its runs went
    next_at    INTEGER                    -- of the next run; NULL while it is paused
);
CREATE INDEX schedules_by_tenant ON schedules (tenant, id);
CREATE INDEX schedules_due ON schedules (next_at) WHERE next_at IS NOT NULL;
