//! The client library: jobs in, results out.
//!
#![doc = include_str!("../README.md")]
#![warn(missing_docs)]

mod admission;
pub mod answer;
pub mod anthropic;
mod batch_file;
mod body;
mod builder;
mod canonical;
mod client;
mod fields;
pub mod http;
mod json_line;
mod lines;
mod messages;
mod outage;
mod overload;
mod progress;
mod relay;
pub mod remote;
mod request;
pub mod responses;
mod structured;
mod tools;

pub use batch_file::{
    BatchFile, BatchFileError, Counts, Identity, Notice, Settings, rename_to_old,
};
pub use body::{Body, Endpoint, parse_body};
pub use builder::{BuildError, JobBuilder};
pub use client::{Client, ClientError, ConnectError, EventFollower, Waited};
pub use fields::{FieldError, Fields};
pub use json_line::json_line;
pub use lines::{LINE_BYTES_MAX, LineReader, RawLine, TooLong};
pub use progress::BatchProgress;
pub use relay::{Relay, RelayProgress};
pub use request::{Refusal, RefusedLine, Request, parse_line, parse_request, unserved_model};
pub use responses::{REPEATED, ResponseRequest, answer_message, parse_response};
pub use tritmill_queue::{
    Billing, Charge, Choice, Completion, Content, Conversation, DispatchError, Dispatcher,
    Embedded, ErrorKind, EventId, FinishReason, FinishedJob, Grammar, Job, JobError, JobEvent,
    JobId, JobState, LengthLimit, Message, NewLogprobs, Outcome, Part, Priority, Prompt, QueueName,
    QueueNameError, Role, Sampling, SamplingError, Store, StoreError, Task, Tenant, Tier,
    Timestamp, TokenLogprob, Tokenized, Tool, ToolCall, ToolChoice, TopLogprob, TraceParent,
    TraceParentError, Usage, Vector, VectorFormat,
    dispatch::{Cause, Limit, MemoryDispatcher, RedisDispatcher, RedisUrlError},
    events::{Events, MemoryEvents},
    store::{AnsweredLine, Conflict, IngestedLine, JobRecord, PostgresStore, SqliteStore},
};
