//! What travels and where it rests: jobs, the dispatcher that hands them out and the store that
//! remembers them.
//!
//! The crate owns the words of the queue ([`Job`], [`Sampling`], [`Outcome`]) and two traits: a
//! [`Store`] is the durable truth (claims, leases, epochs, results), a [`Dispatcher`] says which
//! job is next and may lose everything, since the store feeds it again. It knows nothing of tensors
//! or model files.
//!
//! Invariants: a job has at most one terminal row; a claim raises the job's epoch and only the
//! holder of that epoch can write; all leases and deadlines are on the store's clock.
//!
//! See also [`job`] for the life of a job and [`store`] for what each operation may change.

pub mod dispatch;
pub mod events;
pub mod job;
pub mod outcome;
mod queue_name;
pub mod sampling;
pub mod store;
mod trace;
pub mod wire;

pub use dispatch::{Delivery, DispatchError, Dispatcher, Entry, Pull};
pub use events::{EventId, JobEvent};
pub use job::{
    Job, JobId, JobState, Message, Priority, Prompt, QueueName, QueueNameError, Role, Tenant,
    Timestamp,
};
pub use outcome::{
    Choice, Completion, ErrorKind, FinishReason, JobError, Outcome, TokenLogprob, TopLogprob, Usage,
};
pub use sampling::{Sampling, SamplingError};
pub use store::{
    Claim, ClaimRef, Claimant, FinishedAttempt, FinishedJob, Operations, Progress, Reconciled,
    Settled, Store, StoreError,
};
pub use trace::{TraceParent, TraceParentError};
