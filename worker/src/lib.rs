//! Runs the jobs of a queue on an inference engine.
//!
//! One process has an engine for each device, on a thread of its own, and an async
//! side that never blocks it ([`Worker`]). The worker pulls as many jobs as fit, claims them in the store,
//! turns them into engine requests ([`ServedModel`]) and records the results, several per transaction.
//!
//! Jobs are delivered at least once and recorded exactly once: a result is written only under the epoch
//! of its claim.

#![warn(missing_docs)]

mod conversation;
mod engine_thread;
pub mod http;
pub mod machine;
mod mailbox;
mod metrics;
mod pool;
mod served;
mod translate;
mod worker;

pub use conversation::TemplateInput;
pub use metrics::Metrics;
pub use pool::{LoadFailure, Loader, Pages, Pool, PoolError, PoolUnit};
pub use served::{ServedLimits, ServedModel};
pub use worker::{Committed, Device, Mode, Stop, Worker, WorkerConfig, WorkerError};
