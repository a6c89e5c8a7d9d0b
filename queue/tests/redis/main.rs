//! The Redis dispatcher on a real Redis. `dispatcher.rs` tests the rules of all dispatchers.

#![allow(clippy::unwrap_used, reason = "a failed step of a test is a failed test")]

mod access;
mod churn;
mod events;
mod faults;
mod flow;
mod refusals;
mod rig;
mod shards;
mod tenants;
