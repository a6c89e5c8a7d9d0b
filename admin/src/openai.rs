//! The API that OpenAI's clients speak: `/v1/…`. One file per noun.

pub(crate) mod batches;
pub(crate) mod completions;
pub(crate) mod files;
pub(crate) mod models;
pub(crate) mod multipart;
mod paging;
mod stream;
