-- Jobs, their results and the errors of their attempts. Times are milliseconds since the Unix epoch
-- on this server's clock. Ids are UUIDv7, whose order is the order of submission, so that a range of
-- ids is a range of time: the three tables are partitioned by day. Partitions are made ahead and
-- dropped by `PostgresStore::maintain`; what fits none rests in the default partition.

-- The store's clock: this server's, or the one a test gives.
CREATE FUNCTION store_now_ms(given bigint) RETURNS bigint LANGUAGE sql STABLE PARALLEL SAFE
RETURN coalesce(given, (extract(epoch FROM statement_timestamp()) * 1000)::bigint);

CREATE TABLE jobs (
    id           uuid PRIMARY KEY,
    model        text COLLATE "C" NOT NULL,
    format       text COLLATE "C" NOT NULL,
    tenant       text COLLATE "C" NOT NULL,
    priority     text NOT NULL CHECK (priority IN ('high', 'normal', 'low')),
    state        text NOT NULL CHECK (state IN ('scheduled', 'queued', 'running', 'retrying',
                                                'completed', 'failed', 'cancelled', 'expired')),
    cost         bigint NOT NULL,
    epoch        bigint NOT NULL DEFAULT 0,
    attempts     integer NOT NULL DEFAULT 0,
    attempts_max integer NOT NULL,
    owner        text,
    lease_until  bigint,
    lapsed_epoch bigint,  -- of the claim whose lease was over when the last claim took the job
    run_at       bigint,  -- of scheduled and retrying jobs
    expires_at   bigint,
    submitted_at bigint NOT NULL,
    replay_of    uuid,    -- the dead letter that this job repeats
    job          bytea NOT NULL,  -- wire format
    checkpoint   bytea    -- what a running attempt saved for the next one
) PARTITION BY RANGE (id);

-- The wire format compresses by itself.
ALTER TABLE jobs ALTER job SET STORAGE EXTERNAL;

-- Every move of a job writes its row anew, so every index costs three writes for each job. What is
-- partial is small: a job is in one of them while it is in that state. A renewal changes no indexed
-- column (`jobs_running` leaves the lease out: few jobs run, the reconciler looks at each) and stays
-- within its page.
CREATE INDEX jobs_queued ON jobs (model, format, id) WHERE state = 'queued';
CREATE INDEX jobs_running ON jobs (id) WHERE state = 'running';
CREATE INDEX jobs_due ON jobs (run_at) WHERE state IN ('scheduled', 'retrying');
CREATE INDEX jobs_expiring ON jobs (expires_at)
    WHERE expires_at IS NOT NULL AND state IN ('scheduled', 'queued', 'retrying');
CREATE INDEX jobs_failed ON jobs (model, format, id) WHERE state = 'failed';
CREATE INDEX jobs_by_tenant ON jobs (tenant, id);

CREATE TABLE jobs_default PARTITION OF jobs DEFAULT WITH (fillfactor = 80);

-- One row per job that is over. Whose it was is kept here too, so that usage needs no join.
CREATE TABLE results (
    job_id            uuid PRIMARY KEY,
    tenant            text COLLATE "C" NOT NULL,
    model             text COLLATE "C" NOT NULL,
    format            text COLLATE "C" NOT NULL,
    outcome           bytea,  -- wire format; NULL for a cancelled job
    prompt_tokens     bigint NOT NULL DEFAULT 0,
    completion_tokens bigint NOT NULL DEFAULT 0,
    finished_at       bigint NOT NULL
) PARTITION BY RANGE (job_id);
ALTER TABLE results ALTER outcome SET STORAGE EXTERNAL;
CREATE TABLE results_default PARTITION OF results DEFAULT;

-- A claim ends in at most one error.
CREATE TABLE attempt_errors (
    job_id uuid NOT NULL,
    epoch  bigint NOT NULL,
    at     bigint NOT NULL,
    error  bytea NOT NULL,  -- wire format
    PRIMARY KEY (job_id, epoch)
) PARTITION BY RANGE (job_id);
CREATE TABLE attempt_errors_default PARTITION OF attempt_errors DEFAULT;
