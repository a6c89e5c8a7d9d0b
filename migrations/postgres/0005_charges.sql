-- What answers cost. Amounts are integers: prices in 10⁻¹² of a currency's unit per token, charges in 10⁻⁹.

ALTER TABLE open_jobs ADD COLUMN tier text NOT NULL DEFAULT 'default', ADD COLUMN api_key text COLLATE "C";
ALTER TABLE jobs ADD COLUMN tier text NOT NULL DEFAULT 'default', ADD COLUMN api_key text COLLATE "C";

-- `charge` is NULL for an answer without a price, and for what is no answer.
ALTER TABLE results ADD COLUMN cached_tokens bigint NOT NULL DEFAULT 0, ADD COLUMN charge bigint,
    ADD COLUMN currency text COLLATE "C";

-- A model or tier of `*` is any one that has no row of its own; the model counts first.
CREATE TABLE prices (
    id           bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    model        text COLLATE "C" NOT NULL,
    tier         text COLLATE "C" NOT NULL,
    currency     text COLLATE "C" NOT NULL,
    input        bigint NOT NULL,
    cached_input bigint NOT NULL,
    output       bigint NOT NULL,
    UNIQUE (model, tier)
);

-- Charges of a day (in UTC, counted from 1970). `api_key` is the id of a key or empty; `currency` is empty for answers without a price.
CREATE TABLE charges (
    tenant            text COLLATE "C" NOT NULL,
    day               bigint NOT NULL,
    api_key           text COLLATE "C" NOT NULL,
    model             text COLLATE "C" NOT NULL,
    tier              text COLLATE "C" NOT NULL,
    currency          text COLLATE "C" NOT NULL,
    answers           bigint NOT NULL,
    prompt_tokens     bigint NOT NULL,
    cached_tokens     bigint NOT NULL,
    completion_tokens bigint NOT NULL,
    charge            bigint NOT NULL,
    PRIMARY KEY (tenant, day, api_key, model, tier, currency)
);
CREATE INDEX charges_by_day ON charges (day);

-- What the sampler adds to `charges`. NULL in a row: from an earlier release.
ALTER TABLE recent_ends ADD COLUMN day bigint, ADD COLUMN api_key text COLLATE "C", ADD COLUMN tier text COLLATE "C",
    ADD COLUMN currency text COLLATE "C", ADD COLUMN cached_tokens bigint NOT NULL DEFAULT 0, ADD COLUMN charge bigint;

-- Bounds of what a tenant, or one of its keys (`api_key`, else empty), may be charged in a day or month.
CREATE TABLE budgets (
    tenant   text COLLATE "C" NOT NULL,
    api_key  text COLLATE "C" NOT NULL,
    period   text NOT NULL CHECK (period IN ('day', 'month')),
    currency text COLLATE "C" NOT NULL,
    soft     bigint,
    hard     bigint,
    PRIMARY KEY (tenant, api_key, period)
);
