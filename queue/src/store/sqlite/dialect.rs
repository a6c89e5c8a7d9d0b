//! The SQLite part of the modules in `store/sql`: fragments of SQL and the encoding of values.
//!
//! No statement locks rows: a transaction holds the write lock from its start.

use serde::{Serialize, de::DeserializeOwned};
use sqlx::Sqlite;

pub(super) use super::rows::hex;
use super::{
    calls::Row,
    rows::{damaged, document, get, to_json},
};
use crate::{
    job::{JobId, JobState},
    outcome::Outcome,
    store::{ClaimRef, StoreError, attempts},
};

/// The time in milliseconds; `$1` is [`clock_parameter`](super::SqliteStore::clock_parameter).
macro_rules! now {
    () => {
        "$1"
    };
}

/// The table of open jobs.
macro_rules! open_jobs {
    () => {
        "jobs"
    };
}

/// Matches any id of an [`id_list`].
macro_rules! any_of {
    ($parameter:literal) => {
        concat!("IN (SELECT unhex(value) FROM json_each(", $parameter, "))")
    };
}

/// Matches any text of a [`text_list`].
macro_rules! any_text {
    ($parameter:literal) => {
        concat!("IN (SELECT value FROM json_each(", $parameter, "))")
    };
}

/// The columns of a job's entry besides its id, tenant and priority. One process serves the file, so nothing compares
/// costs and keys.
macro_rules! entry_columns {
    () => {
        "1 AS cost, 0 AS shard_key, expires_at, tier"
    };
}

/// All jobs, open and ended.
macro_rules! all_jobs {
    () => {
        "jobs"
    };
}

/// What the ends of jobs are ordered by: the order of commits.
macro_rules! end_mark {
    () => {
        "results.seq"
    };
}

/// A column for which no index is used.
macro_rules! unindexed {
    ($column:expr) => {
        concat!("+", $column)
    };
}

/// Nothing to lock.
macro_rules! for_update {
    () => {
        ""
    };
}

/// Nothing to lock.
macro_rules! for_share {
    () => {
        ""
    };
}

/// How much later than its [`end_mark`] the end of a job may be seen: there is one connection.
pub(super) const ENDS_COMMITTED_LATE: i64 = 0;
/// The newest end of all: what ends later has a later mark.
pub(super) const NEWEST_END: Option<&str> =
    Some("SELECT coalesce(max(seq), 0) AS mark FROM results");

pub(super) type Db = Sqlite;

/// What a column of metadata must contain, around the parameters of name and value.
pub(super) const METADATA_HAS: [&str; 3] =
    ["EXISTS (SELECT 1 FROM json_each(metadata) WHERE key = ", " AND value = ", ")"];

/// Counts the jobs of a range of ids by state, by reading them.
pub(super) const RANGE_COUNTS: &str =
    "SELECT state, count(*) AS jobs FROM jobs WHERE id BETWEEN $1 AND $2 GROUP BY state";
/// Whether a range has many jobs; and how they are counted: by indexes. The table is large and has no index by id and state. All queued jobs
/// are read; what most jobs are in, completed, is what is left of all.
pub(super) const RANGE_COUNTS_OF_MANY: Option<[&str; 2]> = Some([
    "SELECT 1 FROM jobs WHERE id BETWEEN $1 AND $2 LIMIT 1 OFFSET 10000",
    "
WITH other (state, jobs) AS (
    SELECT state, count(*) FROM jobs INDEXED BY jobs_set_apart
    WHERE state IN ('scheduled', 'retrying', 'failed', 'cancelled', 'expired')
      AND id BETWEEN $1 AND $2 GROUP BY state
    UNION ALL
    SELECT 'running', count(*) FROM jobs INDEXED BY jobs_running
    WHERE state = 'running' AND id BETWEEN $1 AND $2
    UNION ALL
    SELECT 'queued', count(*) FROM jobs INDEXED BY jobs_in_order
    WHERE state = 'queued' AND id BETWEEN $1 AND $2
)
SELECT state, jobs FROM other
UNION ALL
SELECT 'completed', (SELECT count(*) FROM jobs WHERE id BETWEEN $1 AND $2)
                    - (SELECT sum(jobs) FROM other)",
]);

/// An id as text, in the same order.
pub(super) const ID_TEXT: &str = "hex(id)";

/// Reads the jobs of a queue after a job, or after the nil id, in the order in which they are taken.
pub(super) const QUEUED: &str = "
SELECT id, tenant, priority, 1 AS cost, 0 AS shard_key, expires_at, tier FROM jobs
WHERE model = $1 AND format = $2 AND state = 'queued'
  AND (prefix_key, id) > (coalesce((SELECT prefix_key FROM jobs WHERE id = $3), -1), $3)
ORDER BY prefix_key, id LIMIT $4";

/// Sums the tokens of the results of a queue, or of all.
pub(super) const TOKENS: &str = "
SELECT CAST(coalesce(sum(prompt_tokens), 0) AS bigint) AS prompt,
       CAST(coalesce(sum(completion_tokens), 0) AS bigint) AS completion
FROM results
WHERE $1 IS NULL OR job_id IN (SELECT id FROM jobs WHERE model = $1 AND format = $2)";

/// Returns tenants with jobs, by name: from each to the next along the index.
pub(super) const JOB_TENANTS: &str = "
WITH RECURSIVE names (tenant) AS (
    SELECT min(tenant) FROM jobs WHERE tenant > $1
    UNION ALL
    SELECT (SELECT min(tenant) FROM jobs WHERE tenant > names.tenant)
    FROM names WHERE names.tenant IS NOT NULL
)
SELECT tenant FROM names WHERE tenant IS NOT NULL LIMIT $2";

/// Deletes a tenant's rows in tables of settings and samples.
pub(super) const TENANT_SETTINGS: [&str; 2] = [
    "DELETE FROM tenant_quotas WHERE tenant = $1",
    "DELETE FROM subject_samples WHERE kind = 'tenant' AND name = $1",
];

/// Returns ids as `["0192…", …]`.
pub fn id_list(ids: impl IntoIterator<Item = JobId>) -> String {
    to_json(&ids.into_iter().map(|id| hex(id.as_bytes())).collect::<Vec<_>>())
}

/// Returns claims as `[{"id": "0192…", "epoch": 1}, …]`.
pub(super) fn claim_list(claims: &[ClaimRef]) -> String {
    let json = |claim: &ClaimRef| {
        serde_json::json!({
            "id": hex(claim.id.as_bytes()),
            "epoch": claim.epoch,
            "claim_id": claim.claim_id,
        })
    };
    to_json(&claims.iter().map(json).collect::<Vec<_>>())
}

/// Returns a list of texts as it is stored: a JSON array.
pub fn text_list(texts: &[String]) -> String {
    to_json(&texts)
}

/// Returns a column written from a [`text_list`].
pub(super) fn texts(row: &Row, column: &'static str) -> Result<Vec<String>, StoreError> {
    document(row, column)
}

/// Returns a value as a column in JSON has it.
pub(super) fn encode(value: &impl Serialize) -> String {
    to_json(value)
}

/// Returns a column in JSON.
pub(super) fn decode<T: DeserializeOwned>(
    row: &Row,
    column: &'static str,
) -> Result<T, StoreError> {
    document(row, column)
}

/// Returns an outcome, or NULL; if it cannot be read, the reason. The second value is false: a file
/// has one owner, so there is no process of a later release.
pub(super) fn outcome(row: &Row) -> Result<(Option<Outcome>, bool), StoreError> {
    let json: Option<&str> = get(row, "outcome")?;
    let outcome = json.map(serde_json::from_str).transpose().unwrap_or_else(|error| {
        Some(Outcome::Error(attempts::unreadable(&damaged("outcome", error))))
    });
    Ok((outcome, false))
}

/// SQLite stores any text.
pub fn storable(_what: &'static str, _text: &str) -> Result<(), StoreError> {
    Ok(())
}

/// Returns the tables with jobs in a state, or with jobs: all are in one.
pub fn tables_of(_: Option<JobState>) -> &'static [&'static str] {
    &["jobs"]
}
