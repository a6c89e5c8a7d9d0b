//! The Postgres part of the modules in `store/sql`: fragments of SQL and the encoding of values.

use serde::{Serialize, de::DeserializeOwned};
use sqlx::Postgres;
use uuid::Uuid;

use super::{
    calls::Row,
    rows::{damaged, get},
};
use crate::{
    job::{JobId, JobState},
    outcome::Outcome,
    store::{StoreError, attempts},
    wire::{self, WireError},
};

/// The time in milliseconds; `$1` is [`clock_parameter`](super::PostgresStore::clock_parameter).
macro_rules! now {
    () => {
        "store_now_ms($1)"
    };
}

/// The table of open jobs.
macro_rules! open_jobs {
    () => {
        "open_jobs"
    };
}

/// Matches any id of an [`id_list`].
macro_rules! any_of {
    ($parameter:literal) => {
        concat!("= ANY(", $parameter, ")")
    };
}

/// Matches any text of a [`text_list`].
macro_rules! any_text {
    ($parameter:literal) => {
        concat!("= ANY(", $parameter, ")")
    };
}

/// The columns of a job's entry besides its id, tenant and priority.
macro_rules! entry_columns {
    () => {
        "cost, shard_key, expires_at, tier"
    };
}

/// All jobs, open and ended.
macro_rules! all_jobs {
    () => {
        "all_jobs"
    };
}

/// What the ends of jobs are ordered by: their time, since Postgres does not keep the order of commits.
macro_rules! end_mark {
    () => {
        "finished_at"
    };
}

/// A column: Postgres knows by itself when an index helps.
macro_rules! unindexed {
    ($column:expr) => {
        $column
    };
}

/// Locks the selected rows.
macro_rules! for_update {
    () => {
        " FOR UPDATE"
    };
}

/// Keeps the selected rows from being changed.
macro_rules! for_share {
    () => {
        " FOR SHARE"
    };
}

/// How much later than its [`end_mark`] the end of a job may be seen, without notice: two seconds.
pub(super) const ENDS_COMMITTED_LATE: i64 = 2000;
/// The newest end of all is not asked for: later ones may have an earlier mark.
pub(super) const NEWEST_END: Option<&str> = None;

pub(super) type Db = Postgres;

/// What a column of metadata must contain, around the parameters of name and value.
pub(super) const METADATA_HAS: [&str; 3] =
    ["metadata @> jsonb_build_object(", "::text, ", "::text)"];

/// Counts the jobs of a range of ids by state.
pub(super) const RANGE_COUNTS: &str =
    "SELECT state, count(*) AS jobs FROM all_jobs WHERE id BETWEEN $1 AND $2 GROUP BY state";
/// Other statements for ranges with many jobs: none are needed.
pub(super) const RANGE_COUNTS_OF_MANY: Option<[&str; 2]> = None;

/// An id as text, in the same order. Postgres has no minimum of UUIDs before release 18.
pub(super) const ID_TEXT: &str = "id::text";

/// Reads the jobs of a queue after a job, or after the nil id, in the order in which they are taken.
pub(super) const QUEUED: &str = "
SELECT id, tenant, priority, cost, shard_key, expires_at, tier FROM open_jobs
WHERE model = $1 AND format = $2 AND state = 'queued' AND id > $3 ORDER BY id LIMIT $4";

/// Sums the tokens of the results of a queue, or of all.
pub(super) const TOKENS: &str = "
SELECT CAST(coalesce(sum(prompt_tokens), 0) AS bigint) AS prompt,
       CAST(coalesce(sum(completion_tokens), 0) AS bigint) AS completion
FROM results WHERE $1 IS NULL OR (model = $1 AND format = $2)";

/// Returns tenants with jobs, by name: from each to the next along the indexes.
pub(super) const JOB_TENANTS: &str = "
WITH RECURSIVE names AS (
    SELECT least((SELECT min(tenant) FROM open_jobs WHERE tenant > $1),
                 (SELECT min(tenant) FROM jobs WHERE tenant > $1)) AS tenant
    UNION ALL
    SELECT least((SELECT min(tenant) FROM open_jobs WHERE tenant > names.tenant),
                 (SELECT min(tenant) FROM jobs WHERE tenant > names.tenant))
    FROM names WHERE names.tenant IS NOT NULL
)
SELECT tenant FROM names WHERE tenant IS NOT NULL LIMIT $2";

/// Deletes a tenant's rows in tables of settings and samples.
pub(super) const TENANT_SETTINGS: [&str; 3] = [
    "DELETE FROM tenant_quotas WHERE tenant = $1",
    "DELETE FROM idempotency WHERE tenant = $1",
    "DELETE FROM subject_samples WHERE kind = 'tenant' AND name = $1",
];

/// Returns ids in ascending order: the order in which every statement locks its rows.
pub fn id_list(ids: impl IntoIterator<Item = JobId>) -> Vec<Uuid> {
    let mut sorted: Vec<Uuid> = ids.into_iter().map(Uuid::from).collect();
    sorted.sort_unstable();
    sorted.dedup();
    sorted
}

/// Returns a list of texts as it is stored.
pub fn text_list(texts: &[String]) -> &[String] {
    texts
}

/// Returns a column written from a [`text_list`].
pub(super) fn texts(row: &Row, column: &'static str) -> Result<Vec<String>, StoreError> {
    get(row, column)
}

/// Returns a value as a column in wire format has it.
pub(super) fn encode(value: &impl Serialize) -> Vec<u8> {
    wire::encode(value)
}

/// Returns a column in wire format.
pub(super) fn decode<T: DeserializeOwned>(
    row: &Row,
    column: &'static str,
) -> Result<T, StoreError> {
    wire::decode(get::<&[u8]>(row, column)?).map_err(|error| damaged(column, error))
}

/// Returns an outcome, or NULL; if it cannot be read, the reason. The second value is whether a later
/// release may be able to read it.
pub(super) fn outcome(row: &Row) -> Result<(Option<Outcome>, bool), StoreError> {
    let bytes: Option<&[u8]> = get(row, "outcome")?;
    match bytes.map(wire::decode).transpose() {
        Ok(outcome) => Ok((outcome, false)),
        Err(error) => {
            let is_later = matches!(error, WireError::Version(_) | WireError::Encoding(_));
            let error = attempts::unreadable(&damaged("outcome", error));
            Ok((Some(Outcome::Error(error)), is_later))
        }
    }
}

/// Longest name of a queue or tenant: several must fit an index entry.
const NAME_BYTES_MAX: usize = 512;

/// Returns an error for a name that Postgres cannot hold and index: a long one, or one with NUL.
pub fn storable(what: &'static str, text: &str) -> Result<(), StoreError> {
    let problem = if text.contains('\0') {
        "it has a NUL character".to_owned()
    } else if text.len() > NAME_BYTES_MAX {
        format!("it has {} bytes, the limit is {NAME_BYTES_MAX}", text.len())
    } else {
        return Ok(());
    };
    Err(StoreError::InvalidValue { what, problem })
}

/// Returns the tables with jobs in a state, or with jobs.
pub fn tables_of(state: Option<JobState>) -> &'static [&'static str] {
    match state {
        None => &["open_jobs", "jobs"],
        Some(state) if state.is_terminal() => &["jobs"],
        Some(_) => &["open_jobs"],
    }
}
