-- Events that receivers are told of: each is written with the change it tells of, once for each receiver.
CREATE TABLE notices (
    id          uuid PRIMARY KEY,
    event       text COLLATE "C" NOT NULL,    -- the same for every receiver and attempt
    tenant      text COLLATE "C" NOT NULL,
    batch_id    uuid,                         -- NULL for budgets
    kind        text NOT NULL,
    channel     text NOT NULL CHECK (channel IN ('webhook', 'mail')),
    receiver    text COLLATE "C" NOT NULL,    -- URL of a webhook, address of a mail
    host        text COLLATE "C" NOT NULL,    -- of the receiver
    secret      text,                         -- key of a webhook's signatures
    subject     jsonb NOT NULL,               -- what the event is about, as it was then
    created_at  bigint NOT NULL,              -- of the event
    retry_until bigint NOT NULL,
    attempts    bigint NOT NULL DEFAULT 0,
    due_at      bigint,                       -- of the next attempt; NULL when delivery has ended
    ended_at    bigint,
    error       text,                         -- of the last attempt; NULL if it was delivered
    epoch       bigint NOT NULL DEFAULT 0,
    owner       text,
    lease_until bigint,
    UNIQUE (event, receiver)
);
CREATE INDEX notices_due ON notices (channel, due_at) WHERE due_at IS NOT NULL;
CREATE INDEX notices_pending ON notices (tenant, receiver) WHERE due_at IS NOT NULL;
CREATE INDEX notices_by_tenant ON notices (tenant, id);
CREATE INDEX notices_by_batch ON notices (batch_id, id) WHERE batch_id IS NOT NULL;
CREATE INDEX notices_ended ON notices (ended_at) WHERE ended_at IS NOT NULL AND batch_id IS NULL;

-- Receivers that failed at the last attempt.
CREATE TABLE notice_receivers (
    tenant      text COLLATE "C" NOT NULL,
    receiver    text COLLATE "C" NOT NULL,
    failures    bigint NOT NULL,              -- in a row
    failed_at   bigint NOT NULL,
    error       text NOT NULL,
    rests_until bigint,                       -- no attempt before
    gone_at     bigint,                       -- it wants no more: 410 Gone
    PRIMARY KEY (tenant, receiver)
);

-- Since when a budget has its bounds.
ALTER TABLE budgets ADD COLUMN set_at bigint NOT NULL DEFAULT 0;
UPDATE budgets SET set_at = CAST(extract(epoch FROM now()) * 1000 AS bigint);

-- Webhooks were kept with their batches. Processes from before this migration still use webhook_due and webhook_host.
INSERT INTO notices (id, event, tenant, batch_id, kind, channel, receiver, host, secret, subject, created_at,
                     retry_until, attempts, due_at, ended_at, error)
SELECT id,
       'evt_' || replace(id::text, '-', '')
              || CASE WHEN coalesce((batch ->> 'reopened')::bigint, 0) > 0
                      THEN '_' || (batch ->> 'reopened') ELSE '' END,
       tenant, id, 'batch.' || state, 'webhook',
       batch -> 'webhook' ->> 'url', coalesce(webhook_host, ''), batch -> 'webhook' ->> 'secret',
       jsonb_build_object('batch', (batch - 'webhook') - 'steps', 'added', coalesce(added_lines, 0)),
       coalesce((batch -> 'at' ->> state)::bigint, 0),
       coalesce((batch -> 'at' ->> state)::bigint, 0) + 86400000,
       coalesce((batch -> 'webhook' ->> 'attempts')::bigint, 0),
       webhook_due, (batch -> 'webhook' ->> 'ended_at')::bigint, batch -> 'webhook' ->> 'error'
FROM batches
WHERE state IN ('completed', 'failed', 'expired', 'cancelled') AND batch -> 'webhook' ->> 'url' IS NOT NULL;
UPDATE batches SET webhook_due = NULL, webhook_host = NULL WHERE webhook_due IS NOT NULL;
