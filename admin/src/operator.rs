//! `/admin/v1`: what operators see and do.
//!
//! Each module is one noun. Types that are sent are described where they are made, so that the
//! document says what is sent. Every act is noted, with the key that did it, before it is done.

pub(crate) mod dead_letters;
pub(crate) mod events;
pub(crate) mod history;
pub(crate) mod jobs;
pub(crate) mod keys;
pub(crate) mod log;
pub(crate) mod queues;
pub(crate) mod request;
pub(crate) mod story;
pub(crate) mod workers;
