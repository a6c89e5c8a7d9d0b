//! The OpenAI-compatible API, `/v1/…`, one module per noun.

mod answer;
pub(crate) mod batches;
mod call;
pub(crate) mod completions;
pub(crate) mod file_content;
pub(crate) mod files;
mod follow;
mod idempotency;
mod list;
pub(crate) mod models;
pub(crate) mod multipart;
pub(crate) mod responses;
pub(crate) mod schedules;
pub(crate) mod schemas;
mod stream;
mod time_limit;
pub(crate) mod tokenize;
