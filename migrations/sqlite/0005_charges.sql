-- What answers cost. Amounts are integers: prices in 10⁻¹² of a currency's unit per token, charges in 10⁻⁹.

ALTER TABLE jobs ADD COLUMN tier TEXT NOT NULL DEFAULT 'default';
ALTER TABLE jobs ADD COLUMN api_key TEXT;

-- `charge` is NULL for an answer without a price, and for what is no answer.
ALTER TABLE results ADD COLUMN cached_tokens INTEGER NOT NULL DEFAULT 0;
ALTER TABLE results ADD COLUMN charge INTEGER;
ALTER TABLE results ADD COLUMN currency TEXT;

-- A model or tier of `*` is any one that has no row of its own; the model counts first.
CREATE TABLE prices (
    id           INTEGER PRIMARY KEY,
    model        TEXT NOT NULL,
    tier         TEXT NOT NULL,
    currency     TEXT NOT NULL,
    input        INTEGER NOT NULL,
    cached_input INTEGER NOT NULL,
    output       INTEGER NOT NULL,
    UNIQUE (model, tier)
);

-- Charges of a day (in UTC, counted from 1970). `api_key` is the id of a key or empty; `currency` is empty for answers without a price.
CREATE TABLE charges (
    tenant            TEXT NOT NULL,
    day               INTEGER NOT NULL,
    api_key           TEXT NOT NULL,
    model             TEXT NOT NULL,
    tier              TEXT NOT NULL,
    currency          TEXT NOT NULL,
    answers           INTEGER NOT NULL,
    prompt_tokens     INTEGER NOT NULL,
    cached_tokens     INTEGER NOT NULL,
    completion_tokens INTEGER NOT NULL,
    charge            INTEGER NOT NULL,
    PRIMARY KEY (tenant, day, api_key, model, tier, currency)
) WITHOUT ROWID;
CREATE INDEX charges_by_day ON charges (day);

-- Bounds of what a tenant, or one of its keys (`api_key`, else empty), may be charged in a day or month.
CREATE TABLE budgets (
    tenant   TEXT NOT NULL,
    api_key  TEXT NOT NULL,
    period   TEXT NOT NULL CHECK (period IN ('day', 'month')),
    currency TEXT NOT NULL,
    soft     INTEGER,
    hard     INTEGER,
    PRIMARY KEY (tenant, api_key, period)
) WITHOUT ROWID;
