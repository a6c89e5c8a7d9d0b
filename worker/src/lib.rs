//! The loop that joins queue and engine: pull, lease, run, record.
//!
//! One process, an engine for each device on a thread of its own ([`engine_thread`]), and an async side
//! that never blocks it ([`Worker`]). The worker pulls what fits, claims it in the store, turns jobs into engine
//! requests ([`ServedModel`]) and records what comes back, several results per transaction.
//!
//! Promise: delivered at least once, recorded exactly once. A result is written only under the epoch
//! of its claim.

pub mod engine_thread;
pub mod http;
pub mod machine;
mod metrics;
mod served;
mod translate;
mod watchdog;
mod worker;

pub use metrics::Metrics;
pub use served::ServedModel;
pub use worker::{Committed, Device, Mode, Stop, Worker, WorkerConfig, WorkerError};
