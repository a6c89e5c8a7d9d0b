//! What Postgres and SQLite share, written once for both databases.
//!
//! This module is compiled twice, as a child of `postgres` and as a child of `sqlite`. Its parent supplies what
//! differs: some fragments of SQL (macros), and the encoding of lists.

mod audit;
mod batch_claims;
mod batch_steps;
mod batches;
mod call_keys;
mod files;
mod keys;
mod sessions;
mod tenants;

use super::{
    ADD_CUSTOM_IDS, LOCK_KEYS, SqlStore, bytes_list,
    tables::{Connection, Query, Row, id_list, query, rows, storable, text_list},
};
