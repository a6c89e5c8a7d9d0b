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

/// The function that makes a JSON object of names and values.
macro_rules! json_object {
    () => {
        "json_build_object"
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

/// Matches any line of a [`line_list`].
macro_rules! any_line {
    ($parameter:literal) => {
        concat!("= ANY(", $parameter, ")")
    };
}

/// Whether the document `batch` has all pairs of metadata of a JSON object.
macro_rules! has_metadata {
    ($parameter:literal) => {
        concat!(
            "(",
            $parameter,
            "::text = '{}' OR batch::jsonb -> 'metadata' @> ",
            $parameter,
            "::text::jsonb)"
        )
    };
}

/// Whether a model, with or without a format, is that of the document `batch` or of one of its lines.
macro_rules! has_model {
    ($parameter:literal) => {
        concat!(
            is_of!("(batch::jsonb -> 'queue')", $parameter),
            " OR EXISTS (SELECT 1 FROM jsonb_each(batch::jsonb -> 'queues') AS named WHERE ",
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
            " ->> 'model', (",
            $queue,
            " ->> 'model') || '@' || (",
            $queue,
            " ->> 'format'))"
        )
    };
}

/// The endpoint of the document `batch`.
macro_rules! endpoint {
    () => {
        "(batch::jsonb ->> 'endpoint')"
    };
}

/// The id of a batch as the API writes it.
macro_rules! batch_name {
    () => {
        "'batch_' || replace(id::text, '-', '')"
    };
}

/// Whether a text contains another one, whatever the case of its letters.
macro_rules! has_text {
    ($text:expr, $parameter:literal) => {
        concat!("strpos(lower(", $text, "), lower(", $parameter, ")) > 0")
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
INSERT INTO batch_custom_ids (batch_id, custom_id, line, line_key)
SELECT $1, decode(pair ->> 0, 'hex'), (pair ->> 1)::bigint, decode(pair ->> 2, 'hex')
FROM jsonb_array_elements($2::text::jsonb) AS pair
ON CONFLICT (batch_id, custom_id) DO NOTHING";

/// Adds a JSON list of ends of lines; a line that has one already gets another.
pub(super) const ADD_ENDS: &str = "
INSERT INTO batch_ends (batch_id, line, seq, state, ended_at, output)
SELECT $1, (item ->> 'line')::bigint, (item ->> 'seq')::bigint, item ->> 'state',
       (item ->> 'ended_at')::bigint, item ->> 'output'
FROM jsonb_array_elements($2::text::jsonb) AS item
ON CONFLICT (batch_id, line) DO UPDATE SET seq = excluded.seq, state = excluded.state,
    ended_at = excluded.ended_at, output = excluded.output";

/// Keeps other transactions from adding keys.
pub(super) const LOCK_KEYS: &str = "LOCK TABLE api_keys IN EXCLUSIVE MODE";

/// Returns a list of lines for `any_line`.
pub(super) fn line_list(lines: &[u32]) -> Vec<i64> {
    lines.iter().copied().map(i64::from).collect()
}

/// Returns a list of bytes for `any_of`.
pub(super) fn bytes_list<const N: usize>(list: &[[u8; N]]) -> Vec<&[u8]> {
    list.iter().map(<[u8; N]>::as_slice).collect()
}
