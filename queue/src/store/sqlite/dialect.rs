//! The SQLite part of the modules in `store/sql`: fragments of SQL and the encoding of values.
//!
//! No statement locks rows: a transaction holds the write lock from its start.

use serde::de::DeserializeOwned;
use sqlx::Sqlite;

pub(super) use super::rows::hex;
use super::{
    calls::Row,
    rows::{damaged, document, get, to_json},
};
use crate::{
    job::JobId,
    outcome::Outcome,
    store::{ClaimRef, StoreError, attempts},
};

/// The time in milliseconds; `$1` is [`clock_parameter`](super::SqliteStore::clock_parameter).
macro_rules! now {
    () => {
        "$1"
    };
}

/// A text parameter that holds a JSON document.
macro_rules! as_json {
    ($parameter:literal) => {
        $parameter
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

/// The columns of a JSON list of pairs of bytes, as hexadecimal digits, and numbers. It ends with a
/// condition, so that `ON CONFLICT` may follow.
macro_rules! hex_pairs {
    ($parameter:literal) => {
        concat!("unhex(value ->> 0), value ->> 1 FROM json_each(", $parameter, ") WHERE true")
    };
}

/// The columns `cost` and `shard_key` of a job. One process serves the file, so nothing compares them.
macro_rules! cost {
    () => {
        "1 AS cost, 0 AS shard_key"
    };
}

/// The jobs after a job, or after the nil id, in the order in which they are taken.
macro_rules! queued_after {
    ($parameter:literal) => {
        concat!(
            "(prefix_key, id) > (coalesce((SELECT prefix_key FROM jobs WHERE id = ",
            $parameter,
            "), -1), ",
            $parameter,
            ") ORDER BY prefix_key, id"
        )
    };
}

/// All jobs, open and ended.
macro_rules! all_jobs {
    () => {
        "jobs"
    };
}

/// Whether a result is of the queue `$1`, `$2`.
macro_rules! of_queue {
    () => {
        "job_id IN (SELECT id FROM jobs WHERE model = $1 AND format = $2)"
    };
}

/// Nothing to lock.
macro_rules! lock_table {
    ($table:literal) => {
        "SELECT 1"
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

/// Nothing to lock.
macro_rules! skip_locked {
    () => {
        ""
    };
}

pub(super) type Db = Sqlite;

/// An id as text, in the same order.
pub(super) const ID_TEXT: &str = "hex(id)";

/// Deletes a tenant's rows in tables of settings.
pub(super) const TENANT_SETTINGS: [&str; 1] = ["DELETE FROM tenant_quotas WHERE tenant = $1"];

/// Returns ids as `["0192…", …]`.
pub(super) fn id_list(ids: impl IntoIterator<Item = JobId>) -> String {
    to_json(&ids.into_iter().map(|id| hex(id.as_bytes())).collect::<Vec<_>>())
}

/// Returns a list of bytes for `any_of`.
pub(super) fn bytes_list<const N: usize>(list: &[[u8; N]]) -> String {
    to_json(&list.iter().map(|bytes| hex(bytes)).collect::<Vec<_>>())
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
pub(super) fn text_list(texts: &[String]) -> String {
    to_json(&texts)
}

/// Returns a column written from a [`text_list`].
pub(super) fn texts(row: &Row, column: &'static str) -> Result<Vec<String>, StoreError> {
    document(row, column)
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
pub(super) fn storable(_what: &'static str, _text: &str) -> Result<(), StoreError> {
    Ok(())
}
