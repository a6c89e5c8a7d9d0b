//! The dashboard: sessions, pages, TLS, and a tour with a real browser.

#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "a failed step of a test is a failed test")]

mod browser;
#[allow(dead_code, reason = "shared with other tests")]
#[path = "../support/fleet.rs"]
mod fleet;
mod jobs;
mod operators;
mod pages;
mod playground;
#[allow(dead_code, reason = "shared with other tests")]
#[path = "../http/rig.rs"]
mod rig;
mod session;
mod sign_on;
mod tls;
mod tour;
