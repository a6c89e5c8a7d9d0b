//! The OpenAI-compatible API, `/v1/…`, one module per noun.

mod answer;
pub(crate) mod batches;
pub(crate) mod completions;
pub(crate) mod files;
mod list;
pub(crate) mod models;
pub(crate) mod multipart;
mod schemas;
mod stream;
mod time_limit;
