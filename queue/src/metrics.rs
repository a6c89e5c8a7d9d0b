//! Prometheus metrics of stores and dispatchers: how long each call takes and how it ends, and the use of
//! connections.
//!
//! A process has one [`CallMetrics`] and wraps what it calls in a [`MeasuredStore`] and a
//! [`MeasuredDispatcher`], which implement the same traits. Measuring
//! costs two readings of the clock, a look at the labels, one histogram's lock and the box of one more future.
//!
//! A call is measured as its caller sees it: with the wait for a connection, repetitions and, for `pull`,
//! the wait for the first entry.

mod calls;
mod connections;
mod measured;
mod rows;

pub use calls::{CallMetrics, CallResult, Calls, Failure};
pub use connections::ConnectionMetrics;
pub use measured::{MeasuredDispatcher, MeasuredStore};
pub use rows::{Row, Values, encode_rows};
