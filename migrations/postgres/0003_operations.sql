-- What operators set and see: queues and workers.

CREATE TABLE queues (
    model          text COLLATE "C" NOT NULL,
    format         text COLLATE "C" NOT NULL,
    paused         boolean NOT NULL DEFAULT false,
    limit_tokens   bigint,  -- of its backlog
    numerics_class text,    -- of the first worker
    PRIMARY KEY (model, format)
);

-- One row per process incarnation, written by its heartbeat. No index but the key's, so that a
-- heartbeat stays within its page.
CREATE TABLE workers (
    owner           text PRIMARY KEY,
    model           text NOT NULL,
    format          text NOT NULL,
    host            text NOT NULL,
    pid             bigint NOT NULL,
    started_at      bigint NOT NULL,
    seen_at         bigint NOT NULL,
    running         bigint NOT NULL,
    slots           bigint NOT NULL,
    draining        boolean NOT NULL,
    drain_requested boolean NOT NULL DEFAULT false,
    tokens_per_s    double precision NOT NULL
) WITH (fillfactor = 50);
