//! The Redis dispatcher on a real Redis: what every dispatcher must do is in `dispatcher.rs`.

#![allow(clippy::unwrap_used, reason = "a failed step of a test is a failed test")]

mod access;
mod churn;
mod faults;
mod flow;
mod rig;
