-- The webhook of a tenant's batches that have none of their own.
CREATE TABLE tenant_webhooks (
    tenant text COLLATE "C" PRIMARY KEY,
    url    text NOT NULL,
    secret text NOT NULL
);
