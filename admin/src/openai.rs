//! The OpenAI-compatible API, `/v1/…`, one module per noun.

pub(crate) mod answer;
pub(crate) mod batches;
pub(crate) mod call;
pub(crate) mod completions;
pub(crate) mod file_content;
pub(crate) mod files;
pub(crate) mod follow;
pub(crate) mod idempotency;
mod list;
pub(crate) mod models;
pub(crate) mod multipart;
pub(crate) mod notices;
pub(crate) mod responses;
pub(crate) mod schedules;
pub(crate) mod schemas;
pub(crate) mod stream;
pub(crate) mod time_limit;
pub(crate) mod tokenize;
pub(crate) mod webhook;
