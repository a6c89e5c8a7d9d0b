-- What an installation keeps in Postgres, grouped by noun.
--
-- Times are milliseconds since the Unix epoch on this server's clock. Ids are UUIDv7: their order is the order of creation, so that
-- a range of ids is a range of time. `owner` is an incarnation of a process: one life of it, with a random id.

-- The store's clock: this server's, or the time that a test gives.
CREATE FUNCTION store_now_ms(given bigint) RETURNS bigint
    LANGUAGE sql STABLE PARALLEL SAFE
    RETURN coalesce(given, (extract(epoch FROM statement_timestamp()) * 1000)::bigint);

------------------------------------------------------------------------------------------------------------------- jobs

-- Jobs that have not ended. A submission adds them, claims and the reconciler change them, and the statement that ends a job moves
-- its row to `jobs`. What happens every second reads this table alone: it has no partitions and no old rows.
CREATE TABLE open_jobs (
    id              uuid PRIMARY KEY,
    model           text COLLATE "C" NOT NULL,  -- with `format`: the queue
    format          text COLLATE "C" NOT NULL,
    tenant          text COLLATE "C" NOT NULL,
    priority        text NOT NULL CONSTRAINT jobs_priority_check CHECK (priority IN ('high', 'normal', 'low')),
    state           text NOT NULL CONSTRAINT jobs_state_check
                        CHECK (state IN ('scheduled', 'queued', 'running', 'retrying')),
    cost            bigint NOT NULL,            -- estimated tokens of prompt and answer
    shard_key       integer NOT NULL DEFAULT 0, -- hash of the begin of the prompt: decides the queue's shard
    epoch           bigint NOT NULL DEFAULT 0,  -- grows with each claim, cancel and hand-back
    claim_id        bigint,                     -- random number of the latest claim: epochs repeat after a restore
    owner           text,                       -- worker of the latest claim
    claimed_at      bigint,
    started_at      bigint,                     -- time of the first claim
    lease_until     bigint,                     -- of a claim that was not renewed yet; NULL: that of `worker_leases`
    attempts        integer NOT NULL DEFAULT 0, -- claims that ended in an error
    attempts_max    integer NOT NULL,
    losses          integer NOT NULL DEFAULT 0, -- workers that died while they ran it
    alone           boolean NOT NULL DEFAULT false, -- runs without others, since it may break workers
    error_code      text COLLATE "C",           -- of the latest error
    error_signature text COLLATE "C",           -- its message without numbers and ids
    run_at          bigint,                     -- when a scheduled or retrying job is due
    expires_at      bigint,                     -- the deadline
    submitted_at    bigint NOT NULL,
    replay_of       uuid,                       -- the dead letter that it repeats
    custom_id       text COLLATE "C",           -- the caller's name for it
    job             bytea NOT NULL,             -- the request, in the wire format
    checkpoint      bytea                       -- tokens of the latest attempt, in the wire format
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0);
-- The wire format compresses by itself.
ALTER TABLE open_jobs ALTER COLUMN job SET STORAGE EXTERNAL;

-- Every move of a job writes its row anew, so every index costs writes. A job is in a partial index only while it is in that state. A
-- renewal changes no indexed column and stays within its page: few jobs run, and the reconciler looks at each.
CREATE INDEX open_jobs_queued ON open_jobs (model, format, id) WHERE state = 'queued';
CREATE INDEX open_jobs_running ON open_jobs (id) WHERE state = 'running';
CREATE INDEX open_jobs_due ON open_jobs (run_at) WHERE state IN ('scheduled', 'retrying');
CREATE INDEX open_jobs_expiring ON open_jobs (expires_at) WHERE expires_at IS NOT NULL;
-- Statements that name a tenant imply the predicate; those that name ids do not. Without it, a planner with statistics of an empty
-- table takes this index for them and reads all of it for each id.
CREATE INDEX open_jobs_by_tenant ON open_jobs (tenant, id) WHERE tenant IS NOT NULL;
-- For lists of jobs by state. The predicate is the same as that of `jobs_set_apart`, as queries of both tables name it.
CREATE INDEX open_jobs_set_apart ON open_jobs (state, id)
    WHERE state IN ('scheduled', 'retrying', 'failed', 'cancelled', 'expired');
CREATE INDEX open_jobs_by_custom_id ON open_jobs (custom_id, id) WHERE custom_id IS NOT NULL;

-- Jobs that ended. Partitions of a day are made ahead and dropped by `PostgresStore::maintain`; ids of other days are in the default
-- partition. Rows do not change. The columns mean what they mean in `open_jobs`.
CREATE TABLE jobs (
    id              uuid PRIMARY KEY,
    model           text COLLATE "C" NOT NULL,
    format          text COLLATE "C" NOT NULL,
    tenant          text COLLATE "C" NOT NULL,
    priority        text NOT NULL CONSTRAINT jobs_priority_check CHECK (priority IN ('high', 'normal', 'low')),
    state           text NOT NULL CONSTRAINT jobs_state_check
                        CHECK (state IN ('completed', 'failed', 'cancelled', 'expired')),
    cost            bigint NOT NULL,
    shard_key       integer NOT NULL DEFAULT 0,
    epoch           bigint NOT NULL DEFAULT 0,
    owner           text,
    claimed_at      bigint,
    started_at      bigint,
    attempts        integer NOT NULL DEFAULT 0,
    attempts_max    integer NOT NULL,
    error_code      text COLLATE "C",
    error_signature text COLLATE "C",
    expires_at      bigint,
    submitted_at    bigint NOT NULL,
    replay_of       uuid,
    custom_id       text COLLATE "C",
    job             bytea NOT NULL
) PARTITION BY RANGE (id);
ALTER TABLE jobs ALTER COLUMN job SET STORAGE EXTERNAL;

CREATE INDEX jobs_by_tenant ON jobs (tenant, id);
CREATE INDEX jobs_failed ON jobs (model, format, id) WHERE state = 'failed';
CREATE INDEX jobs_by_error ON jobs (error_code, id) WHERE state = 'failed';
CREATE INDEX jobs_set_apart ON jobs (state, id)
    WHERE state IN ('scheduled', 'retrying', 'failed', 'cancelled', 'expired');
CREATE INDEX jobs_by_custom_id ON jobs (custom_id, id) WHERE custom_id IS NOT NULL;
CREATE TABLE jobs_default PARTITION OF jobs DEFAULT WITH (fillfactor = 80);

-- One row for each job that ended, written with its end. It has tenant and queue too, so that usage needs no join.
CREATE TABLE results (
    job_id            uuid PRIMARY KEY,
    tenant            text COLLATE "C" NOT NULL,
    model             text COLLATE "C" NOT NULL,
    format            text COLLATE "C" NOT NULL,
    outcome           bytea,            -- in the wire format; NULL for a cancelled job
    prompt_tokens     bigint NOT NULL DEFAULT 0,
    completion_tokens bigint NOT NULL DEFAULT 0,
    finished_at       bigint NOT NULL,
    claim_epoch       bigint,           -- the claim that ended the job
    claim_owner       text,
    claim_at          bigint,
    first_token_ms    bigint            -- from that claim to the first token
) PARTITION BY RANGE (job_id);
ALTER TABLE results ALTER COLUMN outcome SET STORAGE EXTERNAL;
CREATE INDEX results_by_end ON results (finished_at);
CREATE TABLE results_default PARTITION OF results DEFAULT;

-- Errors of attempts. A claim ends in at most one.
CREATE TABLE attempt_errors (
    job_id     uuid   NOT NULL,
    epoch      bigint NOT NULL,  -- of the claim
    at         bigint NOT NULL,
    error      bytea  NOT NULL,  -- in the wire format
    owner      text,
    claimed_at bigint,
    PRIMARY KEY (job_id, epoch)
) PARTITION BY RANGE (job_id);
CREATE TABLE attempt_errors_default PARTITION OF attempt_errors DEFAULT;

-- The request that a tenant's idempotency key named first, and the jobs that it became. A table of its own: a partitioned one could not
-- keep the keys unique.
CREATE TABLE idempotency (
    tenant       text COLLATE "C" NOT NULL,
    key          text COLLATE "C" NOT NULL,
    request_hash bytea  NOT NULL,
    job_ids      uuid[] NOT NULL,
    created_at   bigint NOT NULL,
    PRIMARY KEY (tenant, key)
);
CREATE INDEX idempotency_by_age ON idempotency (created_at);

-- Jobs that one statement queued in one queue. Their producer deletes the row when the dispatcher has the jobs. What is left is enqueued
-- by the worker that leads the queue.
CREATE TABLE announcements (
    first  uuid    NOT NULL,  -- the least of the ids
    again  boolean NOT NULL,  -- whether they were queued before
    at     bigint  NOT NULL,
    model  text COLLATE "C" NOT NULL,
    format text COLLATE "C" NOT NULL,
    jobs   uuid[]  NOT NULL,
    PRIMARY KEY (first, again, at)
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000);
CREATE INDEX announcements_by_queue ON announcements (model, format, at);

----------------------------------------------------------------------------------------------------- queues and workers

-- One row for each queue: what operators set, and what its workers registered and measured.
CREATE TABLE queues (
    model               text COLLATE "C" NOT NULL,
    format              text COLLATE "C" NOT NULL,
    paused              boolean NOT NULL DEFAULT false,
    limit_tokens        bigint,            -- of its backlog
    tenant_limit_tokens bigint,            -- of tenants without a row in `tenant_quotas`
    max_wait_ms         bigint,            -- longest predicted wait of a new job
    numerics_class      text,              -- of the first worker
    allowed_classes     text[] NOT NULL DEFAULT '{}',  -- beside it, by operators
    registered_at       bigint,
    worker_tokens_per_s double precision,  -- mean rate of its workers; NULL until one was measured
    PRIMARY KEY (model, format)
);

-- How many tokens of a tenant may wait in a queue.
CREATE TABLE tenant_quotas (
    model        text COLLATE "C" NOT NULL,
    format       text COLLATE "C" NOT NULL,
    tenant       text COLLATE "C" NOT NULL,
    limit_tokens bigint NOT NULL,
    PRIMARY KEY (model, format, tenant)
);

-- One row for each worker, written by its heartbeat. No index but the key's, so that a heartbeat stays within its page.
CREATE TABLE workers (
    owner           text PRIMARY KEY,
    model           text NOT NULL,
    format          text NOT NULL,
    host            text NOT NULL,
    pid             bigint NOT NULL,
    started_at      bigint NOT NULL,
    seen_at         bigint NOT NULL,  -- time of the latest heartbeat
    running         bigint NOT NULL,
    slots           bigint NOT NULL,
    draining        boolean NOT NULL,
    drain_requested boolean NOT NULL DEFAULT false,
    tokens_per_s    double precision NOT NULL,
    vitals          jsonb             -- its other measurements and counters
) WITH (fillfactor = 50);

-- Leases of workers: a running job without a lease of its own has its worker's.
CREATE TABLE worker_leases (
    owner text COLLATE "C" PRIMARY KEY,
    until bigint NOT NULL
) WITH (fillfactor = 50);

-- The worker that does what one of many has to do: for the store, or for a queue. No index but the key's.
CREATE TABLE leaders (
    role  text COLLATE "C" PRIMARY KEY,  -- 'store', or 'queue MODEL@FORMAT'
    owner text NOT NULL,
    until bigint NOT NULL
) WITH (fillfactor = 50);

-- When a reconciler or a heartbeat last reached this store. After a longer pause, leases are extended instead of ended.
CREATE TABLE pulse (
    id boolean PRIMARY KEY DEFAULT true CHECK (id),
    at bigint NOT NULL
);
INSERT INTO pulse (at) VALUES (store_now_ms(NULL));

-- Settings of the whole database, by name. `retention_ms`: how long jobs are kept after their end; without it, the program's default.
CREATE TABLE settings (
    name  text PRIMARY KEY,
    value bigint NOT NULL
);

------------------------------------------------------------------------------------------------- tenants, keys, sessions

-- API keys. A key carries a tenant and a role; it is revoked and not deleted, so that the audit log can name it.
CREATE TABLE api_keys (
    id         uuid PRIMARY KEY,
    hash       bytea NOT NULL UNIQUE,  -- SHA-256 of the secret, which is stored nowhere
    tenant     text COLLATE "C" NOT NULL,
    role       text NOT NULL CHECK (role IN ('read', 'submit', 'operate')),
    name       text NOT NULL,
    created_at bigint NOT NULL,
    revoked_at bigint
);

-- Sessions of the dashboard. A session has the rights of its key.
CREATE TABLE sessions (
    hash       bytea PRIMARY KEY,  -- SHA-256 of the secret, which is stored nowhere
    key_id     uuid NOT NULL REFERENCES api_keys (id) ON DELETE CASCADE,
    expires_at bigint NOT NULL
);
CREATE INDEX sessions_by_key ON sessions (key_id, expires_at);
CREATE INDEX sessions_expiring ON sessions (expires_at);

-- What operators did.
CREATE TABLE audit (
    id       uuid PRIMARY KEY,
    at       bigint NOT NULL,
    key_id   uuid,           -- NULL: at the command line
    key_name text NOT NULL,
    action   text NOT NULL,
    target   text NOT NULL,
    detail   jsonb NOT NULL
);

------------------------------------------------------------------------------------------------------- files and batches

-- Files of the HTTP API. The content is in chunks.
CREATE TABLE files (
    id         uuid PRIMARY KEY,
    tenant     text COLLATE "C" NOT NULL,
    purpose    text NOT NULL CHECK (purpose IN ('batch', 'batch_output')),
    filename   text NOT NULL,
    size_bytes bigint,           -- NULL while it is written
    created_at bigint NOT NULL,
    expires_at bigint
);
CREATE INDEX files_by_tenant ON files (tenant, id) WHERE size_bytes IS NOT NULL;
CREATE INDEX files_expiring ON files (expires_at) WHERE expires_at IS NOT NULL;
CREATE INDEX files_incomplete ON files (created_at) WHERE size_bytes IS NULL;

CREATE TABLE file_chunks (
    file_id uuid    NOT NULL REFERENCES files (id) ON DELETE CASCADE,
    number  integer NOT NULL,
    content bytea   NOT NULL,
    PRIMARY KEY (file_id, number)
);

-- Batches of the HTTP API: a document, and beside it what is searched and what fences. The ids of a batch's jobs differ from its own in
-- the last 32 bits alone. Batches and webhooks proceed in bounded steps: a process claims a batch for one, and notes when to come again.
CREATE TABLE batches (
    id              uuid PRIMARY KEY,
    tenant          text COLLATE "C" NOT NULL,
    state           text NOT NULL,
    input_file_id   uuid NOT NULL,
    epoch           bigint NOT NULL DEFAULT 0,  -- grows with each claim
    owner           text,                       -- process of the step
    lease_until     bigint,
    batch           jsonb NOT NULL,
    idempotency_key text COLLATE "C",
    next_at         bigint NOT NULL DEFAULT 0,  -- when the next step is due
    lost_leases     bigint NOT NULL DEFAULT 0,  -- steps that ended without a word, in a row
    hung_steps      bigint NOT NULL DEFAULT 0,
    webhook_due     bigint,                     -- when its webhook is called next
    webhook_host    text COLLATE "C"
);
CREATE INDEX batches_by_tenant ON batches (tenant, id);
CREATE INDEX batches_by_state ON batches (state, id);
CREATE UNIQUE INDEX batches_by_idempotency_key ON batches (tenant, idempotency_key) WHERE idempotency_key IS NOT NULL;
CREATE INDEX batches_unfinished ON batches (id)
    WHERE state IN ('validating', 'in_progress', 'finalizing', 'cancelling');
CREATE INDEX batches_open ON batches (tenant, id)
    WHERE state IN ('validating', 'in_progress', 'finalizing', 'cancelling');
CREATE INDEX batches_due ON batches (next_at, id)
    WHERE state IN ('validating', 'in_progress', 'finalizing', 'cancelling');
CREATE INDEX batches_webhook_due ON batches (webhook_due) WHERE webhook_due IS NOT NULL;

-- When a step of a tenant was done last: the tenant that waits longest is next.
CREATE TABLE batch_turns (
    tenant    text COLLATE "C" PRIMARY KEY,
    served_at bigint NOT NULL DEFAULT 0,  -- a step of a batch
    called_at bigint NOT NULL DEFAULT 0   -- a webhook
);

-- The custom_ids of lines that a validation has read in earlier steps, as the first half of their SHA-256. Without a foreign key: rows of
-- batches that are not validating are swept.
CREATE TABLE batch_custom_ids (
    batch_id  uuid   NOT NULL,
    custom_id bytea  NOT NULL,
    line      bigint NOT NULL,
    PRIMARY KEY (batch_id, custom_id)
);

----------------------------------------------------------------------------------------------------- history and counters

-- Jobs that ended since the last sample, one row for each queue and state of a statement. The sampler deletes what it has counted.
CREATE TABLE recent_ends (
    model             text COLLATE "C" NOT NULL,
    format            text COLLATE "C" NOT NULL,
    state             text NOT NULL,
    jobs              bigint NOT NULL,
    prompt_tokens     bigint NOT NULL,
    completion_tokens bigint NOT NULL,
    start_ms          bigint[],  -- of each job: from submission to the first claim
    run_ms            bigint[],  -- from the latest claim to the end
    first_token_ms    bigint[]   -- from submission to the first token
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 10000);

-- Samples of queues, a document for each period; the queue without a name is all of them together.
CREATE TABLE samples (
    model    text COLLATE "C" NOT NULL,
    format   text COLLATE "C" NOT NULL,
    period_s bigint NOT NULL,
    at       bigint NOT NULL,  -- begin of the period
    sample   jsonb  NOT NULL,
    PRIMARY KEY (model, format, period_s, at)
);

-- The process that samples holds this row: when it sampled last, and how the queues were then.
CREATE TABLE sampler (
    id       boolean PRIMARY KEY DEFAULT true CHECK (id),
    taken_at bigint NOT NULL,
    state    jsonb  NOT NULL
);

-- Sums of the counters of workers that are gone.
CREATE TABLE integrity (
    name  text PRIMARY KEY,
    count bigint NOT NULL
);

-------------------------------------------------------------------------------------------------------- views, functions

-- All jobs, for lists. The lease of a running job is its own or its worker's.
CREATE VIEW all_jobs AS
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
           NULL, NULL, expires_at, submitted_at, replay_of, job, custom_id, started_at, claimed_at,
           error_code, error_signature
    FROM jobs;

-- How many workers a queue needs to answer what waits within `target_s` seconds, or earlier if a job has an earlier deadline: autoscalers ask
-- (docker/kubernetes/scale.yaml). Jobs that are due within a minute wait too. A paused queue needs workers for its running jobs only.
-- `rate_default` is the rate of a worker in tokens/s until one was measured. Workers with another model loaded report no slots. Reads at
-- most 100,000 waiting jobs.
CREATE FUNCTION wanted_workers(of_model text, of_format text, target_s double precision DEFAULT 600,
                               rate_default double precision DEFAULT 100)
RETURNS bigint LANGUAGE sql STABLE
BEGIN ATOMIC
    WITH clock AS (SELECT store_now_ms(NULL) AS now), queue AS (
        SELECT coalesce(bool_or(paused), false) AS paused,
               greatest(coalesce(max(worker_tokens_per_s), rate_default), 0.001) AS rate
        FROM queues WHERE model = of_model AND format = of_format
    ), queued AS (
        SELECT cost, expires_at FROM open_jobs
        WHERE state = 'queued' AND model = of_model AND format = of_format ORDER BY id LIMIT 100000
    ), due AS (
        SELECT cost, expires_at FROM open_jobs, clock
        WHERE state IN ('scheduled', 'retrying') AND run_at <= now + 60000
          AND model = of_model AND format = of_format LIMIT 100000
    ), waiting AS (
        SELECT count(*) AS jobs, coalesce(sum(cost), 0) AS tokens, min(expires_at) AS deadline
        FROM (SELECT cost, expires_at FROM queued UNION ALL SELECT cost, expires_at FROM due) AS both_kinds
    ), running AS (
        SELECT count(*) AS jobs FROM open_jobs
        WHERE state = 'running' AND model = of_model AND format = of_format
    ), serving AS (
        SELECT greatest(coalesce(avg(slots), 64), 1) AS slots FROM workers, clock
        WHERE model = of_model AND format = of_format AND seen_at >= now - 15000 AND slots > 0
    )
    SELECT greatest(
        ceil(running.jobs / slots)::bigint,
        CASE WHEN paused OR waiting.jobs = 0 THEN 0
             ELSE greatest(1, ceil(tokens / (rate * greatest(
                      30, least(target_s, coalesce((deadline - now) / 1000.0, target_s)))))::bigint)
        END
    )
    FROM clock, queue, waiting, running, serving;
END;
