//! Histograms of calls, by call and result.

use std::{future::Future, time::Instant};

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{family, histogram::Histogram},
    registry::Registry,
};

use crate::{
    DispatchError, StoreError,
    store::classes::{ClassError, ResetClassError},
};

/// Upper bounds of the buckets, in seconds. A statement on Postgres may take 60 s; a call of several may take
/// longer.
const BUCKETS: [f64; 15] =
    [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 15.0, 60.0];

/// How a call ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CallResult {
    /// With an answer.
    Ok,
    /// The queue is full.
    Busy,
    /// The worker or the operator may not do this, or the server refuses this program.
    Refused,
    /// The store cannot hold a value.
    Invalid,
    /// A stored value cannot be read.
    Damaged,
    /// The server was not reached, could not do the call now, or did not answer in time.
    Unavailable,
    /// The caller stopped waiting.
    Dropped,
}

impl CallResult {
    /// Returns the value of the label `result`.
    const fn as_str(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Busy => "busy",
            Self::Refused => "refused",
            Self::Invalid => "invalid",
            Self::Damaged => "damaged",
            Self::Unavailable => "unavailable",
            Self::Dropped => "dropped",
        }
    }
}

/// An error of a measured call.
pub trait Failure {
    /// Returns the kind of error.
    fn kind(&self) -> CallResult;
}

impl Failure for StoreError {
    fn kind(&self) -> CallResult {
        match self {
            Self::Unavailable(_) | Self::Migrate(_) => CallResult::Unavailable,
            Self::Refused(_) => CallResult::Refused,
            Self::InvalidValue { .. } => CallResult::Invalid,
            Self::Damaged { .. } => CallResult::Damaged,
        }
    }
}

impl Failure for DispatchError {
    fn kind(&self) -> CallResult {
        match self {
            Self::Busy { .. } => CallResult::Busy,
            Self::Unavailable(_) => CallResult::Unavailable,
            Self::Refused(_) => CallResult::Refused,
        }
    }
}

impl Failure for ClassError {
    fn kind(&self) -> CallResult {
        match self {
            Self::Mismatch { .. } => CallResult::Refused,
            Self::Store(error) => error.kind(),
        }
    }
}

impl Failure for ResetClassError {
    fn kind(&self) -> CallResult {
        match self {
            Self::Served { .. } => CallResult::Refused,
            Self::Store(error) => error.kind(),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Labels {
    call: &'static str,
    result: &'static str,
}

type Family = family::Family<Labels, Histogram, fn() -> Histogram>;

/// Histograms of the calls of one trait or of several.
#[derive(Debug, Clone)]
pub struct Calls(Family);

impl Default for Calls {
    fn default() -> Self {
        Self(Family::new_with_constructor(|| Histogram::new(BUCKETS)))
    }
}

impl Calls {
    /// Waits for the answer of a call and records its time. A call that is dropped is recorded, too.
    pub async fn time<T, E: Failure>(
        &self,
        call: &'static str,
        answer: impl Future<Output = Result<T, E>>,
    ) -> Result<T, E> {
        let mut timing =
            Timing { calls: self, call, started: Instant::now(), result: CallResult::Dropped };
        let answer = answer.await;
        timing.result = answer.as_ref().map_or_else(Failure::kind, |_| CallResult::Ok);
        answer
    }
}

/// A call without an answer so far.
struct Timing<'a> {
    calls: &'a Calls,
    call: &'static str,
    started: Instant,
    result: CallResult,
}

impl Drop for Timing<'_> {
    fn drop(&mut self) {
        let labels = Labels { call: self.call, result: self.result.as_str() };
        let histogram = self.calls.0.get_or_create_owned(&labels);
        histogram.observe(self.started.elapsed().as_secs_f64());
    }
}

/// Times of the calls of this process. Clones share them.
#[derive(Debug, Clone, Default)]
pub struct CallMetrics {
    pub(super) store: Calls,
    pub(super) dispatcher: Calls,
}

impl CallMetrics {
    /// Adds the metrics to a registry.
    pub fn register(&self, registry: &mut Registry) {
        let help = "Time of a store call as its caller sees it";
        registry.register("store_call_seconds", help, self.store.0.clone());
        let help =
            "Time of a dispatcher call as its caller sees it; pull includes the wait for jobs";
        registry.register("dispatcher_call_seconds", help, self.dispatcher.0.clone());
    }
}
