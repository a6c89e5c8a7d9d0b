-- One process of many does what is needed once; jobs that were queued are announced until the dispatcher
-- has them; and a lease is held by a worker, for all its jobs.

-- Who leads: for the whole store, or for a queue. Without an index but the key's.
CREATE TABLE leaders (
    role  text COLLATE "C" PRIMARY KEY,  -- 'store', or 'queue MODEL@FORMAT'
    owner text NOT NULL,
    until bigint NOT NULL
) WITH (fillfactor = 50);

-- Jobs that were queued, of one statement and one queue. Their producer deletes the row when the
-- dispatcher has the jobs. What is left is enqueued by the queue's leader.
CREATE TABLE announcements (
    first  uuid    NOT NULL,  -- the least of the ids
    again  boolean NOT NULL,  -- whether they were queued before
    at     bigint  NOT NULL,
    model  text COLLATE "C" NOT NULL,
    format text COLLATE "C" NOT NULL,
    jobs   uuid[] NOT NULL,
    PRIMARY KEY (first, again, at)
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000);
CREATE INDEX announcements_by_queue ON announcements (model, format, at);

-- A running job without `lease_until` has the lease of its worker. A claim has its own lease until it is
-- renewed, so that a claim that its worker never heard of ends.
CREATE TABLE worker_leases (
    owner text COLLATE "C" PRIMARY KEY,
    until bigint NOT NULL
) WITH (fillfactor = 50);

CREATE OR REPLACE VIEW all_jobs AS
    SELECT id, model, format, tenant, priority, state, cost, epoch, attempts, attempts_max, owner,
           CASE WHEN state = 'running'
                THEN coalesce(lease_until, (SELECT until FROM worker_leases
                                            WHERE worker_leases.owner = open_jobs.owner))
           END AS lease_until,
           run_at, expires_at, submitted_at, replay_of, job, custom_id, started_at, claimed_at,
           error_code, error_signature
    FROM open_jobs
    UNION ALL
    SELECT id, model, format, tenant, priority, state, cost, epoch, attempts, attempts_max, owner,
           lease_until, run_at, expires_at, submitted_at, replay_of, job, custom_id, started_at,
           claimed_at, error_code, error_signature
    FROM jobs;
