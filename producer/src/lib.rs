//! The client side: batch lines in, jobs out, answers back.
//!
//! The crate owns the batch-line codec ([`parse_line`], [`answer`]) and the batch file that an
//! embedded run answers ([`BatchFile`]): the input is read into the store, the output follows the
//! store. Its [`Client`] submits jobs to a queue and waits for them; a [`Relay`] has a batch file
//! answered by one. It never links the engine.
//!
//! Promise: whatever the bytes of an input line, it becomes a job or an error line that names the
//! field and the line number; its neighbours go on. Everything in an output line but `created` is a
//! function of the input line and the model.

pub mod answer;
mod batch_file;
mod body;
mod builder;
mod canonical;
mod client;
mod fields;
pub mod http;
mod lines;
mod outage;
mod progress;
mod quotas;
mod relay;
pub mod remote;
mod request;

pub use batch_file::{BatchFile, BatchFileError, Counts, Identity, Notice, Settings};
pub use body::{Body, Endpoint, parse_body};
pub use builder::{BuildError, JobBuilder};
pub use client::{Client, ClientError, ConnectError, Waited};
pub use fields::{FieldError, Fields};
pub use lines::{LINE_BYTES_MAX, LineReader, RawLine};
pub use progress::BatchProgress;
pub use relay::{Relay, RelayProgress};
pub use request::{Refusal, RefusedLine, Request, parse_line, parse_request};
pub use tritmill_queue::QueueName;
