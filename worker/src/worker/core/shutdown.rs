//! How far the end of a worker has come.

use std::time::Instant;

use crate::worker::error::WorkerError;

/// How far the end of the worker has come.
#[derive(Debug)]
pub(super) enum Shutdown {
    /// The worker runs.
    No,
    /// It takes nothing new until running jobs have ended, or until this time, if there is a limit.
    Drain { until: Option<Instant> },
    /// It writes and hands back what it holds, until this time at most, and then ends with the result.
    Close { stage: Stage, until: Option<Instant>, result: Result<(), WorkerError> },
    /// It has ended.
    Exited,
}

/// The stages of a close. Each begins when the calls of the one before are answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    /// Current calls are answered: one may bring a claim, and commits keep their order.
    Answers,
    /// Results and checkpoints are written.
    Results,
    /// Running claims are handed back.
    Claims,
    /// Their deliveries are handed back.
    Deliveries,
}

impl Shutdown {
    /// Returns whether the worker starts no further work, even of jobs that it holds.
    pub fn is_closing(&self) -> bool {
        matches!(self, Self::Close { .. } | Self::Exited)
    }

    /// Returns the time at which the current stage ends at the latest.
    pub fn until(&self) -> Option<Instant> {
        match self {
            Self::Drain { until } | Self::Close { until, .. } => *until,
            Self::No | Self::Exited => None,
        }
    }
}
