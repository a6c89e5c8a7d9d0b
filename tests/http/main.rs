//! The HTTP API over real servers, a real worker and the demo model.

#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "a failed step of a test is a failed test")]

mod access;
mod answers;
mod batches;
mod beside;
mod chains;
mod changes;
mod clients;
mod costs;
mod described;
mod drivers;
mod embeddings;
mod file_objects;
mod files;
#[allow(dead_code, reason = "shared with other tests")]
#[path = "../support/fleet.rs"]
mod fleet;
mod headers;
mod hostile;
mod hostile_crowd;
mod keys;
mod kv_peers;
mod mail;
mod metrics;
mod openai;
mod operator;
mod pool;
mod results;
mod rig;
mod server_run;
mod standalone;
mod steps;
mod strangers;
mod tenants;
mod urls;
mod webhooks;
