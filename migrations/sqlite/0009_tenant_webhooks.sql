-- The webhook of a tenant's batches that have none of their own.
CREATE TABLE tenant_webhooks (
    tenant TEXT PRIMARY KEY NOT NULL,
    url    TEXT NOT NULL,
    secret TEXT NOT NULL
) WITHOUT ROWID;
