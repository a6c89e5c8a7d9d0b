//! What Postgres and SQLite share, written once for both databases.
//!
//! This module is compiled twice, as a child of `postgres` and as a child of `sqlite`. Its parent
//! supplies what differs: the statements that change jobs, and in `dialect` types, some fragments of SQL
//! (macros) and the encoding of values.

pub mod calls;
pub(super) mod charges;
pub(super) mod classes;
mod dead_letters;
pub(super) mod history;
mod job_queries;
mod job_ranges;
pub(super) mod queue_settings;
pub mod rows;
mod store;
pub(super) mod tenants;
mod waiting;

use super::{SqlStore, announcements, claims, dialect, queues, reconcile, sampler};
