//! The Postgres part of the modules in `store/sql`: fragments of SQL, and what else differs.

pub(super) use tritmill_queue::store::{PostgresStore as SqlStore, tables::postgres as tables};

/// The time in milliseconds; `$1` is the store's clock parameter.
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

/// Matches any item of an `id_list` or a [`bytes_list`].
macro_rules! any_of {
    ($parameter:literal) => {
        concat!("= ANY(", $parameter, ")")
    };
}

/// Matches any text of a `text_list`.
macro_rules! any_text {
    ($parameter:literal) => {
        concat!("= ANY(", $parameter, ")")
    };
}

/// Whether the batch in a text column has a pair of metadata.
macro_rules! has_metadata {
    ($column:literal, $name:literal, $value:literal) => {
        concat!(
            $column,
            "::jsonb -> 'metadata' @> jsonb_build_object(",
            $name,
            "::text, ",
            $value,
            "::text)"
        )
    };
}

/// Locks the selected rows.
macro_rules! for_update {
    () => {
        " FOR UPDATE"
    };
}

/// Locks the selected rows; skips rows that are already locked.
macro_rules! skip_locked {
    () => {
        " FOR UPDATE SKIP LOCKED"
    };
}

#[path = "sql/mod.rs"]
mod sql;

/// Adds a JSON list of pairs of a hash, in hexadecimal digits, and a line.
pub(super) const ADD_CUSTOM_IDS: &str = "
INSERT INTO batch_custom_ids (batch_id, custom_id, line)
SELECT $1, decode(pair ->> 0, 'hex'), (pair ->> 1)::bigint
FROM jsonb_array_elements($2::text::jsonb) AS pair
ON CONFLICT (batch_id, custom_id) DO NOTHING";

/// Keeps other transactions from adding keys.
pub(super) const LOCK_KEYS: &str = "LOCK TABLE api_keys IN EXCLUSIVE MODE";

/// Returns a list of bytes for `any_of`.
pub(super) fn bytes_list<const N: usize>(list: &[[u8; N]]) -> Vec<&[u8]> {
    list.iter().map(<[u8; N]>::as_slice).collect()
}
