//! The SQLite part of the modules in `store/sql`: fragments of SQL, and what else differs.
//!
//! No statement locks rows: a transaction holds the write lock from its start.

use tables::rows::{hex, to_json};
use tritmill_queue::StoreError;
pub(super) use tritmill_queue::store::{SqliteStore as SqlStore, tables::sqlite as tables};

/// The time in milliseconds; `$1` is the store's clock parameter.
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

/// The function that makes a JSON object of names and values.
macro_rules! json_object {
    () => {
        "json_object"
    };
}

/// Matches any item of an `id_list` or a [`bytes_list`].
macro_rules! any_of {
    ($parameter:literal) => {
        concat!("IN (SELECT unhex(value) FROM json_each(", $parameter, "))")
    };
}

/// Matches any text of a `text_list`.
macro_rules! any_text {
    ($parameter:literal) => {
        concat!("IN (SELECT value FROM json_each(", $parameter, "))")
    };
}

/// Matches any line of a [`line_list`].
macro_rules! any_line {
    ($parameter:literal) => {
        concat!("IN (SELECT value FROM json_each(", $parameter, "))")
    };
}

/// Whether the document `batch` has all pairs of metadata of a JSON object.
macro_rules! has_metadata {
    ($parameter:literal) => {
        concat!(
            "NOT EXISTS (SELECT 1 FROM json_each(",
            $parameter,
            ") AS wanted WHERE NOT EXISTS (
                 SELECT 1 FROM json_each(batch, '$.metadata') AS given
                 WHERE given.key = wanted.key AND given.value = wanted.value))"
        )
    };
}

/// Whether a model, with or without a format, is that of the document `batch` or of one of its lines.
macro_rules! has_model {
    ($parameter:literal) => {
        concat!(
            is_of!("(batch -> '$.queue')", $parameter),
            " OR EXISTS (SELECT 1 FROM json_each(batch, '$.queues') AS named WHERE ",
            is_of!("named.value", $parameter),
            ")"
        )
    };
}

/// Whether a queue is of a model, with or without a format.
macro_rules! is_of {
    ($queue:literal, $parameter:literal) => {
        concat!(
            $parameter,
            " IN (",
            $queue,
            " ->> '$.model', (",
            $queue,
            " ->> '$.model') || '@' || (",
            $queue,
            " ->> '$.format'))"
        )
    };
}

/// The endpoint of the document `batch`.
macro_rules! endpoint {
    () => {
        "(batch ->> '$.endpoint')"
    };
}

/// The id of a batch as the API writes it.
macro_rules! batch_name {
    () => {
        "'batch_' || hex(id)"
    };
}

/// Whether a text contains another one, whatever the case of its letters.
macro_rules! has_text {
    ($text:expr, $parameter:literal) => {
        concat!("instr(lower(", $text, "), lower(", $parameter, ")) > 0")
    };
}

/// Nothing to lock.
macro_rules! for_update {
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

#[path = "sql/mod.rs"]
mod sql;

/// Adds a JSON list of pairs of a hash, in hexadecimal digits, and a line.
pub(super) const ADD_CUSTOM_IDS: &str = "
INSERT INTO batch_custom_ids (batch_id, custom_id, line, line_key)
SELECT $1, unhex(value ->> 0), value ->> 1, unhex(value ->> 2) FROM json_each($2) WHERE true
ON CONFLICT (batch_id, custom_id) DO NOTHING";

/// Adds a JSON list of ends of lines; a line that has one already gets another.
pub(super) const ADD_ENDS: &str = "
INSERT INTO batch_ends (batch_id, line, seq, state, ended_at, output)
SELECT $1, value ->> 'line', value ->> 'seq', value ->> 'state', value ->> 'ended_at',
       value ->> 'output'
FROM json_each($2) WHERE true
ON CONFLICT (batch_id, line) DO UPDATE SET seq = excluded.seq, state = excluded.state,
    ended_at = excluded.ended_at, output = excluded.output";

/// Nothing to lock.
pub(super) const LOCK_KEYS: &str = "SELECT 1";

/// Returns a list of bytes for `any_of`.
pub(super) fn bytes_list<const N: usize>(list: &[[u8; N]]) -> String {
    to_json(&list.iter().map(|bytes| hex(bytes)).collect::<Vec<_>>())
}

/// Returns a list of lines for `any_line`.
pub(super) fn line_list(lines: &[u32]) -> String {
    to_json(&lines)
}

/// Releases every batch and notice; the leases of batches count as lost. Only for the one process that owns the file, at its
/// start: the holders of those leases are gone.
///
/// # Errors
/// If the file cannot be written.
pub async fn release_batches(store: &SqlStore) -> Result<(), StoreError> {
    let release = "UPDATE batches SET epoch = epoch + 1, owner = NULL, lease_until = NULL,
                          lost_leases = lost_leases + 1
                   WHERE lease_until IS NOT NULL";
    store.execute(tables::query(release)).await?;
    let release = "UPDATE notices SET epoch = epoch + 1, owner = NULL, lease_until = NULL
                   WHERE lease_until IS NOT NULL";
    store.execute(tables::query(release)).await.map(drop)
}
