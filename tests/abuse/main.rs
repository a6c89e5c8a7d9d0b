//! Bad input, failing servers and wrong settings: each has a defined result on the command line, without
//! a panic and without a password in any output, and other jobs are answered.

#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "a failed step of a test is a failed test")]

mod access;
mod clocks;
#[allow(dead_code, reason = "shared with other tests")]
#[path = "../support/fleet.rs"]
mod fleet;
mod full;
mod jobs;
mod refusals;
mod rig;
mod schema_versions;
mod tls;
mod values;
