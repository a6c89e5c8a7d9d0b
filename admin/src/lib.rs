//! The HTTP side of the queue: an OpenAI-compatible API over a store and a dispatcher.
//!
//! [`router`] is the table of contents: every route, with the role it asks for. A request is
//! checked, becomes jobs through the producer's client, and is answered from the store. Batches are
//! moved on by a [`Driver`], of which any number may run at once. Nothing here sees a model.
//!
//! Invariants: what a caller sees, it sees as a tenant: every read of a file or a batch names the
//! tenant, and another's is not found, like none. No file, however long, is ever whole in memory. No
//! secret and no prompt is in an error or a log line.
//!
//! See also [`driver`] for how a batch is driven, and `queue/src/store/batches.rs` for its states.

mod access;
mod app;
mod dashboard;
pub mod driver;
mod ends;
mod error;
mod file_writer;
mod health;
mod json;
mod models;
mod openai;
mod openapi;
mod operator;
mod router;
mod secret;
mod serve;
mod tls;
mod watch;
mod webhooks;

pub use access::{Access, Caller};
pub use app::{App, Limits};
pub use driver::Driver;
pub use error::ApiError;
pub use models::Models;
pub use router::{ROUTES, Route, router};
pub use secret::{Secret, new_key};
pub use serve::{CONNECTIONS_MAX, serve};
pub use tls::{Tls, TlsError};
pub use watch::Watch;
pub use webhooks::Webhooks;
