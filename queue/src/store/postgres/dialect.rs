//! The Postgres part of the modules in `store/sql`: fragments of SQL and the encoding of values.

use serde::de::DeserializeOwned;
use sqlx::Postgres;
use uuid::Uuid;

use super::{
    calls::Row,
    rows::{damaged, get},
};
use crate::{
    job::JobId,
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

/// A text parameter that holds a JSON document.
macro_rules! as_json {
    ($parameter:literal) => {
        concat!($parameter, "::text::jsonb")
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
        any_of!($parameter)
    };
}

/// The columns of a JSON list of pairs of bytes, as hexadecimal digits, and numbers. It ends with a
/// condition, so that `ON CONFLICT` may follow.
macro_rules! hex_pairs {
    ($parameter:literal) => {
        concat!(
            "decode(pair ->> 0, 'hex'), (pair ->> 1)::bigint FROM jsonb_array_elements(",
            $parameter,
            "::text::jsonb) AS pair WHERE true"
        )
    };
}

/// The columns `cost` and `shard_key` of a job.
macro_rules! cost {
    () => {
        "cost, shard_key"
    };
}

/// The jobs after a job, or after the nil id, in the order in which they are taken.
macro_rules! queued_after {
    ($parameter:literal) => {
        concat!("id > ", $parameter, " ORDER BY id")
    };
}

/// All jobs, open and ended.
macro_rules! all_jobs {
    () => {
        "all_jobs"
    };
}

/// Whether a result is of the queue `$1`, `$2`.
macro_rules! of_queue {
    () => {
        "(model = $1 AND format = $2)"
    };
}

/// Locks a table against other writers until the transaction ends.
macro_rules! lock_table {
    ($table:literal) => {
        concat!("LOCK TABLE ", $table, " IN EXCLUSIVE MODE")
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

/// Locks the selected rows; skips rows that are already locked.
macro_rules! skip_locked {
    () => {
        " FOR UPDATE SKIP LOCKED"
    };
}

pub(super) type Db = Postgres;

/// An id as text, in the same order. Postgres has no minimum of UUIDs before release 18.
pub(super) const ID_TEXT: &str = "id::text";

/// Deletes a tenant's rows in tables of settings.
pub(super) const TENANT_SETTINGS: [&str; 2] =
    ["DELETE FROM tenant_quotas WHERE tenant = $1", "DELETE FROM idempotency WHERE tenant = $1"];

/// Returns ids in ascending order: the order in which every statement locks its rows.
pub(super) fn id_list(ids: impl IntoIterator<Item = JobId>) -> Vec<Uuid> {
    let mut sorted: Vec<Uuid> = ids.into_iter().map(Uuid::from).collect();
    sorted.sort_unstable();
    sorted.dedup();
    sorted
}

/// Returns a list of bytes for `any_of`.
pub(super) fn bytes_list<const N: usize>(list: &[[u8; N]]) -> Vec<&[u8]> {
    list.iter().map(<[u8; N]>::as_slice).collect()
}

/// Returns a list of texts as it is stored.
pub(super) fn text_list(texts: &[String]) -> &[String] {
    texts
}

/// Returns a column written from a [`text_list`].
pub(super) fn texts(row: &Row, column: &'static str) -> Result<Vec<String>, StoreError> {
    get(row, column)
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
pub(super) fn storable(what: &'static str, text: &str) -> Result<(), StoreError> {
    let problem = if text.contains('\0') {
        "it has a NUL character".to_owned()
    } else if text.len() > NAME_BYTES_MAX {
        format!("it has {} bytes, the limit is {NAME_BYTES_MAX}", text.len())
    } else {
        return Ok(());
    };
    Err(StoreError::InvalidValue { what, problem })
}
