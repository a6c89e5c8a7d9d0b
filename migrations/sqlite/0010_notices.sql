-- Events that receivers are told of: each is written with the change it tells of, once for each receiver.
CREATE TABLE notices (
    id          BLOB PRIMARY KEY NOT NULL,
    event       TEXT NOT NULL,                -- the same for every receiver and attempt
    tenant      TEXT NOT NULL,
    batch_id    BLOB,                         -- NULL for budgets
    kind        TEXT NOT NULL,
    channel     TEXT NOT NULL CHECK (channel IN ('webhook', 'mail')),
    receiver    TEXT NOT NULL,                -- URL of a webhook, address of a mail
    host        TEXT NOT NULL,                -- of the receiver
    secret      TEXT,                         -- key of a webhook's signatures
    subject     TEXT NOT NULL,                -- JSON: what the event is about, as it was then
    created_at  INTEGER NOT NULL,             -- of the event
    retry_until INTEGER NOT NULL,
    attempts    INTEGER NOT NULL DEFAULT 0,
    due_at      INTEGER,                      -- of the next attempt; NULL when delivery has ended
    ended_at    INTEGER,
    error       TEXT,                         -- of the last attempt; NULL if it was delivered
    epoch       INTEGER NOT NULL DEFAULT 0,
    owner       TEXT,
    lease_until INTEGER,
    UNIQUE (event, receiver)
);
CREATE INDEX notices_due ON notices (channel, due_at) WHERE due_at IS NOT NULL;
CREATE INDEX notices_pending ON notices (tenant, receiver) WHERE due_at IS NOT NULL;
CREATE INDEX notices_by_tenant ON notices (tenant, id);
CREATE INDEX notices_by_batch ON notices (batch_id, id) WHERE batch_id IS NOT NULL;
CREATE INDEX notices_ended ON notices (ended_at) WHERE ended_at IS NOT NULL AND batch_id IS NULL;

-- Receivers that failed at the last attempt.
CREATE TABLE notice_receivers (
    tenant      TEXT NOT NULL,
    receiver    TEXT NOT NULL,
    failures    INTEGER NOT NULL,             -- in a row
    failed_at   INTEGER NOT NULL,
    error       TEXT NOT NULL,
    rests_until INTEGER,                      -- no attempt before
    gone_at     INTEGER,                      -- it wants no more: 410 Gone
    PRIMARY KEY (tenant, receiver)
) WITHOUT ROWID;

-- Since when a budget has its bounds.
ALTER TABLE budgets ADD COLUMN set_at INTEGER NOT NULL DEFAULT 0;
UPDATE budgets SET set_at = CAST(strftime('%s', 'now') AS INTEGER) * 1000;

-- Webhooks were kept with their batches. Processes from before this migration still use webhook_due and webhook_host.
INSERT INTO notices (id, event, tenant, batch_id, kind, channel, receiver, host, secret, subject, created_at,
                     retry_until, attempts, due_at, ended_at, error)
SELECT id,
       'evt_' || lower(hex(id))
              || CASE WHEN coalesce(batch ->> '$.reopened', 0) > 0 THEN '_' || (batch ->> '$.reopened') ELSE '' END,
       tenant, id, 'batch.' || state, 'webhook',
       batch ->> '$.webhook.url', coalesce(webhook_host, ''), batch ->> '$.webhook.secret',
       json_object('batch', json(json_remove(batch, '$.webhook', '$.steps')), 'added', coalesce(added_lines, 0)),
       coalesce(json_extract(batch, '$.at.' || state), 0),
       coalesce(json_extract(batch, '$.at.' || state), 0) + 86400000,
       coalesce(batch ->> '$.webhook.attempts', 0),
       webhook_due, batch ->> '$.webhook.ended_at', batch ->> '$.webhook.error'
FROM batches
WHERE state IN ('completed', 'failed', 'expired', 'cancelled') AND batch ->> '$.webhook.url' IS NOT NULL;
UPDATE batches SET webhook_due = NULL, webhook_host = NULL WHERE webhook_due IS NOT NULL;
