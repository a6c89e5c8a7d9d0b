//! The worker: takes jobs from a queue, runs them on its devices and records the results.
//!
//! ```text
//! feed ─► dispatcher ─pull─► claim ─► prepare ─► engine thread
//!                                                    │
//!              acknowledge ◄─ commit (finish) ◄─ collect ends
//! ```
//!
//! [`core`] decides and does no I/O; [`shell`] runs what it decides and reports back. As a service,
//! another task ([`reconciler`]) queues jobs that have become due and gives the dispatcher the entries
//! that it lost. An embedded worker fills the dispatcher itself from the store, in order of id, and ends
//! when all jobs are finished.
//!
//! | unreachable | embedded | service |
//! | --- | --- | --- |
//! | dispatcher | ends with the error | continues with what it holds, retries without end |
//! | store | ends with the error | results wait in memory; running work is stopped when its lease ends |

pub(crate) mod committed;
mod config;
mod core;
mod drain_rate;
mod error;
mod event_publisher;
mod heartbeat;
mod maintenance;
mod presence;
mod reconciler;
mod run;
mod sampling;
mod setup;
mod shell;

pub(crate) use self::presence::Presence;
pub use self::{
    committed::Committed,
    config::{Mode, Stop, WorkerConfig},
    error::WorkerError,
    setup::{Device, Worker},
};
