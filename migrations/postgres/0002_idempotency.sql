-- Which request a tenant's key named first, and the jobs it became. A table of its own: a partitioned
-- one could not keep the keys unique.

CREATE TABLE idempotency (
    tenant       text COLLATE "C" NOT NULL,
    key          text COLLATE "C" NOT NULL,
    request_hash bytea NOT NULL,
    job_ids      uuid[] NOT NULL,
    created_at   bigint NOT NULL,
    PRIMARY KEY (tenant, key)
);
CREATE INDEX idempotency_by_age ON idempotency (created_at);
