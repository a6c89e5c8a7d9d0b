-- Batches that are created again and again.
CREATE TABLE schedules (
    id         uuid PRIMARY KEY,
    tenant     text COLLATE "C" NOT NULL,
    api_key    uuid NOT NULL,             -- that created it
    schedule   jsonb NOT NULL,            -- its times, the batch to create, and how its runs went
    next_at    bigint                     -- of the next run; NULL while it is paused
);
CREATE INDEX schedules_by_tenant ON schedules (tenant, id);
CREATE INDEX schedules_due ON schedules (next_at) WHERE next_at IS NOT NULL;
