-- How much of one tenant's may wait in a queue, in tokens.

ALTER TABLE queues ADD COLUMN tenant_limit_tokens bigint;  -- of tenants without a row below

CREATE TABLE tenant_quotas (
    model        text COLLATE "C" NOT NULL,
    format       text COLLATE "C" NOT NULL,
    tenant       text COLLATE "C" NOT NULL,
    limit_tokens bigint NOT NULL,
    PRIMARY KEY (model, format, tenant)
);
