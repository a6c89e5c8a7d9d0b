//! The worker's decisions, without I/O: [`Core::on`](state::Core::on) takes one input after another and returns what to
//! do. It reads no clock, starts no task and calls nothing that can wait, so a simulation runs
//! thousands of lives of a worker in a second (`core/simulation`). `shell.rs` runs the commands.
//!
//! ```text
//! pull ─► claim ─► prepare ─► engine ─► commit ─► acknowledge
//! ```
//!
//! At most one call of each kind runs at a time: two commits could be reordered, and two pulls would
//! count the same free slots. What a failed call was about is kept and tried again, so no delivery and
//! no claim is held for nothing.
//!
//! | file | decides |
//! | --- | --- |
//! | `intake.rs` | which jobs are pulled, claimed and started |
//! | `results.rs` | what is saved, committed and acknowledged |
//! | `leases.rs` | which leases are renewed, and what happens when one is lost |
//! | `devices.rs`, `device_failures.rs` | which device runs a job, and which devices are suspended |
//! | `ending.rs` | how the worker ends |
//!
//! `state.rs` has the state, which these files change.
//!
//! Results are committed together: when there are [`FLUSH_COUNT`](state::FLUSH_COUNT), when the oldest has waited
//! [`FLUSH_WAIT`](state::FLUSH_WAIT), or when the engines have nothing else to do.

mod breaker;
mod calls;
mod decide;
mod device_failures;
mod devices;
mod ending;
mod in_flight;
mod intake;
pub(super) mod io;
mod leases;
pub(super) mod policy;
mod renewals;
mod results;
mod shutdown;
#[cfg(test)]
mod simulation;
mod state;
mod streamed;
pub(super) mod watchdog;

pub(super) use self::{
    devices::check_interval,
    renewals::period as renewal_period,
    state::{Core, CoreSetup},
};
