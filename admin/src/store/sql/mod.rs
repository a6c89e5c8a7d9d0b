//! What Postgres and SQLite share, written once for both databases.
//!
//! This module is compiled twice, as a child of `postgres` and as a child of `sqlite`. Its parent supplies what
//! differs: some fragments of SQL (macros), and the encoding of lists.

/// A batch that has not ended. The list of states is that of the indexes.
macro_rules! unfinished {
    () => {
        "state IN ('validating', 'in_progress', 'paused', 'finalizing', 'cancelling')"
    };
}

mod audit;
mod batch_changes;
mod batch_claims;
mod batch_ends;
mod batch_steps;
mod batches;
mod budgets;
mod call_keys;
mod files;
mod keys;
mod notices;
mod open_batches;
mod schedules;
mod sessions;
mod tenants;

use super::{
    ADD_CUSTOM_IDS, ADD_ENDS, LOCK_KEYS, SqlStore, bytes_list, line_list,
    tables::{Connection, Query, Row, id_list, query, rows, storable, text_list},
};
