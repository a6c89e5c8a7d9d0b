-- Claims that are told apart by a random number, and jobs that may break workers. Workers of the release
-- before write none of these columns: what they claim is fenced by its epoch alone, as before.

ALTER TABLE jobs
    ADD COLUMN claim_id bigint,  -- of the latest claim, while it may still write
    ADD COLUMN losses   integer NOT NULL DEFAULT 0,  -- workers that were lost while they ran it
    ADD COLUMN alone    boolean NOT NULL DEFAULT false;  -- the latest claim runs without other jobs

-- When a reconciler last reached this store: one row.
CREATE TABLE pulse (
    id boolean PRIMARY KEY DEFAULT true CHECK (id),
    at bigint NOT NULL
);
INSERT INTO pulse (at) VALUES ((extract(epoch FROM statement_timestamp()) * 1000)::bigint);
