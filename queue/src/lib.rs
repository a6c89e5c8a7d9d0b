//! The queue of [Tritmill](https://github.com/tritmill/tritmill): jobs, the stores that record them and
//! the dispatchers that hand them to workers.
//!
//! The crate defines the vocabulary of the queue ([`Job`], [`Sampling`], [`Outcome`]) and two traits. A
//! [`Store`] holds the durable state: claims, leases, epochs, results. A [`Dispatcher`] decides which job
//! is next; it may lose all its data, since it is filled again from the store. The crate does not depend
//! on models or tensors.
//!
//! Invariants: a job reaches a terminal state at most once; a claim raises the job's epoch, and only the
//! holder of that epoch can write; all leases and deadlines are on the store's clock.
//!
//! See also [`job`] for the states of a job and [`store`] for what each operation changes.

#![warn(missing_docs)]
#![allow(
    clippy::duplicate_mod,
    reason = "the modules in store/sql are compiled for both databases"
)]

mod backoff;
pub mod billing;
mod conversation;
pub mod dispatch;
pub mod events;
pub mod job;
mod job_id;
pub mod metrics;
pub mod outcome;
mod prefix_key;
mod queue_name;
mod refusal;
pub mod sampling;
pub mod store;
pub mod trace;
mod vector;
pub mod wire;

pub use backoff::Backoff;
pub use billing::{Billing, Charge, Tier};
pub use dispatch::{Delivery, DispatchError, Dispatcher, Entry, Pull};
pub use events::{EventId, JobEvent, NewLogprobs, Part};
pub use job::{
    Content, Conversation, Job, JobId, JobState, Message, Priority, Prompt, QueueName,
    QueueNameError, Role, Task, Tenant, Timestamp, Tool, ToolCall, ToolChoice,
};
pub use outcome::{
    Choice, Completion, ErrorKind, FinishReason, JobError, LengthLimit, Outcome, TokenLogprob,
    Tokenized, TopLogprob, Usage,
};
pub use refusal::Refusal;
pub use sampling::{Sampling, SamplingError};
pub use store::{
    Claim, ClaimRef, Claimant, FinishedAttempt, FinishedJob, Operations, Progress, Reconciled,
    Settled, Store, StoreError,
};
pub use trace::{TraceParent, TraceParentError};
pub use tritmill_grammar::{Grammar, GrammarError};
pub use vector::{Embedded, Vector, VectorFormat};
