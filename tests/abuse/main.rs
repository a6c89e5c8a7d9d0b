//! Bad input, hostile surroundings and wrong settings: each has a defined answer, which the command line
//! shows. No panic, no password in any line, and the neighbours go on.

#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "a failed step of a test is a failed test")]

mod access;
mod clocks;
#[allow(dead_code, reason = "shared with other tests")]
#[path = "../support/fleet.rs"]
mod fleet;
mod full;
mod jobs;
mod rig;
mod tls;
mod upgrade;
mod values;
