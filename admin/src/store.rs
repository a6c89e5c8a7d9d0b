//! The tables of the HTTP API: keys, sessions, files, batches, notices of what happened to them, and the audit log. They lie beside the
//! jobs, in the same database.
//!
//! The line to the queue: `tritmill-queue` owns jobs and knows no batch, this module owns batches and changes jobs only
//! through the queue. A batch meets its jobs in two places. Its jobs are a range of ids, which the queue counts,
//! holds, cancels and reads ([`JobRanges`]). And a step that submits lines inserts their jobs in the transaction that saves
//! the batch ([`BatchSteps::save_batch`]), so that a step is done as a whole or not at all; the queue offers that insertion
//! and its connections for this ([`tritmill_queue::store::tables`]). Claims of batches, which go round the tenants,
//! need no jobs: they are statements on the table of batches alone.

pub mod after;
pub mod audit;
pub mod batch_changes;
pub mod batch_ends;
pub mod batch_steps;
pub mod batches;
pub mod budgets;
pub mod call_keys;
pub mod escalation;
pub mod events;
pub mod files;
pub mod keys;
mod measured;
pub mod notices;
pub mod open_batches;
mod postgres;
pub mod schedules;
pub mod sessions;
mod sqlite;
pub mod step_state;
pub mod tenants;
pub mod webhooks;
mod windows;

pub use audit::Audit;
pub use batch_ends::BatchEnds;
pub use batch_steps::BatchSteps;
pub use batches::{Batch, BatchId, BatchState, Batches};
pub use budgets::Budgets;
pub use call_keys::CallKeys;
pub use files::{FileId, Files};
pub use keys::{ApiKey, KeyHash, KeyRole, Keys};
pub use notices::Notices;
pub use open_batches::OpenBatches;
pub use schedules::Schedules;
pub use sessions::Sessions;
pub use sqlite::release_batches;
pub use tenants::Tenants;
use tritmill_queue::store::{JobRanges, JobStore};

/// A store that serves HTTP clients and operators.
pub trait FrontStore:
    JobStore
    + JobRanges
    + Keys
    + Sessions
    + Files
    + Batches
    + BatchEnds
    + BatchSteps
    + OpenBatches
    + CallKeys
    + Audit
    + Tenants
    + Budgets
    + Schedules
    + Notices
{
}

impl<S> FrontStore for S where
    S: JobStore
        + JobRanges
        + Keys
        + Sessions
        + Files
        + Batches
        + BatchEnds
        + BatchSteps
        + OpenBatches
        + CallKeys
        + Audit
        + Tenants
        + Budgets
        + Schedules
        + Notices
{
}
