-- What operators look at, at any number of jobs: lists by what a job is, its attempts, samples of every
-- queue over time. New columns may be NULL: workers of the release before do not write them.

ALTER TABLE jobs
    ADD COLUMN custom_id         text COLLATE "C",  -- its line's name, of a batch
    ADD COLUMN started_at        bigint,            -- of the first claim
    ADD COLUMN claimed_at        bigint,            -- of the latest one, by `owner`, which stays when it ends
    ADD COLUMN lapsed_owner      text,              -- of `lapsed_epoch`
    ADD COLUMN lapsed_claimed_at bigint,
    ADD COLUMN error_code        text COLLATE "C",  -- of the latest attempt, if it ended in an error
    ADD COLUMN error_signature   text COLLATE "C";  -- its message without numbers and ids

-- Who ended, and when it had begun: an attempt's history costs no write of its own. No column is named
-- like one of `jobs`: the release before joins both.
ALTER TABLE results
    ADD COLUMN claim_epoch    bigint,
    ADD COLUMN claim_owner    text,
    ADD COLUMN claim_at       bigint,
    ADD COLUMN first_token_ms bigint;  -- after `claim_at`
ALTER TABLE attempt_errors
    ADD COLUMN owner      text,
    ADD COLUMN claimed_at bigint;

-- For lists, the latest first. Each holds few jobs, or those that were named: a plain job in and out
-- of the queue is in none of them.
CREATE INDEX jobs_set_apart ON jobs (state, id)
    WHERE state IN ('scheduled', 'retrying', 'failed', 'cancelled', 'expired');
CREATE INDEX jobs_by_error ON jobs (error_code, id) WHERE state = 'failed';
CREATE INDEX jobs_by_custom_id ON jobs (custom_id, id) WHERE custom_id IS NOT NULL;

-- What is over since a sample. Only ever appended to.
CREATE INDEX results_by_end ON results (finished_at);

-- Samples of queues, a document for each period; the queue without a name is all of them together.
CREATE TABLE samples (
    model    text COLLATE "C" NOT NULL,
    format   text COLLATE "C" NOT NULL,
    period_s bigint NOT NULL,
    at       bigint NOT NULL,  -- its begin
    sample   jsonb NOT NULL,
    PRIMARY KEY (model, format, period_s, at)
);

-- Who samples holds this one row: how far it has come, and how the queues were then.
CREATE TABLE sampler (
    id       boolean PRIMARY KEY DEFAULT true CHECK (id),
    taken_at bigint NOT NULL,
    state    jsonb NOT NULL
);

-- What a worker counts and measures, as its heartbeat says it; and the sums of those that are gone.
ALTER TABLE workers ADD COLUMN vitals jsonb;
CREATE TABLE integrity (
    name  text PRIMARY KEY,
    count bigint NOT NULL
);

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
