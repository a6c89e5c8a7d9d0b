//! Prometheus metrics of stores and dispatchers: how long each call takes and how it ends, and the use of
//! connections.
//!
//! A process has one [`CallMetrics`] and wraps what it calls in a [`MeasuredStore`] and a
//! [`MeasuredDispatcher`], which implement the same traits. After the first call of a kind, measuring
//! costs two readings of the clock, one histogram's lock and the box of one more future: no label is
//! looked up or allocated.
//!
//! A call is measured as its caller sees it: with the wait for a connection, repetitions and, for `pull`,
//! the wait for the first entry.

mod calls;
mod connections;
mod measured;
mod rows;

pub use calls::CallMetrics;
pub use connections::ConnectionMetrics;
pub use measured::{MeasuredDispatcher, MeasuredStore};
pub use rows::{Row, Values, encode_rows};
