//! The HTTP API and the dashboard of Tritmill, over a store and a dispatcher.
//!
//! [`ROUTES`] lists every route with the role it needs. A request is validated, becomes jobs through the
//! client crate, and is answered from the store. A [`Driver`] processes batches; any number of
//! drivers may run at once. This crate never loads a model.
//!
//! Invariants: every read of a file or a batch names the caller's tenant; a file of another tenant looks
//! like one that does not exist. Operators list and cancel the batches of all tenants, but see no files. Files are
//! streamed and never held in memory as a whole. Error messages and log lines contain no secrets and no prompts.
//!
//! See also [`driver`] for the steps of a batch, and [`store::batches`] for its states.
#![warn(missing_docs)]
#![allow(
    clippy::duplicate_mod,
    reason = "the modules in store/sql are compiled for both databases"
)]

mod abandoned_jobs;
mod access;
pub mod added_lines;
mod anthropic;
mod app;
mod batch_conditions;
pub mod budgets;
mod changes;
pub mod chosen_lines;
mod cors;
pub mod costs;
mod dashboard;
pub mod data_urls;
pub mod days;
pub mod driver;
mod error;
mod extract;
mod file_contents;
mod file_writer;
mod health;
mod job_request;
mod job_waiter;
mod key_reads;
mod key_uses;
pub mod line_template;
mod metrics;
mod models;
mod notices;
mod openai;
mod openapi;
mod operator;
mod output_lines;
mod rate_limits;
mod refusals;
mod request_trace;
pub mod results;
mod router;
mod routes;
mod schedules;
mod secret;
mod shown_errors;
mod sign_on;
mod site;
mod sse;
pub mod store;
mod tenant_limits;
mod throttle;
mod watch;

pub use access::Access;
pub use app::{App, Limits, Settings};
pub use driver::Driver;
pub use file_contents::FileContents;
pub use models::Models;
pub use notices::{
    Notifier,
    mail::{MailError, MailSettings, MailTls, MailTo, Mailer},
};
pub use rate_limits::CallerLimits;
pub use router::router;
pub use routes::{ROUTES, Route};
pub use schedules::Scheduler;
pub use secret::{Secret, new_key};
pub use sign_on::{
    InvalidRule as InvalidSignOnRule, Rule as SignOnRule, SignOnSettings, SignOnSettingsError,
    SingleSignOn,
};
pub use site::{CrossOrigin, InvalidOrigin, Site, WebOrigin};
pub use tritmill_http::{Bounds, Network, Proxies, SLACK, Server, Tls, TlsError};
pub use watch::Watch;

// What most modules need.
pub(crate) use access::{Call, Caller};
pub(crate) use error::{ApiError, JsonResult};
pub(crate) use extract::{JsonBody, QueryParams};
pub(crate) use file_writer::FileWriter;
pub(crate) use tritmill_http::{Exchange, Peer};
